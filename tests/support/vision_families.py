"""The vision zoo's table: one tiny configuration per family whose images are supported, and the library's processor."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mlx_vlm.models.qwen3_vl.processing_qwen3_vl import Qwen3VLVideoProcessor
from PIL import Image
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from engine.processing.vision_families import FAMILIES, QWEN_VL
from engine.protocol import ImagePatches
from tests.support.aya_family import AYA_VISION
from tests.support.deepseek_vl2_family import DEEPSEEK_VL2
from tests.support.families.family import (
    DEFAULT_BASE,
    EXPERTS,
    GATED_DELTA,
    MROPE,
    SCALED_QUERIES,
    WINDOWS,
    text,
)
from tests.support.families.vision import VISION_FAMILIES
from tests.support.gemma4_family import GEMMA4_SIGHTED
from tests.support.kimi_family import KIMI_K25, KIMI_VL
from tests.support.lfm2_family import LFM2_VL, UNDIVIDED
from tests.support.llama4_family import LLAMA4
from tests.support.molmo2_family import MOLMO2
from tests.support.molmo_family import MOLMO
from tests.support.paligemma_family import ONE, TWO
from tests.support.phi3v_family import PHI3_V
from tests.support.phi4_family import PHI4
from tests.support.sighted_family import (
    IDS,
    IMAGE_SIZE,
    NORMALIZED,
    PATCH,
    TOWER,
    Pixels,
    SightedFamily,
    prepared,
    sighted,
)
from tests.support.square_families import (
    GEMMA3,
    INTERNVL,
    INTERNVL_CHAT,
    LLAVA,
    LLAVA_NEXT,
    LLAVA_SIGLIP,
    ONEVISION,
    PANNED,
    idefics3,
)
from tests.support.view_families import DEEPSEEK_OCR, DEEPSEEK_OCR_2

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


# PaddleOCR-VL: likewise, row by row

PADDLEOCR_PROCESSOR: dict[str, Any] = {
    "image_processor_type": "PaddleOCRVLImageProcessor",
    "patch_size": PATCH,
    "temporal_patch_size": 1,
    "merge_size": 2,
    "min_pixels": 4 * 16**2,
    "max_pixels": 16 * 16**2,
    **NORMALIZED,
}


def paddleocr(seed: int = 0) -> SightedFamily:
    text_config = VISION_FAMILIES["paddleocr_vl"].config
    config = {
        **text_config,
        **QWEN_IDS,
        "image_token_id": IDS["<image>"],
        "eos_token_id": IDS["<|im_end|>"],
        "hidden_size": 1024,  # the tower's projector knows no other
        "vision_config": {"model_type": "paddleocr_vl", **TOWER},
    }
    made = prepared(PaddleOCRVLImageProcessorPil, PADDLEOCR_PROCESSOR, "pixel_values", "image_grid_thw")

    def pixels(images: Sequence[Image.Image]) -> Pixels:
        arrays = made(images)
        return {**arrays, "pixel_values": arrays["pixel_values"].reshape(1, -1, 3, PATCH, PATCH)}

    return SightedFamily(config, PADDLEOCR_PROCESSOR, pixels, qwen_placed, "<start><image><end>", seed)


DOTS_PROCESSOR = {**QWEN_PROCESSOR, "temporal_patch_size": 1}
DOTS_OCR = SightedFamily(
    sighted(
        "dots_ocr",
        text("dots_ocr"),
        {"model_type": "dots_vit", **TOWER, "embed_dim": 32, "hidden_size": 64, "num_channels": 3},
        video_token_id=IDS["<video>"],
    ),
    DOTS_PROCESSOR,
    prepared(Qwen2VLImageProcessorPil, DOTS_PROCESSOR, "pixel_values", "image_grid_thw"),
    qwen_placed,
    "<start><image><end>",
    seed=7,
)

DEEPSTACK = {"deepstack_visual_indexes": [0, 1]}

QWEN2_VISION = {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2.0}
WINDOW_VISION = {"window_size": 4 * PATCH, "fullatt_block_indexes": [1]}


def flat(family: SightedFamily) -> SightedFamily:
    """Return the family with its text_config at the top of config.json, where Qwen2-VL has it."""
    config = {**family.config.pop("text_config"), **family.config}
    return replace(family, config=config)


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


SIGHTED: dict[str, SightedFamily] = {
    "gemma3": GEMMA3,
    "gemma3 with pan-and-scan": PANNED,
    "gemma4": GEMMA4_SIGHTED,
    "pixtral": rows("pixtral", text("mistral"), 1, seed=1),
    "llava_next": LLAVA_NEXT,
    "llava_onevision": ONEVISION,
    "mistral3": rows("mistral3", text("ministral3", WINDOWS, rope_parameters=SCALED_QUERIES), 2, seed=3),
    "molmo": MOLMO,
    "molmo2": MOLMO2,
    "kimi_vl": KIMI_VL,
    "kimi_k25": KIMI_K25,
    "lfm2_vl": LFM2_VL,
    "lfm2-vl": UNDIVIDED,
    "paligemma": ONE,
    "paligemma with gemma2": TWO,
    "phi3_v": PHI3_V,
    "phi4-siglip": PHI4,
    "idefics3": idefics3("idefics3", text("llama"), seed=8),
    "smolvlm": idefics3("smolvlm", text("llama"), seed=8),
    "internvl": INTERNVL,
    "internvl_chat": INTERNVL_CHAT,
    "aya_vision": AYA_VISION,
    "llama4": LLAMA4,
    "llava": LLAVA,
    "llava with siglip_vision_model": LLAVA_SIGLIP,
    "glm4v": glm("glm4v", seed=3),
    "glm4v_moe": glm("glm4v_moe", seed=3),
    "glm_ocr": glm("glm_ocr", "Glm46V", seed=17),
    "dots_ocr": DOTS_OCR,
    "deepseekocr": DEEPSEEK_OCR,
    "deepseekocr_2": DEEPSEEK_OCR_2,
    "deepseek_vl_v2": DEEPSEEK_VL2,
    "paddleocr_vl": paddleocr(seed=2),
    "qwen2_vl": flat(qwen("qwen2_vl", text("qwen2_vl", MROPE), QWEN2_VISION, seed=1)),
    "qwen2_5_vl": flat(qwen("qwen2_5_vl", text("qwen2_5_vl", MROPE), WINDOW_VISION, seed=4)),
    "qwen3_vl": qwen("qwen3_vl", text("qwen3_vl_text", MROPE), DEEPSTACK, seed=7),
    "qwen3_vl_moe": qwen("qwen3_vl_moe", text("qwen3_vl_moe_text", EXPERTS, MROPE), DEEPSTACK, seed=1),
    "qwen3_5_moe": qwen("qwen3_5_moe", text("qwen3_5_moe_text", EXPERTS, GATED_DELTA, DEFAULT_BASE), {}, seed=2),
}

IN_WORDS: dict[str, tuple[str, str, str]] = {
    "qwen_vl": ("patches of any shape", "three", "one run"),
    "glm_v": ("patches of any shape", "three", "one run"),
    "dots_ocr": ("patches of any shape", "one", "one run"),
    "paddleocr": ("patches of any shape", "three", "one run"),
    "gemma3": (
        "one square; with pan-and-scan also its crops",
        "one",
        "one run of as many tokens for every square, between two empty lines",
    ),
    "gemma4": ("patches of any shape, about as many for every image", "one", "one run"),
    "pixtral": ("patches of any shape", "one", "one run per row"),
    "idefics3": ("tiles and a thumbnail", "one", "one run per tile, each behind its row and column"),
    "internvl": ("tiles and a thumbnail", "one", "one run"),
    "internvl_chat": ("tiles and a thumbnail", "one", "one run, at the place of the image in the text"),
    "aya_vision": ("tiles and a thumbnail", "one", "one run per tile, each behind its number"),
    "llama4": (
        "tiles of the canvas that fits the image best, and a square of the whole",
        "one",
        "one run per tile, with tokens between the columns and behind each row, and one of the whole",
    ),
    "llava": ("one square, cut out of the middle", "one", "one run of as many tokens for every image"),
    "llava_next": (
        "tiles of the padded image behind a square of the whole",
        "one",
        "one run, with a token at the end of each row of the tiles",
    ),
    "llava_onevision": (
        "tiles of the padded image behind a square of the whole",
        "one",
        "one run, with a token at the end of each row of the tiles",
    ),
    "molmo": (
        "overlapping crops of the enlarged image behind a square of the whole, in padding",
        "one",
        "one run per row, of the square and then of all crops together, before the text",
    ),
    "molmo2": (
        "overlapping crops of the enlarged image behind a square of the whole",
        "one",
        "one run per row, of the square and then of all crops together",
    ),
    "kimi_k25": ("patches of any shape, with padding", "one", "one run"),
    "kimi_vl": ("patches of any shape, with padding", "one", "one run"),
    "lfm2_vl": (
        "patches of any shape, or tiles and a thumbnail of any shape",
        "one",
        "one run; or one per tile, each behind its row and column, and one of the thumbnail",
    ),
    "phi3_v": (
        "tiles of the enlarged image in padding, and a square of the whole",
        "one",
        "one run, with a token at the end of each row of the tiles and of the square, at the place of the image in the "
        "text",
    ),
    "phi4_siglip": (
        "patches of any shape, about as many as the image has",
        "one",
        "one run, at the place of the image in the text",
    ),
    "llava_siglip": ("one square", "one", "one run of as many tokens for every image"),
    "paligemma": ("one square", "one", "one run of as many tokens for every image, before the text"),
    "deepseek_ocr": (
        "tiles before a padded square of the whole",
        "one",
        "one run, with a token at the end of each row of the tiles and of the square",
    ),
    "deepseek_ocr_2": ("tiles before a padded square of the whole", "one", "one run"),
    "deepseek_vl2": (
        "tiles of the padded image behind a padded square of the whole",
        "one",
        "one run, with a token at the end of each row of the square and of the tiles",
    ),
}
"""By the name of the family: what its tower takes, rope positions per token, image tokens in the prompt."""


def images_table() -> str:
    """Return the table of engine/IMAGES.md: the models whose images are supported."""
    lines = ["| models | image | rope positions | in the prompt |", "|---|---|---|---|"]
    for family in FAMILIES:
        models = ", ".join(f"`{model_type}`" for model_type in sorted(family.model_types))
        models += "".join(f" with `{tower}`" for tower in sorted(family.towers))
        lines.append(f"| {models} | {' | '.join(IN_WORDS[family.name])} |")
    return "\n".join(lines)
