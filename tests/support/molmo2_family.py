"""Molmo2 in the vision zoo: a square of the whole image and overlapping crops of it."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from mlx_vlm.models.molmo2.processing import Molmo2ImageProcessor, Molmo2Processor
from PIL import Image

from engine.protocol import ImagePatches
from tests.support.families.family import text
from tests.support.sighted_family import IDS, NORMALIZED, PATCH, TOWER, Pixels, SightedFamily

CROP_SIDE = 5  # patches; odd, so that the last square of a row has two of them
SIZE = {"height": CROP_SIDE * PATCH, "width": CROP_SIDE * PATCH}
HEADS = {name: TOWER[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim")}
CONFIG: dict[str, Any] = {
    "model_type": "molmo2",
    "text_config": text("molmo2", additional_vocab_size=8),
    "vit_config": {
        **HEADS,
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,  # of which the checkpoint has the first three
        "image_patch_size": PATCH,
        "image_num_pos": CROP_SIDE**2,
        "image_default_input_size": list(SIZE.values()),
    },
    "adapter_config": {
        **HEADS,
        "num_key_value_heads": 2,
        "text_hidden_size": 64,
        "vit_layers": [-2, -3],
        "pooling_attention_mask": True,
    },
    "image_patch_id": IDS["<image>"],
    "image_end_token_id": IDS["<end>"],
    "eos_token_id": IDS["<|im_end|>"],
}
PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Molmo2ImageProcessor",
    "size": SIZE,
    "patch_size": PATCH,
    "max_crops": 6,
    "overlap_margins": [1, 1],
    "pooling_size": [2, 2],
    "resample": 2,
    **NORMALIZED,
}
COLUMNS = {"image_use_col_tokens": True, "use_single_crop_col_tokens": False, "use_single_crop_start_token": True}
"""processor_config.json, as in the published checkpoints."""
NAMES = {
    "<image>": "<im_patch>",
    "<start>": "<low_res_im_start>",
    "<end>": "<im_end>",
    "<break>": "<im_col>",
    "<global-img>": "<im_start>",
    "<fake_token_around_image>": "<|image|>",
}


def library_pixels(settings: dict[str, Any], images: Sequence[Image.Image]) -> Pixels:
    """Prepare images with the library's processor. settings: preprocessor_config.json."""
    known = {key: value for key, value in settings.items() if key != "image_processor_type"}
    made: Any = Molmo2ImageProcessor(**known)(list(images))
    names = ("pixel_values", "image_token_pooling", "image_grids", "image_num_crops")
    return {name: np.array(made[name]) for name in names}


def library_placed(grid: Sequence[int], columns: dict[str, Any]) -> str:
    """Return the text of an image with all image tokens. columns: processor_config.json."""
    processor: Any = SimpleNamespace(**columns)
    return Molmo2Processor.get_image_tokens(processor, grid)  # type: ignore[arg-type]


def placed(image: ImagePatches) -> str:
    side, *whole = (-(-length // 2) for length in (image.grid_thw[1], *image.unpadded))
    return library_placed((side, side, *whole), COLUMNS)


MOLMO2 = SightedFamily(
    CONFIG,
    PROCESSOR,
    lambda images: library_pixels(PROCESSOR, images),
    placed,
    "<|image|>",
    24,
    processor_config=COLUMNS,
    names=NAMES,
)
