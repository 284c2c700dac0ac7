"""Families of the vision zoo whose towers take a padded square of the whole image and smaller tiles of it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np
from mlx_vlm.models.base import InputEmbeddingsFeatures
from mlx_vlm.models.deepseekocr import deepseekocr
from mlx_vlm.models.deepseekocr.config import SAMViTConfig
from mlx_vlm.models.deepseekocr.processing_deepseekocr import DeepseekOCRProcessor, ImageTransform
from PIL import Image

from engine.protocol import ImagePatches
from tests.support.families.family import EXPERTS, text
from tests.support.sighted_family import IDS, Pixels, SightedFamily, sighted

BLOCK, SAM_PATCH = 128, 16  # pixels per side
TILE = 640  # pixels per side

SETTINGS: dict[str, Any] = {
    "processor_class": "DeepseekVLV2Processor",
    "candidate_resolutions": [[1024, 1024]],
    "downsample_ratio": 4,
    "image_mean": [0.5, 0.4, 0.5],
    "image_std": [0.5, 0.5, 0.3],
    "image_token": "<image>",
    "normalize": True,
    "patch_size": SAM_PATCH,
}


def library_processor() -> Any:
    """Return the library's processor with a tokenizer that knows the image token alone."""
    processor: Any = DeepseekOCRProcessor.__new__(DeepseekOCRProcessor)
    processor.image_token, processor.image_token_id = "<image>", IDS["<image>"]
    processor.tokenizer = SimpleNamespace(encode=lambda words, add_special_tokens: [])
    processor.image_transform = ImageTransform(SETTINGS["image_mean"], SETTINGS["image_std"])
    return processor


def view_pixels(images: Sequence[Image.Image]) -> Pixels:
    """Prepare images with the library's processor.

    Returns:
        squares: [num_images, 3, 1024, 1024].
        tiles: [num_tiles, 3, 640, 640], those of the first image first.
        crops: Tiles along width and height of each image.
        pixel_values: The patches of each image's square and tiles, [num_patches, 3 * 16 * 16], block by block.
    """
    made = [_views(image) for image in images]
    patches = [in_patches(view) for square, tiles, _ in made for view in (*square, *tiles)]
    return {
        "squares": np.concatenate([square for square, _, _ in made]),
        "tiles": np.concatenate([tiles for _, tiles, _ in made]),
        "crops": np.stack([crops for _, _, crops in made]),
        "pixel_values": np.concatenate(patches),
    }


def _views(image: Image.Image) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return an image's square, its tiles and their number along width and height."""
    _, (tiles, square), _, crops, _ = library_processor().tokenize_with_images("<image>", [image])
    is_cut = np.array(crops).max() > 1
    found = np.array(tiles.astype(mx.float32)) if is_cut else np.zeros((0, 3, TILE, TILE), np.float32)
    return np.array(square.astype(mx.float32)), found, np.array(crops)[0]


def rounded(pixels: np.ndarray) -> np.ndarray:
    """Round to bfloat16, as the library's processor does."""
    return np.array(mx.array(pixels).astype(mx.bfloat16).astype(mx.float32))


def in_patches(view: np.ndarray) -> np.ndarray:
    """Return the patches of a view [3, side, side], those of a block behind each other."""
    patches = []
    for top in range(0, view.shape[1], BLOCK):
        for left in range(0, view.shape[2], BLOCK):
            block = view[:, top : top + BLOCK, left : left + BLOCK]
            corners = [(y, x) for y in range(0, BLOCK, SAM_PATCH) for x in range(0, BLOCK, SAM_PATCH)]
            patches += [block[:, y : y + SAM_PATCH, x : x + SAM_PATCH].reshape(-1) for y, x in corners]
    return np.stack(patches)


def view_placed(image: ImagePatches) -> str:
    """Return the tokens of the library's processor for an image that it cuts into the same tiles."""
    rows, columns = image.tiles
    same = Image.new("RGB", (columns * TILE, rows * TILE) if rows else (8, 8))
    ids, *_ = library_processor().tokenize_with_images("<image>", [same])
    return "<image>" * ids.count(IDS["<image>"])


def view_features(module: Any, pixels: dict[str, Any]) -> list[mx.array]:
    """Return the features [num_tokens, hidden] of each image as the library's model computes them.

    The model takes one image per prompt, so each is embedded alone, in a prompt of its image tokens.
    """
    features, start = [], 0
    for square, (width, height) in zip(pixels["squares"], np.array(pixels["crops"]).tolist(), strict=True):
        num_tiles = width * height if max(width, height) > 1 else 0
        tiles, start = pixels["tiles"][start : start + num_tiles], start + num_tiles
        num_tokens = 16 * 17 + 1 + (10 * height * (10 * width + 1) if num_tiles else 0)
        embedded = module.get_input_embeddings(
            mx.full((1, num_tokens), IDS["<image>"]),
            pixel_values=[tiles if num_tiles else mx.zeros((1, 3, 8, 8)), square[None]],
            images_spatial_crop=mx.array([[width, height]]),
            images_seq_mask=mx.ones((1, num_tokens), mx.bool_),
        )
        features.append(embedded.inputs_embeds[0])
    return features


def view_embedder(module: Any, pixels: dict[str, Any]) -> Callable[[mx.array], InputEmbeddingsFeatures]:
    features = mx.concatenate(view_features(module, pixels))

    def embed(ids: mx.array) -> InputEmbeddingsFeatures:
        embeds = module.get_input_embeddings(ids).inputs_embeds
        embeds[0, mx.array(np.flatnonzero(np.array(ids[0]) == IDS["<image>"]))] = features
        return InputEmbeddingsFeatures(inputs_embeds=embeds)

    return embed


@contextmanager
def small_sam() -> Iterator[None]:
    """Let the library build a small SAM; its sizes are not in config.json."""
    sizes = SAMViTConfig(width=32, layers=2, heads=2, global_attn_indexes=(1,))
    with mock.patch.object(deepseekocr, "SAMViTConfig", lambda: sizes):
        yield


DEEPSEEK_OCR = SightedFamily(
    sighted(
        "deepseekocr",
        text("deepseek_v2", EXPERTS, qk_nope_head_dim=0, norm_topk_prob=False),
        {
            "model_type": "vision",
            "layers": 2,
            "hidden_size": 1024,  # that of SAM's last convolution
            "intermediate_size": 64,
            "num_attention_heads": 4,
        },
        projector_config={"projector_type": "linear", "input_dim": 2048, "n_embed": 64},
    ),
    SETTINGS,
    view_pixels,
    view_placed,
    "<image>",
    seed=2,
    embedder=view_embedder,
    built=small_sam,
    rounded=rounded,
)
