"""The vision zoo's table: one tiny configuration per family whose images are supported, and the library's processor."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from mlx_vlm.models.qwen3_vl.processing_qwen3_vl import Qwen3VLVideoProcessor
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from engine.processing.vision_family import FAMILIES, QWEN_VL
from engine.protocol import ImagePatches
from tests.support.families.family import (
    DEFAULT_BASE,
    EXPERTS,
    GATED_DELTA,
    GEMMA,
    MROPE,
    SCALED_QUERIES,
    WINDOWS,
    text,
)
from tests.support.families.vision import VISION_FAMILIES

PATCH = 8  # pixels per side
IMAGE_SIZE = 32  # pixels per side of towers that take one size

SPECIAL_TOKENS = (
    *("<pad>", "<|im_start|>", "<|im_end|>", "<image>", "<start>", "<end>", "<break>", "<video>"),
    *("<fake_token_around_image>", "<global-img>", *(f"<row_{r}_col_{c}>" for r in (1, 2, 3) for c in (1, 2, 3))),
)
IDS = {token: i for i, token in enumerate(SPECIAL_TOKENS)}
"""The special tokens of all members' tokenizers, whatever their family calls them."""

Pixels = dict[str, np.ndarray]
"""Arguments of the library's `get_input_embeddings`."""


@dataclass(frozen=True)
class SightedFamily:
    """One family.

    Attributes:
        config: config.json.
        processor: preprocessor_config.json.
        pixels: Prepares images with the library's own image processor of this configuration.
        placed: Returns the text that stands for an image in a prompt of the library, with all image tokens.
        template: What the chat template writes for an image; None: the template takes only text.
        seed: Of the random weights; chosen so that the two best tokens are never nearly equal, and that no answer has
            an image token.
        processor_config: processor_config.json.
        video: video_preprocessor_config.json; None for a family without videos.
        names: Of special tokens that the family calls otherwise.
    """

    config: dict[str, Any]
    processor: dict[str, Any]
    pixels: Callable[[Sequence[Image.Image]], Pixels]
    placed: Callable[[ImagePatches], str]
    template: str | None = "<image>"
    seed: int = 0
    processor_config: dict[str, Any] = field(default_factory=dict)
    video: dict[str, Any] | None = None
    names: dict[str, str] = field(default_factory=dict)


