"""The families of models whose images are supported."""

from collections.abc import Mapping
from typing import Any

from engine.processing import plain_templates
from engine.processing.image_placeholder import (
    gemma3_begin,
    gemma4_marks,
    in_gemma3,
    in_gemma4,
    in_marked_tiles,
    in_rows,
    in_tiles,
    one_run,
    tile_marks,
)
from engine.processing.tiled_families import (
    AYA_VISION,
    DEEPSEEK_OCR,
    DEEPSEEK_OCR_2,
    DEEPSEEK_VL2,
    INTERNVL,
    INTERNVL_CHAT,
    LLAMA4,
    LLAVA_NEXT,
    LLAVA_ONEVISION,
    MOLMO,
    MOLMO2,
    PHI3_V,
)
from engine.processing.vision_family import HALF, AttentionKind, VisionFamily, processors_named, value_at

QWEN_PROCESSORS = frozenset(
    f"Qwen{generation}VLImageProcessor{backend}" for generation in ("2", "2_5", "3") for backend in ("", "Fast", "Pil")
)
"""Class names of the Qwen2-VL image processor; those of later generations are mlx-vlm's, in converted checkpoints."""


def _gemma4_layers(config: Mapping[str, Any]) -> frozenset[AttentionKind]:
    """Return the layers with a window, as in transformers; the library would let them see each other in all layers."""
    is_on = value_at(config, "text_config.use_bidirectional_attention", None) == "vision"
    return frozenset(("window",)) if is_on else frozenset()


