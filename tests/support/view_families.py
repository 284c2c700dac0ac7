"""Families of the vision zoo whose towers take a padded square of the whole image and smaller tiles of it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np
from mlx_vlm.models.base import InputEmbeddingsFeatures
from mlx_vlm.models.deepseekocr import deepseekocr
from mlx_vlm.models.deepseekocr.config import SAMViTConfig
from mlx_vlm.models.deepseekocr.processing_deepseekocr import DeepseekOCRProcessor, ImageTransform
from mlx_vlm.models.deepseekocr_2 import deepseekocr_2
from mlx_vlm.models.deepseekocr_2 import vision as vision_2
from mlx_vlm.models.deepseekocr_2.config import Qwen2EncoderConfig
from mlx_vlm.models.deepseekocr_2.processing_deepseekocr import DeepseekOCR2Processor
from PIL import Image

from engine.protocol import ImagePatches
from tests.support.families.family import EXPERTS, text
from tests.support.sighted_family import IDS, Pixels, SightedFamily, sighted

SAM_PATCH = 16  # pixels per side

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


@dataclass(frozen=True)
class Views:
    """One of the library's two models.

    Attributes:
        processor_class: The library's processor.
        tile: Pixels per side of a tile.
        block: Pixels per side of the largest square that divides both views.
        cutting: Arguments of the processor for an image that is cut.
        uncut: Arguments of the processor for another one.
    """

    processor_class: Any
    tile: int
    block: int
    cutting: dict[str, Any]
    uncut: dict[str, Any]

    def prepared(self, image: Image.Image) -> tuple[list[int], np.ndarray, np.ndarray, np.ndarray]:
        """Return the tokens of an image, its square, its tiles, and their number along width and height."""
        processor: Any = self.processor_class.__new__(self.processor_class)
        processor.image_token, processor.image_token_id = "<image>", IDS["<image>"]
        processor.tokenizer = SimpleNamespace(encode=lambda words, add_special_tokens: [])
        processor.image_transform = ImageTransform(SETTINGS["image_mean"], SETTINGS["image_std"])
        is_cut = max(image.size) > self.tile
        options = self.cutting if is_cut else self.uncut
        ids, (tiles, square), _, crops, _ = processor.tokenize_with_images("<image>", [image], **options)
        found = np.array(tiles.astype(mx.float32)) if is_cut else np.zeros((0, 3, self.tile, self.tile), np.float32)
        return ids, np.array(square.astype(mx.float32)), found, np.array(crops)[0]

    def num_tokens(self, image: Image.Image) -> int:
        """Return the image tokens that the library's processor gives an image."""
        return self.prepared(image)[0].count(IDS["<image>"])

    def pixels(self, images: Sequence[Image.Image]) -> Pixels:
        """Prepare images with the library's processor.

        Returns:
            squares: [num_images, 3, 1024, 1024].
            tiles: [num_tiles, 3, tile, tile], those of the first image first.
            crops: Tiles along width and height of each image.
            counts: Image tokens of each image.
            pixel_values: The patches of each image's square and tiles, [num_patches, 3 * 16 * 16], block by block.
        """
        made = [self.prepared(image) for image in images]
        patches = [self.in_patches(view) for _, square, tiles, _ in made for view in (*square, *tiles)]
        return {
            "squares": np.concatenate([square for _, square, _, _ in made]),
            "tiles": np.concatenate([tiles for _, _, tiles, _ in made]),
            "crops": np.stack([crops for _, _, _, crops in made]),
            "counts": np.array([ids.count(IDS["<image>"]) for ids, _, _, _ in made]),
            "pixel_values": np.concatenate(patches),
        }

    def in_patches(self, view: np.ndarray) -> np.ndarray:
        """Return the patches of a view [3, side, side], those of a block behind each other."""
        patches = []
        for top in range(0, view.shape[1], self.block):
            for left in range(0, view.shape[2], self.block):
                block = view[:, top : top + self.block, left : left + self.block]
                starts = range(0, self.block, SAM_PATCH)
                patches += [block[:, y : y + SAM_PATCH, x : x + SAM_PATCH].reshape(-1) for y in starts for x in starts]
        return np.stack(patches)

    def placed(self, image: ImagePatches) -> str:
        """Return the tokens of the library's processor for an image that it cuts into the same tiles."""
        rows, columns = image.tiles
        same = Image.new("RGB", (columns * self.tile, rows * self.tile) if rows else (8, 8))
        return "<image>" * self.num_tokens(same)


