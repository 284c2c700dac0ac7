"""Llama 4 in the vision zoo: tiles of a canvas, and a square of the whole image.

The image processor of transformers needs torch and torchvision. Its own source is run here with NumPy in their place:
sizes, tiles and padding are those that it computes. Arrays divide float32 by integers as tensors do; Pillow resizes,
and pixels are normalised in float32, where the processor rounds them to bfloat16.
"""

import __future__

import ast
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import transformers
from PIL import Image
from transformers.models.llama4.processing_llama4 import Llama4Processor

from engine.protocol import ImagePatches
from tests.support.families.family import WINDOW, text
from tests.support.sighted_family import IDS, IMAGE_SIZE, PATCH, SQUARE, Pixels, SightedFamily, sighted

PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Llama4ImageProcessorFast",
    "size": SQUARE,
    "max_patches": 4,
    "resample": 2,
    "image_mean": [0.5, 0.4, 0.5],
    "image_std": [0.5, 0.5, 0.3],
}


class Tensor(np.ndarray[Any, Any]):
    """An array with the methods of a tensor that the processor calls."""

    def unsqueeze(self, axis: int) -> "Tensor":
        return np.expand_dims(self, axis).view(Tensor)


class Size(NamedTuple):
    height: int
    width: int


def _tensor(values: Any, device: str) -> Tensor:
    return np.array(values, np.float32).view(Tensor)


def _resized(processor: Any, images: Tensor, size: Any, resample: int) -> Tensor:
    shape = int(size.width), int(size.height)
    pictures = [Image.fromarray(np.array(one, np.uint8).transpose(1, 2, 0)) for one in images]
    resized = [np.asarray(one.resize(shape, resample=resample)).transpose(2, 0, 1) for one in pictures]
    return np.stack(resized).view(Tensor)


def _padded(images: Tensor, size: Any) -> Tensor:
    height, width = (int(whole) - own for whole, own in zip(size, images.shape[-2:], strict=True))
    return np.pad(images, ((0, 0), (0, 0), (0, height), (0, width))).view(Tensor)


def _normalized(
    processor: Any, images: Tensor, do_rescale: bool, factor: float, do_normalize: bool, mean: Any, std: Any
) -> Tensor:
    mean, std = (np.array(value, np.float32)[:, None, None] for value in (mean, std))
    return ((np.float32(factor) * images.astype(np.float32) - mean) / std).view(Tensor)


def _split(images: Tensor, num_rows: Any, num_columns: Any) -> Tensor:
    rows = [np.split(row, int(num_columns), axis=-1) for row in np.split(images, int(num_rows), axis=-2)]
    return np.stack([tile for row in rows for tile in row], axis=1).view(Tensor)


def _cat(arrays: Sequence[Tensor], dim: int) -> Tensor:
    return np.concatenate(arrays, axis=dim).view(Tensor)


@cache
def published() -> dict[str, Any]:
    """Return the functions of the published module, and its class's `_preprocess`, by name."""
    assert transformers.__file__ is not None
    path = Path(transformers.__file__).parent / "models" / "llama4" / "image_processing_llama4.py"
    tree = ast.parse(path.read_text())
    found: list[ast.stmt] = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    for one in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        found += [node for node in one.body if isinstance(node, ast.FunctionDef) and node.name == "_preprocess"]
    torch = SimpleNamespace(where=np.where, min=np.min, max=np.max, argmin=np.argmin, tensor=_tensor, cat=_cat)
    names: dict[str, Any] = {
        "BatchFeature": lambda data, tensor_type: data,
        "SizeDict": Size,
        "defaultdict": defaultdict,
        "group_images_by_shape": lambda images, disable_grouping: (
            {images[0].shape: np.stack(images).view(Tensor)},
            None,
        ),
        "lru_cache": lru_cache,
        "math": math,
        "reorder_images": lambda grouped, index: [one for stacked in grouped.values() for one in stacked],
        "split_to_tiles": _split,
        "torch": torch,
    }
    code = compile(ast.Module(found, []), str(path), "exec", __future__.annotations.compiler_flag)
    exec(code, names)  # noqa: S102  # the installed package's own source
    names["pad_to_best_fit"] = _padded
    return names


class Published:
    """The published image processor with some settings."""

    resize = _resized
    rescale_and_normalize = _normalized

    def __init__(self, settings: dict[str, Any]):
        self._settings = settings

    def __call__(self, image: Image.Image) -> tuple[np.ndarray, tuple[int, int]]:
        """Return the normalised tiles [tiles, 3, height, width] of an image, and the tiles along height and width."""
        settings = self._settings
        made = published()["_preprocess"](
            self,
            [np.asarray(image).transpose(2, 0, 1).view(Tensor)],
            do_resize=True,
            size=Size(**settings["size"]),
            resample=settings["resample"],
            do_rescale=True,
            rescale_factor=1 / 255,
            do_normalize=True,
            image_mean=settings["image_mean"],
            image_std=settings["image_std"],
            max_patches=settings["max_patches"],
            resize_to_max_canvas=False,
            disable_grouping=None,
            return_tensors=None,
        )
        rows, columns = made["aspect_ratios"][0]
        return np.array(made["pixel_values"][0]), (int(rows), int(columns))


def pixels_of(images: Sequence[Image.Image]) -> Pixels:
    return {"pixel_values": np.concatenate([Published(PROCESSOR)(image)[0] for image in images])}


def placed_by(num_tokens: int) -> Callable[[ImagePatches], str]:
    """num_tokens: Of a tile."""

    def placed(image: ImagePatches) -> str:
        processor: Any = object.__new__(Llama4Processor)
        return processor._prompt_split_image(image.tiles, num_tokens)

    return placed


LLAMA4 = SightedFamily(
    sighted(
        "llama4",
        text(
            "llama4_text",
            num_hidden_layers=4,
            intermediate_size_mlp=128,
            num_local_experts=4,
            num_experts_per_tok=1,
            interleave_moe_layer_step=2,
            attention_chunk_size=2 * WINDOW,
            floor_scale=8,
            attn_scale=0.5,
        ),
        {
            "model_type": "llama4_vision_model",
            "hidden_act": "gelu",
            "hidden_size": 32,
            "image_size": IMAGE_SIZE,
            "initializer_range": 0.02,
            "intermediate_size": 128,
            "multi_modal_projector_bias": False,
            "norm_eps": 1e-5,
            "num_attention_heads": 2,
            "num_channels": 3,
            "num_hidden_layers": 2,
            "patch_size": PATCH,
            "pixel_shuffle_ratio": 0.5,
            "projector_dropout": 0.0,
            "projector_input_dim": 64,
            "projector_output_dim": 64,
            "rope_theta": 10000.0,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "default",
            "vision_output_dim": 64,
        },
        image_token_index=IDS["<image>"],
    ),
    PROCESSOR,
    pixels_of,
    placed_by(4),
    "<|image|>",
    seed=0,
    processor_config={"processor_class": "Llama4Processor", "patch_size": PATCH, "pixel_shuffle_ratio": 0.5},
    names={
        "<image>": "<|patch|>",
        "<start>": "<|image_start|>",
        "<end>": "<|image_end|>",
        "<break>": "<|image|>",
        "<fake_token_around_image>": "<|tile_x_separator|>",
        "<global-img>": "<|tile_y_separator|>",
    },
)