def sighted(model_type: str, text_config: dict[str, Any], vision: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a config.json."""
    return {
        "model_type": model_type,
        "text_config": text_config,
        "vision_config": vision,
        "image_token_id": IDS["<image>"],
        "eos_token_id": IDS["<|im_end|>"],
        **more,
    }


def prepared(processor: Any, settings: dict[str, Any], *keys: str) -> Callable[[Sequence[Image.Image]], Pixels]:
    """Return the function `pixels` for one of transformers' image processors. keys: what the library's model takes."""
    known = {key: value for key, value in settings.items() if key != "image_processor_type"}

    def pixels(images: Sequence[Image.Image]) -> Pixels:
        made = processor(**known)(images=[list(images)] if "Idefics3" in processor.__name__ else list(images))
        return {key: np.array(made[key]) for key in keys}

    return pixels


# Qwen: patches of images of any shape, three rope positions per token

QWEN_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "out_hidden_size": 64,
    "num_heads": 2,
    "patch_size": PATCH,
    "in_channels": 3,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [],
}
QWEN_IDS = {
    "video_token_id": IDS["<video>"],
    "vision_start_token_id": IDS["<start>"],
    "vision_end_token_id": IDS["<end>"],
}
QWEN_PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.4, 0.5],
    "image_std": [0.5, 0.5, 0.3],
    "size": {"shortest_edge": 4 * 16**2, "longest_edge": 16 * 16**2},
}


def qwen_pixels(images: Sequence[Image.Image]) -> Pixels:
    settings = {key: value for key, value in QWEN_PROCESSOR.items() if key != "image_processor_type"}
    made = Qwen2VLImageProcessorPil(**settings)(images=list(images), return_tensors="np")
    return {"pixel_values": made["pixel_values"], "image_grid_thw": made["image_grid_thw"]}


QWEN_VIDEO: dict[str, Any] = {
    **QWEN_PROCESSOR,
    "video_processor_type": "Qwen3VLVideoProcessor",
    "size": {"shortest_edge": 16 * 16**2, "longest_edge": 64 * 16**2},
    "fps": 2,
    "min_frames": 2,
    "max_frames": 8,
}


def video_pixels(frames: Sequence[Image.Image]) -> Pixels:
    """Prepare frames of a video with the library's own processor, which has the limits under other names."""
    size = QWEN_VIDEO["size"]
    edges = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    made = Qwen3VLVideoProcessor(**{**QWEN_VIDEO, **edges})([list(frames)])
    return {key: made[key] for key in ("pixel_values_videos", "video_grid_thw")}


def qwen_placed(image: ImagePatches) -> str:
    _, height, width = image.grid_thw
    return "<start>" + "<image>" * (height * width // 4) + "<end>"


def qwen(model_type: str, text_config: dict[str, Any], vision: dict[str, Any], seed: int = 0) -> SightedFamily:
    config = sighted(model_type, text_config, {"model_type": model_type, **QWEN_VISION, **vision}, **QWEN_IDS)
    video = QWEN_VIDEO if model_type in QWEN_VL.videos else None
    return SightedFamily(config, QWEN_PROCESSOR, qwen_pixels, qwen_placed, "<start><image><end>", seed, video=video)


# GLM: patches of images of any shape, three rope positions per token

GLM_PROCESSOR: dict[str, Any] = {
    **QWEN_PROCESSOR,
    "image_processor_type": "Glm4vImageProcessor",
    "size": {"shortest_edge": 2 * 4 * 16**2, "longest_edge": 2 * 16 * 16**2},
}
GLM_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "out_hidden_size": 64,
    "num_heads": 2,
    "patch_size": PATCH,
    "image_size": IMAGE_SIZE,
}
GLM_IDS = {**QWEN_IDS, "image_start_token_id": IDS["<start>"], "image_end_token_id": IDS["<end>"]}


def glm(model_type: str, processor: str = "Glm4v", seed: int = 0) -> SightedFamily:
    text_config = VISION_FAMILIES[model_type].config["text_config"]
    config = sighted(model_type, text_config, {"model_type": model_type, **GLM_VISION}, **GLM_IDS)
    settings = {**GLM_PROCESSOR, "image_processor_type": f"{processor}ImageProcessor"}
    pixels = prepared(Glm4vImageProcessorPil, settings, "pixel_values", "image_grid_thw")
    return SightedFamily(config, settings, pixels, qwen_placed, "<start><image><end>", seed)


DEEPSTACK = {"deepstack_visual_indexes": [0, 1]}

QWEN2_VISION = {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2.0}
WINDOW_VISION = {"window_size": 4 * PATCH, "fullatt_block_indexes": [1]}


def flat(family: SightedFamily) -> SightedFamily:
    """Return the family with its text_config at the top of config.json, where Qwen2-VL has it."""
    config = {**family.config.pop("text_config"), **family.config}
    return replace(family, config=config)


# One square per image

TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 16,
    "image_size": IMAGE_SIZE,
    "patch_size": PATCH,
}
NORMALIZED: dict[str, Any] = {"image_mean": [0.5, 0.4, 0.5], "image_std": [0.5, 0.5, 0.3]}
SQUARE = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}


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
    seed=7,
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
    seed=22,
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

# Images of any shape, in rows

PIXTRAL_PROCESSOR: dict[str, Any] = {
    "image_processor_type": "PixtralImageProcessorFast",
    "size": {"longest_edge": 2 * IMAGE_SIZE},
    "resample": 3,
    **NORMALIZED,
}