def rounded(pixels: np.ndarray) -> np.ndarray:
    """Round to bfloat16, as the library's processor does."""
    return np.array(mx.array(pixels).astype(mx.bfloat16).astype(mx.float32))


def view_features(module: Any, pixels: dict[str, Any]) -> list[mx.array]:
    """Return the features [num_tokens, hidden] of each image as the library's model computes them.

    The model takes one image per prompt, so each is embedded alone, in a prompt of its image tokens.
    """
    features, start = [], 0
    crops, counts = np.array(pixels["crops"]).tolist(), np.array(pixels["counts"]).tolist()
    for square, (width, height), num_tokens in zip(pixels["squares"], crops, counts, strict=True):
        num_tiles = width * height if max(width, height) > 1 else 0
        tiles, start = pixels["tiles"][start : start + num_tiles], start + num_tiles
        embedded = module.get_input_embeddings(
            mx.full((1, num_tokens), IDS["<image>"]),
            pixel_values=[tiles if num_tiles else mx.zeros((1, 3, 8, 8)), square[None]],
            images_spatial_crop=mx.array([[width, height]]),
            images_seq_mask=mx.ones((1, num_tokens), mx.bool_),
        )
        features.append(embedded.inputs_embeds[0])
    return features


def view_embedder(module: Any, pixels: dict[str, Any]) -> Callable[[mx.array], InputEmbeddingsFeatures]:
    return embedder_of(module, view_features(module, pixels))


def embedder_of(module: Any, features: Sequence[mx.array]) -> Callable[[mx.array], InputEmbeddingsFeatures]:
    """Return the function that embeds a prompt with images of these features [num_tokens, hidden]."""
    of_images = mx.concatenate(list(features))

    def embed(ids: mx.array) -> InputEmbeddingsFeatures:
        embeds = module.get_input_embeddings(ids).inputs_embeds
        embeds[0, mx.array(np.flatnonzero(np.array(ids[0]) == IDS["<image>"]))] = of_images
        return InputEmbeddingsFeatures(inputs_embeds=embeds)

    return embed


@contextmanager
def small_towers() -> Iterator[None]:
    """Let the library build a small SAM and a small Qwen2 encoder; their sizes are not in config.json."""
    sam = SAMViTConfig(width=32, layers=2, heads=2, global_attn_indexes=(1,))
    encoder = Qwen2EncoderConfig(layers=2, intermediate_size=64)
    with (
        mock.patch.object(deepseekocr, "SAMViTConfig", lambda: sam),
        mock.patch.object(deepseekocr_2, "SAMViTConfig", lambda: sam),
        mock.patch.object(vision_2, "Qwen2EncoderConfig", lambda **sizes: encoder),
    ):
        yield


def of_views(model_type: str, views: Views, vision: dict[str, Any], width: int, seed: int = 0) -> SightedFamily:
    """Return a family. width: of the projector's input."""
    built: Callable[[], AbstractContextManager[None]] = small_towers
    return SightedFamily(
        sighted(
            model_type,
            text("deepseek_v2", EXPERTS, qk_nope_head_dim=0, norm_topk_prob=False),
            {"model_type": "vision", **vision},
            projector_config={"projector_type": "linear", "input_dim": width, "n_embed": 64},
        ),
        SETTINGS,
        views.pixels,
        views.placed,
        "<image>",
        seed,
        embedder=view_embedder,
        built=built,
        rounded=rounded,
    )


VIEWS = Views(DeepseekOCRProcessor, tile=640, block=128, cutting={}, uncut={})
VIEWS_2 = Views(DeepseekOCR2Processor, tile=768, block=256, cutting={"min_patches": 2}, uncut={"cropping": False})

# The sizes of what stands between the encoders are fixed in the library: 1024 and 896 channels
CLIP = {"layers": 2, "hidden_size": 1024, "intermediate_size": 64, "num_attention_heads": 4}
DEEPSEEK_OCR = of_views("deepseekocr", VIEWS, CLIP, width=2048, seed=2)
DEEPSEEK_OCR_2 = of_views("deepseekocr_2", VIEWS_2, {"width": {"qwen2-0-5b": {"dim": 896}}}, width=896, seed=7)
