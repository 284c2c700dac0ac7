"""Phi-3-vision in the vision zoo: tiles of the enlarged image in padding, and a square of the whole.

The reference is the published processor, written again in NumPy: mlx_vlm's stretches images.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np
from mlx_vlm.models.base import InputEmbeddingsFeatures
from mlx_vlm.models.phi3_v.vision import VisionModel
from PIL import Image

from engine.protocol import ImagePatches
from tests.support.families.family import text
from tests.support.sighted_family import IDS, NORMALIZED, Pixels, SightedFamily
from tests.support.view_families import embedder_of

SIDE, CLIP_PATCH = 336, 14  # pixels
SETTINGS: dict[str, Any] = {
    "image_processor_type": "Phi3VImageProcessor",
    "num_crops": 2,
    "num_img_tokens": 144,
    **NORMALIZED,
}
LONG_ROPE = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [1.0 + 0.25 * i for i in range(8)]}
CONFIG: dict[str, Any] = {
    **text("phi3_v", hidden_act="silu", rope_scaling=LONG_ROPE, original_max_position_embeddings=16),
    "eos_token_id": IDS["<|im_end|>"],
    "sliding_window": 4096,
    "embd_layer": {
        "embedding_cls": "image",
        "hd_transform_order": "sub_glb",
        "projection_cls": "mlp",
        "use_hd_transform": True,
        "with_learnable_separator": True,
    },
    "img_processor": {
        "image_dim_out": 1024,
        "model_name": "openai/clip-vit-large-patch14-336",
        "name": "clip_vision_model",
        "num_img_tokens": 144,
    },
}
"""As published, but for the sizes. All prompts are longer than the original context, so the long factors are used."""


@contextmanager
def small_tower() -> Iterator[None]:
    """Let the library build a small CLIP; its sizes are not in config.json, and the width is that of the projection."""
    sizes = {**vars(VisionModel.CLIP_VIT_LARGE_PATCH14_336_CONFIG), "num_hidden_layers": 2, "intermediate_size": 64}
    with mock.patch.object(VisionModel, "CLIP_VIT_LARGE_PATCH14_336_CONFIG", SimpleNamespace(**sizes)):
        yield


def padded(image: Image.Image, num_crops: int) -> Image.Image:
    """Enlarge an image to the sides of so many tiles, with white padding, as `HD_transform` of the processor does."""
    is_upright = image.width < image.height
    turned = image.transpose(Image.Transpose.TRANSPOSE) if is_upright else image
    ratio = turned.width / turned.height
    scale = max(n for n in range(1, num_crops + 1) if n * math.ceil(n / ratio) <= num_crops)
    across = scale * SIDE
    pixels = np.asarray(turned.resize((across, int(across / ratio)), Image.Resampling.BILINEAR))
    missing = -len(pixels) % SIDE
    margins = (missing // 2, missing - missing // 2)
    whole = np.pad(pixels, (margins, (0, 0), (0, 0)), constant_values=255)
    return Image.fromarray(whole.swapaxes(0, 1) if is_upright else whole)


def cubic(values: np.ndarray, length: int) -> np.ndarray:
    """Reduce the first axis by a whole factor, as PyTorch's bicubic interpolation without antialiasing does.

    The centre of a place is one of the values, or lies between two of them.
    """
    factor = len(values) // length
    if factor % 2:
        return values[factor // 2 :: factor]
    padded = np.concatenate([values[:1], values, values[-1:]])
    first = [padded[factor // 2 - 1 + i :: factor][:length] for i in range(4)]
    return (-3 * first[0] + 19 * first[1] + 19 * first[2] - 3 * first[3]) / 32


def views(image: Image.Image, num_crops: int) -> tuple[np.ndarray, tuple[int, int]]:
    """Return the square and the tiles, float32 [1 + tiles, 3, 336, 336], normalised; and the tiles' arrangement."""
    mean, std = (np.array(NORMALIZED[name], np.float32) for name in ("image_mean", "image_std"))
    whole = (np.asarray(padded(image, num_crops)).astype(np.float32) / 255 - mean) / std
    square = cubic(cubic(whole, SIDE).swapaxes(0, 1), SIDE).swapaxes(0, 1)
    rows, columns = (length // SIDE for length in whole.shape[:2])
    tiles = [
        whole[row * SIDE : (row + 1) * SIDE, column * SIDE : (column + 1) * SIDE]
        for row in range(rows)
        for column in range(columns)
    ]
    return np.stack([square, *tiles]).transpose(0, 3, 1, 2).astype(np.float32), (rows, columns)


def num_tokens(rows: int, columns: int) -> int:
    """Return the tokens of an image, as the processor counts them."""
    return (rows * columns + 1) * 144 + 1 + (rows + 1) * 12


def pixels_of(images: Sequence[Image.Image], num_crops: int = SETTINGS["num_crops"]) -> Pixels:
    """Prepare images as the published processor does.

    Returns:
        views: [num_images, 1 + most tiles, 3, 336, 336], as the library's model takes them.
        arrangements: Tiles along height and width of each image.
        pixel_values: The patches of the tiles of all images, [num_patches, 3 * 14 * 14].
    """
    made = [views(image, num_crops) for image in images]
    most = max(len(one) for one, _ in made)
    along = SIDE // CLIP_PATCH
    patches = [
        one[1:].reshape(-1, 3, along, CLIP_PATCH, along, CLIP_PATCH).transpose(0, 2, 4, 1, 3, 5) for one, _ in made
    ]
    return {
        "views": np.stack([np.pad(one, [(0, most - len(one)), (0, 0), (0, 0), (0, 0)]) for one, _ in made]),
        "arrangements": np.array([tiles for _, tiles in made]),
        "pixel_values": np.concatenate([one.reshape(-1, 3 * CLIP_PATCH**2) for one in patches]),
    }


def published_features(module: Any, arrays: dict[str, Any]) -> list[mx.array]:
    """Return the features [num_tokens, hidden] of each image, of the library's modules in the published order."""
    return [
        _features(module.vision_model, image[: 1 + rows * columns], rows, columns)
        for image, (rows, columns) in zip(arrays["views"], np.array(arrays["arrangements"]).tolist(), strict=True)
    ]


def _features(vision: VisionModel, one: mx.array, rows: int, columns: int) -> mx.array:
    states = vision.img_processor.vision_model(one.transpose(0, 2, 3, 1), True)[-1]
    merged = [_merged(np.array(state)) for state in states[-2][:, 1:]]
    lines = []
    for row in range(rows):
        of_row = merged[1 + row * columns : 1 + (row + 1) * columns]
        lines += [tile[line] for line in range(12) for tile in of_row]
    end, separator = (np.array(vector).reshape(1, -1) for vector in (vision.sub_GN, vision.glb_GN))
    parts: list[np.ndarray] = []
    for i in range(0, len(lines), columns):
        parts += [*lines[i : i + columns], end]
    parts.append(separator)
    for line in merged[0]:
        parts += [line, end]
    features = mx.array(np.concatenate(parts))
    for layer in vision.img_projection:
        features = layer(features)
    return features


def _merged(patches: np.ndarray) -> np.ndarray:
    """Return [12, 12, 4 * width] for the patches [24 * 24, width] of a view: those of a square side by side."""
    grid = patches.reshape(24, 24, -1)
    return np.concatenate([grid[y::2, x::2] for y in (0, 1) for x in (0, 1)], axis=-1)


def embedder(module: Any, arrays: dict[str, Any]) -> Callable[[mx.array], InputEmbeddingsFeatures]:
    return embedder_of(module, published_features(module, arrays))


def placed(image: ImagePatches) -> str:
    return "<|image|>" * num_tokens(*image.tiles) + "<s>\n"


PHI3_V = SightedFamily(
    CONFIG,
    SETTINGS,
    pixels_of,
    placed,
    None,
    seed=0,
    names={"<image>": "<|image|>", "<start>": "<s>"},
    embedder=embedder,
    built=small_tower,
)