QWEN_VL = VisionFamily(
    name="qwen_vl",
    model_types=frozenset(("qwen2_vl", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe")),
    processors=QWEN_PROCESSORS,
    placeholder=one_run,
    deepstack=frozenset(("qwen3_vl", "qwen3_vl_moe")),
    videos=frozenset(("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe")),
)
GEMMA3 = VisionFamily(
    name="gemma3",
    model_types=frozenset(("gemma3",)),
    processors=processors_named("Gemma3"),
    placeholder=in_gemma3,
    marker=gemma3_begin,
    both_ways=lambda config: frozenset(("full", "window")),
    defaults={
        **HALF,
        "size": {"height": 224, "width": 224},
        "resample": 2,
        "temporal_patch_size": 1,
        "pan_and_scan_min_crop_size": 256,
        "pan_and_scan_max_num_crops": 4,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    },
)
GEMMA4 = VisionFamily(
    name="gemma4",
    model_types=frozenset(("gemma4",)),
    processors=processors_named("Gemma4"),
    placeholder=in_gemma4,
    marks=gemma4_marks,
    both_ways=_gemma4_layers,
    setting_values={"do_resize": True},
    config_values={"vision_config.hidden_activation": "gelu_pytorch_tanh"},
    defaults={
        "patch_size": 16,
        "pooling_kernel_size": 3,
        "max_soft_tokens": 280,
        "resample": 3,
        "temporal_patch_size": 1,
        "do_normalize": False,
        "image_mean": (0.0,) * 3,
        "image_std": (1.0,) * 3,
    },
)
GLM_V = VisionFamily(
    name="glm_v",
    model_types=frozenset(("glm4v", "glm4v_moe", "glm_ocr")),
    processors=processors_named("Glm4v", "Glm46V"),
    placeholder=one_run,
    defaults={
        "size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000},
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "resample": 3,
    },
)
DOTS_OCR = VisionFamily(
    name="dots_ocr",
    model_types=frozenset(("dots_ocr",)),
    processors=QWEN_PROCESSORS,
    placeholder=one_run,
)
PADDLEOCR = VisionFamily(
    name="paddleocr",
    model_types=frozenset(("paddleocr_vl",)),
    processors=processors_named("PaddleOCRVL"),
    placeholder=one_run,
    defaults={
        "size": {"shortest_edge": 384 * 384, "longest_edge": 1536 * 1536},
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 1,
        "resample": 3,
    },
)
PIXTRAL = VisionFamily(
    name="pixtral",
    model_types=frozenset(("pixtral", "mistral3")),
    processors=processors_named("Pixtral"),
    placeholder=in_rows,
    defaults={"size": {"longest_edge": 1024}, "resample": 3, "temporal_patch_size": 1},
)
IDEFICS3 = VisionFamily(
    name="idefics3",
    model_types=frozenset(("idefics3", "smolvlm")),
    processors=processors_named("Idefics3", "SmolVLM"),
    placeholder=in_tiles,
    defaults={
        **HALF,
        "size": {"longest_edge": 4 * 364},
        "max_image_size": {"longest_edge": 364},
        "do_image_splitting": True,
        "resample": 1,
        "temporal_patch_size": 1,
    },
)
LLAVA = VisionFamily(
    name="llava",
    model_types=frozenset(("llava",)),
    processors=processors_named("CLIP", "Llava"),
    placeholder=one_run,
    towers=frozenset(("clip_vision_model",)),
    unsupported_settings=("do_pad",),
    config_values={"vision_feature_select_strategy": "default"},
    defaults={"crop_size": {"height": 224, "width": 224}, "resample": 3, "temporal_patch_size": 1},
)
LLAVA_SIGLIP = VisionFamily(
    name="llava_siglip",
    model_types=frozenset(("llava",)),
    processors=processors_named("Siglip"),
    placeholder=one_run,
    towers=frozenset(("siglip_vision_model",)),
    required_values={"vision_feature_select_strategy": "full"},  # the tower has no class token
    defaults={**HALF, "size": {"height": 224, "width": 224}, "resample": 3, "temporal_patch_size": 1},
)
PALIGEMMA = VisionFamily(
    name="paligemma",
    model_types=frozenset(("paligemma",)),
    processors=processors_named("Siglip") | {"PaliGemmaProcessor"},
    placeholder=one_run,
    image_token="<image>",
    in_text=lambda strings: strings.image,
    adds_beginning=True,
    images_first="before bos",
    plain_template=plain_templates.LINES,
    plain_tokens=r"<loc\d{4}>|<seg\d{3}>",
    whole_prompts=lambda config: value_at(config, "text_config.use_bidirectional_attention", None) is not False,
    towers=frozenset(("siglip_vision_model",)),
    setting_values={"do_resize": True},
    config_values={"vision_config.hidden_act": "gelu_pytorch_tanh"},
    defaults={**HALF, "size": {"height": 224, "width": 224}, "resample": 3, "temporal_patch_size": 1},
)
KIMI_VL = VisionFamily(
    name="kimi_vl",
    model_types=frozenset(("kimi_vl",)),
    processors=frozenset(("KimiVLImageProcessor",)),
    placeholder=one_run,
    image_token="<|media_pad|>",
    towers=frozenset(("moonvit",)),
    defaults={
        "patch_size": 14,
        "merge_kernel_size": [2, 2],
        "in_token_limit": 4096,
        "pad_input": False,
        "temporal_patch_size": 1,
    },
)
KIMI_K25 = VisionFamily(
    name="kimi_k25",
    model_types=frozenset(("kimi_k25",)),
    processors=processors_named("Kimi_K25") | {"KimiK25ImageProcessor", "KimiK25VisionProcessor"},
    needs_processor=False,  # the published file names none
    placeholder=one_run,
    image_token="<|media_pad|>",
    setting_values={"do_resize": True, "fixed_output_tokens": None},
    config_values={
        "projection_layer_norm_eps": 1e-5,
        "vision_config.hidden_act": "gelu_pytorch_tanh",
        "vision_config.merge_type": "sd2_tpool",
        "vision_config.mm_projector_type": "patchmerger",
        "vision_config.pos_emb_type": "divided_fixed",
        "vision_config.projector_hidden_act": "gelu",
        "vision_config.projector_ln_eps": 1e-5,
    },
    defaults={
        **HALF,
        "patch_size": 14,
        "merge_kernel_size": 2,
        "in_patch_limit": 16384,
        "patch_limit_on_one_side": 512,
        "resample": 3,
        "temporal_patch_size": 1,
    },
)
LFM2_VL = VisionFamily(
    name="lfm2_vl",
    model_types=frozenset(("lfm2_vl", "lfm2-vl")),
    processors=processors_named("Lfm2Vl", "Lfm2VlNumpy", "Siglip2"),
    placeholder=in_marked_tiles,  # do_resize is false in published checkpoints, and has no effect in the library
    marks=tile_marks,
    config_values={
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "vision_config.hidden_act": "gelu_pytorch_tanh",
    },
    defaults={
        **HALF,
        "downsample_factor": 2,
        "min_image_tokens": 64,
        "max_image_tokens": 256,
        "max_pixels_tolerance": 2.0,
        "tile_size": 512,
        "min_tiles": 2,
        "max_tiles": 10,
        "do_image_splitting": True,
        "use_thumbnail": True,
        "resample": 3,
        "temporal_patch_size": 1,
    },
)
PHI4_SIGLIP = VisionFamily(
    name="phi4_siglip",
    model_types=frozenset(("phi4-siglip",)),
    processors=processors_named("Siglip2") | {"Phi4VisionRProcessor", "Siglip2ImageProcessorNoUpscale"},
    needs_processor=False,
    placeholder=one_run,
    image_token="<|dummy_0|>",  # the model has none of its own: the token is free, and features replace its embedding
    in_text=lambda strings: f"{strings.image}\n",
    setting_values={"do_resize": True},
    config_values={
        "mm_projector_type": "mlp2x_gelu",
        "mm_vision_select_layer": -2,
        "vision_config.hidden_act": "gelu_pytorch_tanh",
    },
    defaults={**HALF, "resample": 2, "temporal_patch_size": 1},
)

FAMILIES = (
    QWEN_VL,
    GLM_V,
    PADDLEOCR,
    DOTS_OCR,
    GEMMA3,
    GEMMA4,
    PIXTRAL,
    IDEFICS3,
    INTERNVL,
    INTERNVL_CHAT,
    AYA_VISION,
    LLAMA4,
    LLAVA,
    LLAVA_SIGLIP,
    PALIGEMMA,
    LLAVA_NEXT,
    LLAVA_ONEVISION,
    MOLMO,
    MOLMO2,
    KIMI_K25,
    KIMI_VL,
    LFM2_VL,
    PHI3_V,
    PHI4_SIGLIP,
    DEEPSEEK_OCR,
    DEEPSEEK_OCR_2,
    DEEPSEEK_VL2,
)


def vision_family(config: Mapping[str, Any]) -> VisionFamily | None:
    """Return the family of a model, None if its images are not supported."""
    found = [family for family in FAMILIES if config.get("model_type") in family.model_types]
    vision = config.get("vision_config")
    tower = vision.get("model_type") if isinstance(vision, dict) else None
    return next((family for family in found if tower in family.towers), found[0] if found else None)


def whole_prompts(config: Mapping[str, Any]) -> str | None:
    """Return why each prompt of a model is computed as a whole, None if it is not. See ModelRunner.whole_prompts."""
    family = vision_family(config)
    return "the tokens of its prompts see each other" if family is not None and family.whole_prompts(config) else None
