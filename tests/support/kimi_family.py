"""Kimi-VL in the vision zoo: images of their own size in black padding, four patches of which share a token."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from mlx_vlm.models.kimi_vl.processing_kimi_vl import KimiVLImageProcessor
from PIL import Image

from tests.support.families.vision import VISION_FAMILIES
from tests.support.sighted_family import IDS, NORMALIZED, PATCH, Pixels, SightedFamily

SETTINGS: dict[str, Any] = {
    "patch_size": PATCH,
    "merge_kernel_size": [2, 2],
    "in_token_limit": 48,
    "pad_input": True,
    **NORMALIZED,
}


def library_pixels(images: Sequence[Image.Image]) -> Pixels:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # mlx_vlm 0.7.10 calls Pillow's getdata
        made = KimiVLImageProcessor(**SETTINGS)(list(images))
    return {name: np.array(made[name]) for name in ("pixel_values", "image_grid_hws")}


_text = VISION_FAMILIES["kimi_vl"].config
KIMI_VL = SightedFamily(
    {
        **{key: value for key, value in _text.items() if key != "image_token_id"},
        "media_placeholder_token_id": IDS["<image>"],
        "eos_token_id": IDS["<|im_end|>"],
        "vision_config": {
            "model_type": "moonvit",
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 64,
            "patch_size": PATCH,
            "init_pos_emb_height": 4,
            "init_pos_emb_width": 4,
            "merge_kernel_size": [2, 2],
        },
    },
    {"image_processor_type": "KimiVLImageProcessor", **SETTINGS},
    library_pixels,
    lambda image: "<|media_pad|>" * image.num_tokens,
    "<|media_pad|>",
    seed=0,
    names={"<image>": "<|media_pad|>"},
)
