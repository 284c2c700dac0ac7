"""The families of models whose images are supported."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.processing import deepseek_ocr, plain_templates
from engine.processing.image_placeholder import (
    aya_marker,
    aya_marks,
    crop_marks,
    gemma3_begin,
    gemma4_marks,
    in_aya,
    in_crops,
    in_gemma3,
    in_gemma4,
    in_internvl,
    in_marked_tiles,
    in_molmo,
    in_phi3,
    in_rows,
    in_tiles,
    molmo_marks,
    one_run,
    phi3_marks,
    tile_marks,
)
from engine.processing.pooled_patches import POOL
from engine.processing.vision_family import LayerKind, VisionFamily, value_at

QWEN_PROCESSORS = frozenset(
    f"Qwen{generation}VLImageProcessor{backend}" for generation in ("2", "2_5", "3") for backend in ("", "Fast", "Pil")
)
"""Class names of the Qwen2-VL image processor; those of later generations are mlx-vlm's, in converted checkpoints."""


def _named(*stems: str) -> frozenset[str]:
    return frozenset(f"{stem}ImageProcessor{backend}" for stem in stems for backend in ("", "Fast", "Pil"))


def _gemma4_layers(config: Mapping[str, Any]) -> frozenset[LayerKind]:
    """Return the layers with a window, as in transformers; the library would let them see each other in all layers."""
    is_on = value_at(config, "text_config.use_bidirectional_attention", None) == "vision"
    return frozenset(("window",)) if is_on else frozenset()


