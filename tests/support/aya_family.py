"""Aya Vision in the vision zoo: tiles behind their numbers, and a thumbnail of the whole image."""

from types import SimpleNamespace
from typing import Any

from transformers.models.aya_vision.processing_aya_vision import AyaVisionProcessor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from engine.protocol import ImagePatches
from tests.support.families.family import WINDOW, text
from tests.support.sighted_family import IDS, IMAGE_SIZE, PATCH, TOWER, SightedFamily, prepared, sighted
from tests.support.square_families import INTERNVL_PROCESSOR

FACTOR = 2  # patches along each side of a token
PROCESSOR = {**INTERNVL_PROCESSOR, "image_processor_type": "GotOcr2ImageProcessor"}
PROCESSOR_CONFIG: dict[str, Any] = {
    "processor_class": "AyaVisionProcessor",
    "downsample_factor": FACTOR,
    "img_size": IMAGE_SIZE,
    "patch_size": PATCH,
}


def placed(image: ImagePatches) -> str:
    tokenizer = SimpleNamespace(convert_tokens_to_ids=lambda token: IDS["<image>"])
    processor: Any = object.__new__(AyaVisionProcessor)
    processor.check_argument_for_proper_class = lambda *names: None
    given = {key: value for key, value in PROCESSOR_CONFIG.items() if key != "processor_class"}
    AyaVisionProcessor.__init__(processor, SimpleNamespace(), tokenizer, **given)
    return processor.replace_image_token({"num_patches": [image.grid_thw[0]]}, 0)


AYA_VISION = SightedFamily(
    sighted(
        "aya_vision",
        text("cohere2", sliding_window=WINDOW, sliding_window_pattern=2, logit_scale=4.0),
        {"model_type": "siglip_vision_model", **TOWER},
        image_token_index=IDS["<image>"],
        downsample_factor=FACTOR,
        alignment_intermediate_size=64,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    ),
    PROCESSOR,
    prepared(GotOcr2ImageProcessorPil, PROCESSOR, "pixel_values"),
    placed,
    "<image>",
    seed=7,
    processor_config=PROCESSOR_CONFIG,
    names={"<image>": "<|IMG_PATCH|>", "<start>": "<|START_OF_IMG|>", "<end>": "<|END_OF_IMG|>"},
)
"""The chat template writes `<image>`, which is no token, as its processor expects it."""
