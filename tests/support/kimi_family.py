"""Kimi-VL and Kimi K2.5 in the vision zoo: images of their own size in black padding, one token per four patches."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from mlx_vlm.models.kimi_k25.processing_kimi_k25 import KimiK25ImageProcessor
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

K25_SETTINGS: dict[str, Any] = {
    "patch_size": PATCH,
    "merge_kernel_size": 2,
    "in_patch_limit": 48,
    "patch_limit_on_one_side": 24,
    "fixed_output_tokens": None,
    **NORMALIZED,
}


def k25_pixels(images: Sequence[Image.Image]) -> Pixels:
    names = {"in_token_limit": K25_SETTINGS["in_patch_limit"], "merge_kernel_size": [2, 2]}
    given = {name: K25_SETTINGS[name] for name in ("patch_size", "patch_limit_on_one_side", *NORMALIZED)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # mlx_vlm 0.7.10 calls Pillow's getdata
        made = KimiK25ImageProcessor(**given, **names)(list(images))
    return {name: np.array(made[name]) for name in ("pixel_values", "image_grid_hws")}


_k25_text = VISION_FAMILIES["kimi_k25"].config
KIMI_K25 = SightedFamily(
    {
        **{key: value for key, value in _k25_text.items() if key != "image_token_id"},
        "media_placeholder_token_id": IDS["<image>"],
        "eos_token_id": IDS["<|im_end|>"],
        "vision_config": {
            **KIMI_VL.config["vision_config"],
            "merge_type": "sd2_tpool",
            "mm_projector_type": "patchmerger",
            "pos_emb_type": "divided_fixed",
            "projector_hidden_act": "gelu",
            "projector_ln_eps": 1e-5,
        },
    },
    {"media_proc_cfg": K25_SETTINGS},
    k25_pixels,
    lambda image: f"<|media_begin|>image<|media_content|>{'<|media_pad|>' * image.num_tokens}<|media_end|>",
    "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>",
    seed=1,
    names=KIMI_VL.names,
)