HALF = {"image_mean": (0.5,) * 3, "image_std": (0.5,) * 3}

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
    processors=_named("Gemma3"),
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
    processors=_named("Gemma4"),
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
    processors=_named("Glm4v", "Glm46V"),
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
    processors=_named("PaddleOCRVL"),
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
    processors=_named("Pixtral"),
    placeholder=in_rows,
    defaults={"size": {"longest_edge": 1024}, "resample": 3, "temporal_patch_size": 1},
)
IDEFICS3 = VisionFamily(
    name="idefics3",
    model_types=frozenset(("idefics3", "smolvlm")),
    processors=_named("Idefics3", "SmolVLM"),
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
INTERNVL = VisionFamily(
    name="internvl",
    model_types=frozenset(("internvl",)),
    processors=_named("GotOcr2"),
    placeholder=in_internvl,
    defaults={
        "size": {"height": 384, "width": 384},
        "min_patches": 1,
        "max_patches": 12,
        "resample": 3,
        "temporal_patch_size": 1,
    },
)
INTERNVL_CHAT = VisionFamily(
    name="internvl_chat",
    model_types=frozenset(("internvl_chat",)),
    processors=frozenset(("CLIPFeatureExtractor", "CLIPImageProcessor", "InternVLImageProcessor")),
    placeholder=in_internvl,
    image_token="<IMG_CONTEXT>",
    in_text=lambda strings: f"{strings.image}\n",
    config_values={"dynamic_image_size": True, "pad2square": False, "select_layer": -1},
    required_values={"use_thumbnail": True, "ps_version": "v2"},
    defaults={
        "image_mean": (0.485, 0.456, 0.406),
        "image_std": (0.229, 0.224, 0.225),
        "resample": 3,
        "temporal_patch_size": 1,
    },
)
AYA_VISION = VisionFamily(
    name="aya_vision",
    model_types=frozenset(("aya_vision",)),
    processors=_named("GotOcr2"),
    placeholder=in_aya,
    marker=aya_marker,
    marker_is_text=True,
    marks=aya_marks,
    image_token="<|IMG_PATCH|>",
    towers=frozenset(("siglip_vision_model",)),
    config_values={
        "vision_config.hidden_act": "gelu_pytorch_tanh",
        "vision_feature_select_strategy": "full",  # the tower has no class token
    },
    defaults=INTERNVL.defaults,
)
LLAVA = VisionFamily(
    name="llava",
    model_types=frozenset(("llava",)),
    processors=_named("CLIP", "Llava"),
    placeholder=one_run,
    towers=frozenset(("clip_vision_model",)),
    unsupported_settings=("do_pad",),
    config_values={"vision_feature_select_strategy": "default"},
    defaults={"crop_size": {"height": 224, "width": 224}, "resample": 3, "temporal_patch_size": 1},
)
LLAVA_SIGLIP = VisionFamily(
    name="llava_siglip",
    model_types=frozenset(("llava",)),
    processors=_named("Siglip"),
    placeholder=one_run,
    towers=frozenset(("siglip_vision_model",)),
    required_values={"vision_feature_select_strategy": "full"},  # the tower has no class token
    defaults={**HALF, "size": {"height": 224, "width": 224}, "resample": 3, "temporal_patch_size": 1},
)
PALIGEMMA = VisionFamily(
    name="paligemma",
    model_types=frozenset(("paligemma",)),
    processors=_named("Siglip") | {"PaliGemmaProcessor"},
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
LLAVA_NEXT = VisionFamily(
    name="llava_next",
    model_types=frozenset(("llava_next",)),
    processors=_named("LlavaNext"),
    placeholder=one_run,
    towers=frozenset(("clip_vision_model",)),
    config_values={"use_image_newline_parameter": True, "vision_feature_select_strategy": "default"},
    defaults={
        "size": {"shortest_edge": 224},
        "crop_size": {"height": 224, "width": 224},
        "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
        "resample": 3,
        "temporal_patch_size": 1,
    },
)
LLAVA_ONEVISION = VisionFamily(
    name="llava_onevision",
    model_types=frozenset(("llava_onevision",)),
    processors=_named("LlavaOnevision"),
    placeholder=one_run,
    towers=frozenset(("siglip_vision_model",)),
    unsupported_settings=("do_center_crop",),
    config_values={"use_image_newline_parameter": True, "vision_feature_select_strategy": "full"},
    defaults={
        "size": {"height": 384, "width": 384},
        "image_grid_pinpoints": [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)],
        "resample": 3,
        "temporal_patch_size": 1,
    },
)
MOLMO = VisionFamily(
    name="molmo",
    model_types=frozenset(("molmo",)),
    processors=frozenset(("MolmoImageProcessor",)),
    placeholder=in_molmo,
    marker=lambda strings: "<|image|>",
    in_text=lambda strings: "<|image|>",
    marks=molmo_marks,
    image_token="<im_patch>",
    adds_beginning=True,
    images_first="behind bos",
    adds_features=True,
    setting_values={"do_normalize": True, "image_padding_mask": True},
    config_values={
        "vision_config.image_padding_embed": "pad_and_partial_pad",
        "vision_config.image_pooling_2d": "attention-meanq",
        "vision_config.image_pooling_h": POOL,
        "vision_config.image_pooling_w": POOL,
    },
    defaults={
        "base_image_input_size": [336, 336],
        "image_patch_size": 14,
        "image_token_length_h": 12,
        "image_token_length_w": 12,
        "max_crops": 12,
        "overlap_margins": [4, 4],
        "resample": 2,
        "temporal_patch_size": 1,
        "rescale_divisor": 255,
    },
)
MOLMO2 = VisionFamily(
    name="molmo2",
    model_types=frozenset(("molmo2",)),
    processors=_named("Molmo2"),
    placeholder=in_crops,
    marker=lambda strings: "<|image|>",
    adds_beginning=True,
    marks=crop_marks,
    setting_values={"do_resize": True},
    required_keys=("image_patch_id", "vision_config.vit_config", "vision_config.adapter_config.pooling_attention_mask"),
    config_values={
        "vision_config.vit_config.hidden_act": "gelu_pytorch_tanh",
        "vision_config.adapter_config.hidden_act": "silu",
    },
    defaults={
        **HALF,
        "size": {"height": 378, "width": 378},
        "patch_size": 14,
        "max_crops": 8,
        "overlap_margins": [4, 4],
        "pooling_size": [2, 2],
        "resample": 2,
        "temporal_patch_size": 1,
    },
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
LFM2_VL = VisionFamily(
    name="lfm2_vl",
    model_types=frozenset(("lfm2_vl", "lfm2-vl")),
    processors=_named("Lfm2Vl", "Lfm2VlNumpy", "Siglip2"),
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
PHI3_V = VisionFamily(
    name="phi3_v",
    model_types=frozenset(("phi3_v",)),
    processors=frozenset(("Phi3VImageProcessor",)),
    placeholder=in_phi3,
    marks=phi3_marks,
    image_token="<|image|>",  # config.json names none
    in_text=lambda strings: f"{strings.image}\n",
    adds_beginning=True,
    heeds_add_bos=True,
    setting_values={"num_img_tokens": 144},
    config_values={
        "embd_layer.embedding_cls": "image",
        "embd_layer.hd_transform_order": "sub_glb",
        "embd_layer.projection_cls": "mlp",
        "embd_layer.use_hd_transform": True,
        "embd_layer.with_learnable_separator": True,
        "img_processor.image_dim_out": 1024,
        "img_processor.layer_idx": -2,
        "img_processor.model_name": "openai/clip-vit-large-patch14-336",
        "img_processor.name": "clip_vision_model",
        "img_processor.num_img_tokens": 144,
        "img_processor.type_feature": "patch",
    },
    defaults={"resample": 2, "temporal_patch_size": 1, "rescale_divisor": 255},
)
PHI4_SIGLIP = VisionFamily(
    name="phi4_siglip",
    model_types=frozenset(("phi4-siglip",)),
    processors=_named("Siglip2") | {"Phi4VisionRProcessor", "Siglip2ImageProcessorNoUpscale"},
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

DEEPSEEK_OCR = VisionFamily(
    name="deepseek_ocr",
    model_types=frozenset(("deepseekocr",)),
    processors=frozenset(("DeepseekOCRProcessor", "DeepseekVLV2Processor")),
    placeholder=one_run,
    image_token="<image>",
    in_text=lambda strings: f"{strings.image}\n",
    adds_beginning=True,
    plain_template=plain_templates.CONTENTS,
    plain_tokens=deepseek_ocr.PLACES,
    setting_values=deepseek_ocr.SETTINGS,
    config_values=deepseek_ocr.CONFIG,
    defaults={
        **HALF,
        **{"patch_size": 16, "downsample_ratio": 4, "resample": 3, "temporal_patch_size": 1, "rescale_divisor": 255},
    },
)
DEEPSEEK_OCR_2 = replace(
    DEEPSEEK_OCR,
    name="deepseek_ocr_2",
    model_types=frozenset(("deepseekocr_2",)),
    processors=frozenset(("DeepseekOCR2Processor", "DeepseekVLV2Processor")),
    setting_values=deepseek_ocr.SETTINGS_2,
    config_values=deepseek_ocr.CONFIG_2,
)
DEEPSEEK_VL2 = VisionFamily(
    name="deepseek_vl2",
    model_types=frozenset(("deepseek_vl_v2",)),
    processors=frozenset(("DeepseekVLV2Processor",)),
    placeholder=one_run,
    image_token="<image>",
    in_text=lambda strings: f"{strings.image}\n",
    adds_beginning=True,
    plain_template=plain_templates.DEEPSEEK,
    plain_tokens=deepseek_ocr.PLACES,
    setting_values={"normalize": True, "image_token": "<image>", "sft_format": "deepseek"},
    config_values={
        "tile_tag": "2D",
        "global_view_pos": "head",
        "select_layer": -1,
        "projector_config.projector_type": "downsample_mlp_gelu",
        "projector_config.token_pooling": False,
    },
    defaults={**HALF, "resample": 3, "temporal_patch_size": 1, "rescale_divisor": 255},
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
    LLAVA,
    LLAVA_SIGLIP,
    PALIGEMMA,
    LLAVA_NEXT,
    LLAVA_ONEVISION,
    MOLMO,
    MOLMO2,
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
