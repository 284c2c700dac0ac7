"""LFM2-VL in the vision zoo: tiles and a thumbnail, and images in one piece."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from mlx_vlm.models.lfm2_vl.processing_lfm2_vl import Lfm2VlNumpyImageProcessor
from PIL import Image
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor

from engine.protocol import ImagePatches
from tests.support.families.vision import VISION_FAMILIES
from tests.support.sighted_family import IMAGE_SIZE, NORMALIZED, PATCH, TOWER, Pixels, SightedFamily, sighted

PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Lfm2VlImageProcessorFast",
    "encoder_patch_size": PATCH,
    "downsample_factor": 2,
    "min_image_tokens": 3,
    "max_image_tokens": 4,
    "max_pixels_tolerance": 1.75,
    "tile_size": IMAGE_SIZE,
    "min_tiles": 2,
    "max_tiles": 3,
    "do_image_splitting": True,
    "use_thumbnail": True,
    "resample": 3,
    **NORMALIZED,
}
NAMES = {
    "<start>": "<|image_start|>",
    "<end>": "<|image_end|>",
    "<break>": "<|img_thumbnail|>",
    **{f"<row_{row}_col_{column}>": f"<|img_row_{row}_col_{column}|>" for row in (1, 2, 3) for column in (1, 2, 3)},
}


def library_images(settings: dict[str, Any], images: Sequence[Image.Image]) -> Pixels:
    """Prepare images with the library's processor. settings: preprocessor_config.json."""
    return Lfm2VlNumpyImageProcessor(**settings)(list(images), return_tensors="np").data


def library_pixels(settings: dict[str, Any], images: Sequence[Image.Image]) -> Pixels:
    """Return the arguments of the library's model."""
    made = library_images(settings, images)
    return {name: np.array(made[name]) for name in ("pixel_values", "pixel_attention_mask", "spatial_shapes")}


def library_placed(image: ImagePatches, has_marks: bool = True) -> str:
    processor: Any = SimpleNamespace(
        image_token="<image>",
        image_start_token="<|image_start|>",
        image_end_token="<|image_end|>",
        image_thumbnail_token="<|img_thumbnail|>",
    )
    (_, height, width), (rows, columns) = image.grid_thw, image.tiles
    shape = image.thumbnail if rows else (height, width)
    tokens = height * width // 4, shape[0] * shape[1] // 4
    return Lfm2VlProcessor._build_image_tokens(processor, rows, columns, *tokens, any(image.thumbnail), has_marks)


LFM2_VL = SightedFamily(
    sighted(
        "lfm2_vl",
        VISION_FAMILIES["lfm2_vl"].config["text_config"],
        {"model_type": "siglip2_vision_model", **TOWER, "num_patches": 9},
        downsample_factor=2,
        encoder_patch_size=PATCH,
        tile_size=IMAGE_SIZE,
        max_image_tokens=4,
        projector_hidden_size=48,
    ),
    PROCESSOR,
    lambda images: library_pixels(PROCESSOR, images),
    library_placed,
    seed=17,
    names=NAMES,
)
UNDIVIDED_PROCESSOR = {**PROCESSOR, "do_image_splitting": False, "min_image_tokens": 6, "max_image_tokens": 9}
UNDIVIDED = replace(
    LFM2_VL,
    config={**LFM2_VL.config, "model_type": "lfm2-vl", "max_image_tokens": 9},
    processor=UNDIVIDED_PROCESSOR,
    pixels=lambda images: library_pixels(UNDIVIDED_PROCESSOR, images),
    seed=3,
)
