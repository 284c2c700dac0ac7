"""DeepSeek-VL2 in the vision zoo: a square of the whole image and tiles of it, both in padding."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.models.base import InputEmbeddingsFeatures
from mlx_vlm.models.deepseek_vl_v2.processing_deepsek_vl_v2 import DeepseekVLV2Processor, ImageTransform
from PIL import Image

from engine.protocol import ImagePatches
from tests.support.families.family import EXPERTS, text
from tests.support.sighted_family import IDS, PATCH, Pixels, SightedFamily, sighted

SIDE = 28  # pixels of a tile: three whole patches of 8, which two tokens share with padding
RESOLUTIONS = [[28, 28], [28, 56], [56, 28], [56, 56], [84, 28]]
PROCESSOR: dict[str, Any] = {
    "processor_class": "DeepseekVLV2Processor",
    "candidate_resolutions": RESOLUTIONS,
    "downsample_ratio": 2,
    "image_mean": [0.5, 0.4, 0.5],
    "image_std": [0.5, 0.5, 0.3],
    "image_token": "<image>",
    "normalize": True,
    "patch_size": PATCH,
    "sft_format": "deepseek",
}


def prepared(image: Image.Image, settings: dict[str, Any] = PROCESSOR) -> tuple[int, np.ndarray, list[int]]:
    """Return the tokens of an image, its views [1 + tiles, 3, side, side], and the tiles along width and height."""
    processor: Any = object.__new__(DeepseekVLV2Processor)
    processor.image_token, processor.image_token_id = "<image>", IDS["<image>"]
    processor.tokenizer = SimpleNamespace(encode=lambda words, add_special_tokens: [])
    processor.image_transform = ImageTransform(settings["image_mean"], settings["image_std"])
    processor.candidate_resolutions = settings["candidate_resolutions"]
    processor.image_size = settings["candidate_resolutions"][0][0]
    processor.patch_size, processor.downsample_ratio = settings["patch_size"], settings["downsample_ratio"]
    ids, views, _, [crops], _ = processor.tokenize_with_images("<image>", [image], bos=False, eos=False)
    return len(ids), np.stack([np.array(view) for view in views]), crops


def pixels_of(images: Sequence[Image.Image]) -> Pixels:
    """Prepare images with the library's processor, one by one: it cuts none of more than two images of a prompt.

    Returns:
        pixel_values: [num_views, 3, side, side], of all images.
        crops: Tiles along width and height of each image.
    """
    made = [prepared(image) for image in images]
    return {
        "pixel_values": np.concatenate([views for _, views, _ in made]),
        "crops": np.array([crops for _, _, crops in made]),
    }


def embedder(module: Any, arrays: dict[str, Any]) -> Callable[[mx.array], InputEmbeddingsFeatures]:
    views, crops = arrays["pixel_values"], np.array(arrays["crops"])
    padded = np.zeros((1, len(views), 2), np.int32)  # the library looks for as many images as there are views
    padded[0, : len(crops)] = crops

    def embed(ids: mx.array) -> InputEmbeddingsFeatures:
        where = np.array(ids) == IDS["<image>"]
        return module.get_input_embeddings(
            ids, pixel_values=views[None], images_spatial_crop=mx.array(padded), images_seq_mask=where
        )

    return embed


def placed(image: ImagePatches) -> str:
    """Return the tokens of the library's processor for an image that it cuts into the same tiles."""
    rows, columns = image.tiles
    num_tokens, _, crops = prepared(Image.new("RGB", (columns * SIDE, rows * SIDE)))
    assert crops == [columns, rows]
    return "<image>" * num_tokens


DEEPSEEK_VL2 = SightedFamily(
    sighted(
        "deepseek_vl_v2",
        text("deepseek_v2", EXPERTS, qk_nope_head_dim=0, norm_topk_prob=False),
        {
            "model_type": "vision",
            "layers": 2,
            "width": 32,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "mlp_ratio": 2.0,
            "image_size": SIDE,
            "patch_size": PATCH,
        },
        projector_config={
            "projector_type": "downsample_mlp_gelu",
            "input_dim": 32,
            "n_embed": 64,
            "depth": 2,
            "mlp_ratio": 1,
            "downsample_ratio": 2,
        },
        candidate_resolutions=RESOLUTIONS,
        global_view_pos="head",
        tile_tag="2D",
    ),
    PROCESSOR,
    pixels_of,
    placed,
    embedder=embedder,
    seed=0,
)
