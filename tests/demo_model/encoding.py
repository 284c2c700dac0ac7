"""Document: a sample as tokens, weights, positions and image patches."""

from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image
from tokenizers import Tokenizer

from engine.demo import DEMO_MODEL
from engine.processing.patch_grid import PatchGrid
from tests.demo_model.tasks.sample import Sample, segments

PATCH_GRID = PatchGrid(
    patch_size=16, merge_size=2, min_pixels=64 * 64, max_pixels=256 * 256, resample=Image.Resampling.BICUBIC
)
PAD_TOKEN_ID, IMAGE_TOKEN_ID, VIDEO_TOKEN_ID = 0, 6, 7
PLAIN_TEXT_WEIGHT = 0.5


@dataclass(frozen=True)
class ImageGrid:
    """Patches in the order of the processor: those that share a token are neighbors."""

    patches: np.ndarray  # uint8 [num_patches, 3 * patch_size * patch_size]
    height: int  # in patches
    width: int

    @property
    def token_hw(self) -> tuple[int, int]:
        """Return height and width in tokens."""
        return self.height // PATCH_GRID.merge_size, self.width // PATCH_GRID.merge_size


@dataclass(frozen=True)
class Document:
    """A token is learned with its weight: 1 in answers, less elsewhere, 0 for images."""

    token_ids: np.ndarray  # int32 [num_tokens]
    weights: np.ndarray  # float32 [num_tokens]
    positions: np.ndarray  # int32 [3, num_tokens]: time, height, width
    images: tuple[ImageGrid, ...] = ()
    task: str = "plain_text"

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@cache
def tokenizer() -> Tokenizer:
    """Return the demo model's tokenizer. It cannot be trained again for weights that exist."""
    return Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


def encode_text(text: str) -> list[int]:
    """Return the tokens of a text, special ones included."""
    return tokenizer().encode(text, add_special_tokens=False).ids


def encode_sample(sample: Sample, prompt_weight: float) -> Document:
    """Return a conversation as a document. prompt_weight: of all tokens but those of answers."""
    token_ids: list[int] = []
    weights: list[float] = []
    for segment in segments(sample):
        ids = encode_text(segment.text)
        token_ids += ids
        weights += [1.0 if segment.is_answer else prompt_weight] * len(ids)
    return make_document(token_ids, weights, tuple(cut_image(image) for image in sample.images), sample.task)


def encode_plain_text(text: str) -> Document:
    """Return a text without a chat around it as a document."""
    token_ids = [*encode_text(text), PAD_TOKEN_ID]
    return make_document(token_ids, [PLAIN_TEXT_WEIGHT] * len(token_ids))


def cut_image(image: Image.Image) -> ImageGrid:
    """Return an image as the model sees it, scaled to the limits of its processor."""
    cut = PATCH_GRID.cut(image)
    return ImageGrid(cut.patches.reshape(len(cut.patches), -1), *cut.layout.grid_thw[1:])


def make_document(
    token_ids: list[int], weights: list[float], images: tuple[ImageGrid, ...] = (), task: str = "plain_text"
) -> Document:
    """Return a document in which each placeholder is as long as its image; its first token is not learned."""
    left = iter(images)
    ids, kept_weights, positions, start = [], [], [], 0
    for token_id, weight in zip(token_ids, weights, strict=True):
        is_image = token_id in (IMAGE_TOKEN_ID, VIDEO_TOKEN_ID)
        height, width = next(left).token_hw if is_image else (1, 1)
        ids += [token_id] * (height * width)
        kept_weights += [0.0 if is_image else weight] * (height * width)
        positions += [(start, start + row, start + column) for row in range(height) for column in range(width)]
        start += max(height, width)
    kept_weights[0] = 0.0
    return Document(
        np.array(ids, np.int32),
        np.array(kept_weights, np.float32),
        np.array(positions, np.int32).T,
        images,
        task,
    )