def in_rows(side: int) -> Callable[[ImagePatches], str]:
    """side: Pixels per side of a token."""

    def placed(image: ImagePatches) -> str:
        """As `PixtralProcessor.replace_image_token` of transformers, whose module needs torch."""
        num_rows, num_columns = (length * PATCH // side for length in image.grid_thw[1:])
        tokens = (["<image>"] * num_columns + ["<break>"]) * num_rows
        return "".join([*tokens[:-1], "<end>"])

    return placed


def rows(model_type: str, text_config: dict[str, Any], merge_size: int, seed: int = 0) -> SightedFamily:
    settings = {**PIXTRAL_PROCESSOR, "patch_size": {"height": merge_size * PATCH, "width": merge_size * PATCH}}
    vision = {"model_type": "pixtral", **TOWER, "image_size": 2 * IMAGE_SIZE}
    config = sighted(model_type, text_config, vision, spatial_merge_size=merge_size, vision_feature_layer=-1)
    pixels = prepared(PixtralImageProcessorPil, settings, "pixel_values", "image_sizes")
    strings = {"image_break_token": "<break>", "image_end_token": "<end>"}
    return SightedFamily(
        config, PIXTRAL_PROCESSOR, pixels, in_rows(merge_size * PATCH), "<image>", seed, processor_config=strings
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

SIGHTED: dict[str, SightedFamily] = {
    "gemma3": GEMMA3,
    "gemma3 with pan-and-scan": PANNED,
    "pixtral": rows("pixtral", text("mistral"), 1, seed=1),
    "llava_onevision": ONEVISION,
    "mistral3": rows("mistral3", text("ministral3", WINDOWS, rope_parameters=SCALED_QUERIES), 2, seed=3),
    "idefics3": idefics3("idefics3", text("llama"), seed=8),
    "smolvlm": idefics3("smolvlm", text("llama"), seed=8),
    "internvl": INTERNVL,
    "internvl_chat": INTERNVL_CHAT,
    "llava": LLAVA,
    "llava with siglip_vision_model": LLAVA_SIGLIP,
    "glm4v": glm("glm4v", seed=3),
    "glm4v_moe": glm("glm4v_moe", seed=3),
    "glm_ocr": glm("glm_ocr", "Glm46V", seed=17),
    "qwen2_vl": flat(qwen("qwen2_vl", text("qwen2_vl", MROPE), QWEN2_VISION, seed=1)),
    "qwen2_5_vl": flat(qwen("qwen2_5_vl", text("qwen2_5_vl", MROPE), WINDOW_VISION, seed=4)),
    "qwen3_vl": qwen("qwen3_vl", text("qwen3_vl_text", MROPE), DEEPSTACK, seed=7),
    "qwen3_vl_moe": qwen("qwen3_vl_moe", text("qwen3_vl_moe_text", EXPERTS, MROPE), DEEPSTACK, seed=1),
    "qwen3_5_moe": qwen("qwen3_5_moe", text("qwen3_5_moe_text", EXPERTS, GATED_DELTA, DEFAULT_BASE), {}, seed=2),
}

IN_WORDS: dict[str, tuple[str, str, str]] = {
    "qwen_vl": ("patches of any shape", "three", "one run"),
    "glm_v": ("patches of any shape", "three", "one run"),
    "gemma3": (
        "one square; with pan-and-scan also its crops",
        "one",
        "one run of as many tokens for every square, between two empty lines",
    ),
    "pixtral": ("patches of any shape", "one", "one run per row"),
    "idefics3": ("tiles and a thumbnail", "one", "one run per tile, each behind its row and column"),
    "internvl": ("tiles and a thumbnail", "one", "one run"),
    "internvl_chat": ("tiles and a thumbnail", "one", "one run, at the place of the image in the text"),
    "llava": ("one square, cut out of the middle", "one", "one run of as many tokens for every image"),
    "llava_onevision": (
        "tiles of the padded image behind a square of the whole",
        "one",
        "one run, with a token at the end of each row of the tiles",
    ),
    "llava_siglip": ("one square", "one", "one run of as many tokens for every image"),
}
"""By the name of the family: what its tower takes, rope positions per token, image tokens in the prompt."""


def images_table() -> str:
    """Return the table of engine/README.md: the models whose images are supported."""
    lines = ["| models | image | rope positions | in the prompt |", "|---|---|---|---|"]
    for family in FAMILIES:
        models = ", ".join(f"`{model_type}`" for model_type in sorted(family.model_types))
        models += "".join(f" with `{tower}`" for tower in sorted(family.towers))
        lines.append(f"| {models} | {' | '.join(IN_WORDS[family.name])} |")
    return "\n".join(lines)
