"""Families of the vision zoo whose towers take squares of one size: an image, or its tiles and crops."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.nn as nn
import numpy as np
from mlx_vlm.models.llava_onevision.llava_onevision import Model as LlavaOnevision
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from engine.protocol import ImagePatches
from tests.support.families.family import (
    GEMMA,
    text,
)
from tests.support.sighted_family import IDS, IMAGE_SIZE, NORMALIZED, SQUARE, TOWER, SightedFamily, prepared, sighted

# One square per image


def one_square(num_tokens: int, around: str = "{}") -> Callable[[ImagePatches], str]:
    return lambda image: around.format("<image>" * num_tokens)


GEMMA3_PROCESSOR = {"image_processor_type": "Gemma3ImageProcessorFast", "size": SQUARE, "resample": 2, **NORMALIZED}
GEMMA3 = SightedFamily(
    sighted(
        "gemma3",
        {**text("gemma3_text", GEMMA, rope_theta=1e6), "mm_tokens_per_image": 4},
        {"model_type": "siglip_vision_model", **TOWER},
        hidden_size=64,
        boi_token_index=IDS["<start>"],
        eoi_token_index=IDS["<end>"],
        image_token_index=IDS["<image>"],
        pad_token_id=IDS["<pad>"],
    ),
    GEMMA3_PROCESSOR,
    prepared(Gemma3ImageProcessorPil, GEMMA3_PROCESSOR, "pixel_values"),
    one_square(4, "\n\n<start>{}<end>\n\n"),
    "<start>",
    seed=8,
    both_ways=frozenset(("full", "window")),
)
PANNED_PROCESSOR = {
    **GEMMA3_PROCESSOR,
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 16,
    "pan_and_scan_max_num_crops": 3,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}


def panned_placed(image: ImagePatches) -> str:
    one = "\n\n<start>" + "<image>" * 4 + "<end>\n\n"
    processor: Any = SimpleNamespace(full_image_sequence=one)
    return Gemma3Processor.replace_image_token(processor, {"num_crops": [image.grid_thw[0] - 1]}, 0)


PANNED = replace(
    GEMMA3,
    processor=PANNED_PROCESSOR,
    pixels=prepared(Gemma3ImageProcessorPil, PANNED_PROCESSOR, "pixel_values"),
    placed=panned_placed,
    seed=10,
)
LLAVA_PROCESSOR = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": IMAGE_SIZE},
    "crop_size": SQUARE,
    "do_center_crop": True,
    "resample": 3,
    **NORMALIZED,
}
LLAVA = SightedFamily(
    sighted(
        "llava",
        text("llama"),
        {"model_type": "clip_vision_model", **TOWER},
        image_token_index=IDS["<image>"],
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    ),
    LLAVA_PROCESSOR,
    prepared(CLIPImageProcessorPil, LLAVA_PROCESSOR, "pixel_values"),
    one_square(16),
    "<image>",
    seed=7,
)

SIGLIP_PROCESSOR = {"image_processor_type": "SiglipImageProcessor", "size": SQUARE, "resample": 3, **NORMALIZED}
LLAVA_SIGLIP = SightedFamily(
    sighted(
        "llava",
        text("qwen2"),
        {"model_type": "siglip_vision_model", **TOWER},
        image_token_index=IDS["<image>"],
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    ),
    SIGLIP_PROCESSOR,
    prepared(SiglipImageProcessorPil, SIGLIP_PROCESSOR, "pixel_values"),
    one_square(16),
    seed=10,
)

ONEVISION_PROCESSOR: dict[str, Any] = {
    "image_processor_type": "LlavaOnevisionImageProcessor",
    "size": SQUARE,
    "image_grid_pinpoints": [[32, 32], [32, 64], [64, 32], [64, 64], [32, 96], [96, 32]],
    "resample": 3,
    **NORMALIZED,
}
ONEVISION = SightedFamily(
    sighted(
        "llava_onevision",
        text("qwen2"),
        {"model_type": "siglip_vision_model", **TOWER},
        image_token_index=IDS["<image>"],
        image_grid_pinpoints=ONEVISION_PROCESSOR["image_grid_pinpoints"],
        vision_feature_layer=-1,
        vision_aspect_ratio="anyres_max_2",
    ),
    ONEVISION_PROCESSOR,
    prepared(LlavaOnevisionImageProcessorPil, ONEVISION_PROCESSOR, "pixel_values", "image_sizes"),
    lambda image: "<image>" * image.num_tokens,
)

LLAVA_NEXT_PROCESSOR: dict[str, Any] = {
    **LLAVA_PROCESSOR,
    "image_processor_type": "LlavaNextImageProcessor",
    "image_grid_pinpoints": ONEVISION_PROCESSOR["image_grid_pinpoints"][1:],
}


def packed_features(module: Any, pixels: dict[str, Any]) -> Any:
    """Return the features of LLaVA-NeXT's images, [num_tokens, 1, hidden], as the library packs LLaVA-OneVision's.

    Its module of LLaVA-NeXT packs nothing: it puts a whole tile in the place of each image token.
    """
    packer: Any = LlavaOnevision.__new__(LlavaOnevision)
    nn.Module.__init__(packer)
    config = vars(module.config) | {
        "image_grid_pinpoints": LLAVA_NEXT_PROCESSOR["image_grid_pinpoints"],
        "vision_aspect_ratio": "anyres_max_1000",
    }
    packer.config, packer.image_newline = SimpleNamespace(**config), module.image_newline
    packer.vision_tower, packer.multi_modal_projector = module.vision_tower, module.multi_modal_projector
    return packer.get_image_features(pixels["pixel_values"], pixels["image_sizes"])[:, None]


LLAVA_NEXT = SightedFamily(
    sighted(
        "llava_next",
        text("mistral"),
        {"model_type": "clip_vision_model", **TOWER},
        image_token_index=IDS["<image>"],
        image_grid_pinpoints=LLAVA_NEXT_PROCESSOR["image_grid_pinpoints"],
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    ),
    LLAVA_NEXT_PROCESSOR,
    prepared(LlavaNextImageProcessorPil, LLAVA_NEXT_PROCESSOR, "pixel_values", "image_sizes"),
    lambda image: "<image>" * image.num_tokens,
    features=packed_features,
)

# Tiles

IDEFICS3_PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Idefics3ImageProcessorFast",
    "size": {"longest_edge": 2 * IMAGE_SIZE},
    "max_image_size": {"longest_edge": IMAGE_SIZE},
    "resample": 1,
    "do_image_splitting": True,
    **NORMALIZED,
}
INTERNVL_PROCESSOR: dict[str, Any] = {
    "image_processor_type": "GotOcr2ImageProcessorFast",
    "size": SQUARE,
    "crop_to_patches": True,
    "min_patches": 1,
    "max_patches": 4,
    "resample": 3,
    **NORMALIZED,
}


def idefics3_placed(image: ImagePatches) -> str:
    processor: Any = SimpleNamespace(
        fake_image_token="<fake_token_around_image>",
        global_image_tag="<global-img>",
        image_token="<image>",
        image_seq_len=4,
    )
    rows, columns = image.tiles
    return Idefics3Processor.replace_image_token(processor, {"rows": [[rows]], "cols": [[columns]]}, 0)


def internvl_placed(image: ImagePatches) -> str:
    processor: Any = SimpleNamespace(
        start_image_token="<start>", end_image_token="<end>", image_token="<image>", image_seq_length=4
    )
    return InternVLProcessor.replace_image_token(processor, {"num_patches": [image.grid_thw[0]]}, 0)


def idefics3(model_type: str, text_config: dict[str, Any], seed: int = 0) -> SightedFamily:
    return SightedFamily(
        sighted(model_type, text_config, {"model_type": "siglip_vision_model", **TOWER}, scale_factor=2),
        IDEFICS3_PROCESSOR,
        prepared(Idefics3ImageProcessorPil, IDEFICS3_PROCESSOR, "pixel_values", "pixel_attention_mask"),
        idefics3_placed,
        "<image>",
        seed,
    )


INTERNVL = SightedFamily(
    sighted("internvl", text("qwen3"), {"model_type": "internvl_vision", **TOWER}, downsample_ratio=0.5),
    INTERNVL_PROCESSOR,
    prepared(GotOcr2ImageProcessorPil, INTERNVL_PROCESSOR, "pixel_values"),
    internvl_placed,
    "<image>",
    seed=2,
    processor_config={"start_image_token": "<start>", "end_image_token": "<end>"},
)
INTERNVL_CHAT_CONFIG = sighted(
    "internvl_chat",
    text("qwen2"),
    {"model_type": "intern_vit_6b", **TOWER},
    downsample_ratio=0.5,
    force_image_size=IMAGE_SIZE,
    max_dynamic_patch=4,
    min_dynamic_patch=1,
    use_thumbnail=True,
    ps_version="v2",
)
INTERNVL_CHAT = SightedFamily(
    {
        "llm_config" if key == "text_config" else key: value
        for key, value in INTERNVL_CHAT_CONFIG.items()
        if key != "image_token_id"
    },
    {"feature_extractor_type": "CLIPFeatureExtractor", "size": IMAGE_SIZE, "resample": 3, **NORMALIZED},
    lambda images: {**INTERNVL.pixels(images), "image_token_index": np.array(IDS["<image>"])},
    lambda image: "<img>" + "<IMG_CONTEXT>" * image.num_tokens + "</img>\n",
    None,
    seed=6,
    names={"<image>": "<IMG_CONTEXT>", "<start>": "<img>", "<end>": "</img>"},
)
