"""The families of models whose images are divided into tiles or views."""

from dataclasses import replace

from engine.processing import deepseek_ocr, plain_templates
from engine.processing.image_placeholder import (
    aya_marker,
    aya_marks,
    crop_marks,
    in_aya,
    in_crops,
    in_internvl,
    in_llama4,
    in_molmo,
    in_phi3,
    llama4_marker,
    llama4_marks,
    molmo_marks,
    one_run,
    phi3_marks,
)
from engine.processing.pooled_patches import POOL
from engine.processing.vision_family import HALF, VisionFamily, processors_named

INTERNVL = VisionFamily(
    name="internvl",
    model_types=frozenset(("internvl",)),
    processors=processors_named("GotOcr2"),
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
    processors=processors_named("GotOcr2"),
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
LLAMA4 = VisionFamily(
    name="llama4",
    model_types=frozenset(("llama4",)),
    processors=processors_named("Llama4"),
    placeholder=in_llama4,
    marker=llama4_marker,
    marks=llama4_marks,
    image_token="<|patch|>",
    towers=frozenset(("llama4_vision_model",)),
    setting_values={"do_resize": True, "resize_to_max_canvas": False},
    config_values={"vision_config.hidden_act": "gelu", "vision_config.multi_modal_projector_bias": False},
    defaults={
        **HALF,
        "size": {"height": 336, "width": 336},
        "max_patches": 16,
        "resample": 2,
        "temporal_patch_size": 1,
    },
)
LLAVA_NEXT = VisionFamily(
    name="llava_next",
    model_types=frozenset(("llava_next",)),
    processors=processors_named("LlavaNext"),
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
    processors=processors_named("LlavaOnevision"),
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
    processors=processors_named("Molmo2"),
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
