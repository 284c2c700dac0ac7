"""Gemma 4 in the vision zoo: images of any shape, all about as large, whose tokens see each other in windows."""

from typing import Any

from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from tests.support.families.family import GEMMA4, text
from tests.support.sighted_family import IDS, PATCH, TOWER, SightedFamily, prepared, sighted

POOLING = 2
PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Gemma4ImageProcessor",
    "patch_size": PATCH,
    "pooling_kernel_size": POOLING,
    "max_soft_tokens": 70,  # the fewest that transformers takes
    "resample": 3,
}
GEMMA4_SIGHTED = SightedFamily(
    sighted(
        "gemma4",
        text("gemma4_text", GEMMA4, use_bidirectional_attention="vision"),
        {
            "model_type": "gemma4_vision",
            **{key: value for key, value in TOWER.items() if key != "image_size"},
            "num_key_value_heads": TOWER["num_attention_heads"],
            "pooling_kernel_size": POOLING,
            "position_embedding_size": 64,
            "standardize": True,
        },
        audio_config=None,
        boi_token_id=IDS["<start>"],
        eoi_token_id=IDS["<end>"],
        pad_token_id=IDS["<pad>"],
    ),
    PROCESSOR,
    prepared(Gemma4ImageProcessorPil, PROCESSOR, "pixel_values", "image_position_ids"),
    lambda image: "<start>" + "<image>" * image.num_tokens + "<end>",
    seed=22,
    processor_config={"boi_token": "<start>", "eoi_token": "<end>"},
    both_ways=frozenset(("window",)),
)
