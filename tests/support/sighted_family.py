"""SightedFamily: a family whose images are supported, in a tiny configuration, with the library's processor."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from engine.protocol import ImagePatches

PATCH = 8  # pixels per side
IMAGE_SIZE = 32  # pixels per side of towers that take one size

SPECIAL_TOKENS = (
    *("<pad>", "<|im_start|>", "<|im_end|>", "<image>", "<start>", "<end>", "<break>", "<video>"),
    *("<fake_token_around_image>", "<global-img>", *(f"<row_{r}_col_{c}>" for r in (1, 2, 3) for c in (1, 2, 3))),
)
IDS = {token: i for i, token in enumerate(SPECIAL_TOKENS)}
"""The special tokens of all members' tokenizers, whatever their family calls them."""

Pixels = dict[str, np.ndarray]
"""Arguments of the library's `get_input_embeddings`."""


@dataclass(frozen=True)
class SightedFamily:
    """One family.

    Attributes:
        config: config.json.
        processor: preprocessor_config.json.
        pixels: Prepares images with the library's own image processor of this configuration.
        placed: Returns the text that stands for an image in a prompt of the library, with all image tokens.
        template: What the chat template writes for an image; None: the template takes only text.
        seed: Of the random weights; chosen so that the two best tokens are never nearly equal, and that no answer has
            an image token.
        processor_config: processor_config.json.
        video: video_preprocessor_config.json; None for a family without videos.
        names: Of special tokens that the family calls otherwise.
        features: Returns the features of the images for the library's model, which does not compute them itself.
        embedder: Returns the function that embeds a prompt, for a library's model that takes one image per prompt.
        built: Context in which the library builds the model.
        rounded: Rounds normalised pixels as the library's processor does, and here the tower.
        images_first: What stands between the images of a prompt and its text, if they stand before it; else None.
        both_ways: Layers, "full" and "window", in which transformers lets the tokens of an image see each other, which
            the library does not.
        logits: Returns the logits [1, L, vocab] of the library's language model for embeddings [1, L, hidden] of which
            so many are the prompt's, where the tokens of a prompt see each other; None where they do not.
    """

    config: dict[str, Any]
    processor: dict[str, Any]
    pixels: Callable[[Sequence[Image.Image]], Pixels]
    placed: Callable[[ImagePatches], str]
    template: str | None = "<image>"
    seed: int = 0
    processor_config: dict[str, Any] = field(default_factory=dict)
    video: dict[str, Any] | None = None
    names: dict[str, str] = field(default_factory=dict)
    features: Callable[[Any, dict[str, Any]], Any] | None = None
    embedder: Callable[[Any, dict[str, Any]], Callable[[Any], Any]] | None = None
    built: Callable[[], AbstractContextManager[None]] = nullcontext
    rounded: Callable[[np.ndarray], np.ndarray] = lambda pixels: pixels
    images_first: str | None = None
    both_ways: frozenset[str] = frozenset()
    logits: Callable[[Any, Any, int], Any] | None = None


def sighted(model_type: str, text_config: dict[str, Any], vision: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a config.json."""
    return {
        "model_type": model_type,
        "text_config": text_config,
        "vision_config": vision,
        "image_token_id": IDS["<image>"],
        "eos_token_id": IDS["<|im_end|>"],
        **more,
    }


def prepared(processor: Any, settings: dict[str, Any], *keys: str) -> Callable[[Sequence[Image.Image]], Pixels]:
    """Return the function `pixels` for one of transformers' image processors. keys: what the library's model takes."""
    known = {key: value for key, value in settings.items() if key != "image_processor_type"}

    def pixels(images: Sequence[Image.Image]) -> Pixels:
        made = processor(**known)(images=[list(images)] if "Idefics3" in processor.__name__ else list(images))
        return {key: np.array(made[key]) for key in keys}

    return pixels


TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 16,
    "image_size": IMAGE_SIZE,
    "patch_size": PATCH,
}
NORMALIZED: dict[str, Any] = {"image_mean": [0.5, 0.4, 0.5], "image_std": [0.5, 0.5, 0.3]}
SQUARE = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
