"""Fields of DeepSeek-OCR's checkpoints that must have the published values, because the library reads none of them."""

from typing import Any

PLACES = r"<\|/?(ref|det)\|>|<\|grounding\|>"
"""Tokens around the names and places of things, which prompts of DeepSeek-OCR and DeepSeek-VL2 spell."""

SQUARE = [[1024, 1024]]
SAM: dict[str, Any] = {
    "downsample_channels": [512, 1024],
    "global_attn_indexes": [2, 5, 8, 11],
    "heads": 12,
    "layers": 12,
    "width": 768,
}
CLIP: dict[str, Any] = {"heads": 16, "image_size": 224, "layers": 24, "patch_size": 14, "width": 1024}

SETTINGS: dict[str, Any] = {
    "patch_size": 16,
    "downsample_ratio": 4,
    "candidate_resolutions": SQUARE,
    "normalize": True,
    "base_size": 1024,
    "image_size": 640,
    "crop_mode": True,
    "image_token": "<image>",
}
"""Settings of DeepSeek-OCR's processor."""
SETTINGS_2: dict[str, Any] = {**SETTINGS, "image_size": 768, "min_patches": 2, "max_patches": 6}
"""Settings of DeepSeek-OCR-2's processor."""

BOTH: dict[str, Any] = {
    "tile_tag": "2D",
    "global_view_pos": "head",
    "select_layer": -1,
    "vision_feature_select_strategy": "default",
    "candidate_resolutions": SQUARE,
    "projector_config.projector_type": "linear",
    "projector_config.token_pooling": False,
    "vision_config.image_size": 1024,
    "vision_config.mlp_ratio": 3.7362,
    "vision_config.width.sam_vit_b": SAM,
}
CONFIG: dict[str, Any] = {
    **BOTH,
    "vision_config.layer_norm_eps": 1e-5,
    "vision_config.model_name": "deeplip_b_l",
    "vision_config.width.clip-l-14-224": CLIP,
}
"""Fields of DeepSeek-OCR's config.json."""
CONFIG_2: dict[str, Any] = {
    **BOTH,
    "vision_config.model_name": "deepencoderv2",
    "vision_config.width.qwen2-0-5b": {"dim": 896},
}
"""Fields of DeepSeek-OCR-2's config.json."""
