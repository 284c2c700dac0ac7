"""GRIDS: the grid of each family's images, from the settings of a checkpoint's image processor and config.json."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from engine.processing.anyres_grid import AnyresGrid
from engine.processing.area_grid import AreaGrid
from engine.processing.hd_grid import HDGrid
from engine.processing.image_grid import ImageGrid
from engine.processing.naflex_grid import NaFlexGrid
from engine.processing.native_grid import NativeGrid, most_tokens
from engine.processing.overlap_grid import OverlapGrid
from engine.processing.padded_overlap_grid import PaddedOverlapGrid
from engine.processing.pan_grid import PanGrid
from engine.processing.patch_grid import PatchGrid, RasterGrid
from engine.processing.pooled_patches import POOL
from engine.processing.row_grid import RowGrid
from engine.processing.split_grid import SplitGrid
from engine.processing.square_grid import SquareGrid
from engine.processing.thumbnail_grid import ThumbnailGrid
from engine.processing.tile_grid import TileGrid
from engine.processing.video_grid import VideoGrid
from engine.processing.view_grid import DEEPSEEK_OCR, DEEPSEEK_OCR_2, ViewGrid

QWEN_SETTINGS = (
    *("patch_size", "merge_size", "temporal_patch_size", "min_pixels", "max_pixels", "resample"),
    *("image_mean", "image_std", "rescale_factor", "do_normalize", "do_rescale"),
)

LFM2_SIZES = {"downsample_factor": 2, "tile_size": 512, "max_image_tokens": 256}
"""Settings of LFM2-VL that config.json has as well, and the library's values where it lacks them."""

GEMMA4_SIZES = {"patch_size": 16, "pooling_kernel_size": 3}
"""Settings of Gemma 4 that config.json has as well, and the library's values where it lacks them."""

PHI4_PATCHES = {"min_num_patches": 256, "max_num_patches": 3600}
"""Limits of Phi-4-reasoning-vision where config.json lacks them."""

MAX_CROPS = 64
"""Most tiles or crops of an image: their arrangements are enumerated."""


def _qwen_grid(settings: Mapping[str, Any], config: Mapping[str, Any]) -> PatchGrid:
    # Takes a second, so only processes that read images import it.
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor: Any = Qwen2VLImageProcessorPil(**_qwen_settings(settings))
    size = processor.size
    return PatchGrid(
        patch_size=int(processor.patch_size),
        merge_size=int(processor.merge_size),
        min_pixels=int(size["shortest_edge"]),
        max_pixels=int(size["longest_edge"]),
        resample=int(processor.resample),
    )


def _qwen_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the processor.

    Its class is fixed, since converted checkpoints name mlx-vlm's class, which transformers does not know.
    """
    size = config.get("size") or {}
    pixels = {key: size[key] for key in ("min_pixels", "max_pixels") if key in size}  # in old files
    edges = {key: size[key] for key in ("shortest_edge", "longest_edge") if key in size}
    known = {key: config[key] for key in QWEN_SETTINGS if config.get(key) is not None}
    return {**pixels, **({"size": edges} if len(edges) == 2 else {}), **known}


def video_grid(config: Mapping[str, Any]) -> VideoGrid:
    """Return the grid of a Qwen3-VL video processor, with the defaults of transformers' class, which needs torch."""

    def given(key: str, default: Any) -> Any:
        value = config.get(key)
        return default if value is None else value

    size = given("size", {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768})
    return VideoGrid(
        patch_size=int(given("patch_size", 16)),
        merge_size=int(given("merge_size", 2)),
        group_frames=int(given("temporal_patch_size", 2)),
        resample=int(given("resample", 3)),
        min_pixels=int(size["shortest_edge"]),
        max_pixels=int(size["longest_edge"]),
        fps=float(given("fps", 2)),
        min_frames=int(given("min_frames", 4)),
        max_frames=int(given("max_frames", 768)),
    )


def _glm_grid(settings: Mapping[str, Any], config: Mapping[str, Any]) -> PatchGrid:
    # The limits are those of a still image repeated along time
    frames, size = int(settings["temporal_patch_size"]), settings["size"]
    return PatchGrid(
        patch_size=int(settings["patch_size"]),
        merge_size=int(settings["merge_size"]),
        resample=int(settings["resample"]),
        min_pixels=-(-int(size["shortest_edge"]) // frames),
        max_pixels=int(size["longest_edge"]) // frames,
        enlarges=True,
    )


def _paddleocr_grid(settings: Mapping[str, Any], config: Mapping[str, Any]) -> RasterGrid:
    size = settings["size"]
    return RasterGrid(
        patch_size=int(settings["patch_size"]),
        merge_size=int(settings["merge_size"]),
        resample=int(settings["resample"]),
        min_pixels=int(settings.get("min_pixels", size.get("shortest_edge", size.get("min_pixels")))),
        max_pixels=int(settings.get("max_pixels", size.get("longest_edge", size.get("max_pixels")))),
    )


def _gemma3_grid(settings: Mapping[str, Any], config: Mapping[str, Any]) -> SquareGrid | PanGrid:
    patch_size, side = tower_patches(config, settings["size"]["height"])
    text = config.get("text_config") or {}
    num_tokens = text.get("mm_tokens_per_image") or config.get("mm_tokens_per_image") or 256
    merge_size = side // patch_size // math.isqrt(num_tokens)
    square: dict[str, Any] = {
        "patch_size": patch_size,
        "merge_size": merge_size,
        "resample": int(settings["resample"]),
        "side": side,
    }
    if not settings.get("do_pan_and_scan"):
        return SquareGrid(**square)
    limits: dict[str, Any] = {
        "min_crop_side": int(settings["pan_and_scan_min_crop_size"]),
        "max_crops": int(settings["pan_and_scan_max_num_crops"]),
        "min_ratio": float(settings["pan_and_scan_min_ratio_to_activate"]),
    }
    if min(limits.values()) < 1:
        raise ValueError(f"the limits of pan-and-scan are {limits}; each must be at least 1")
    return PanGrid(**square, **limits)


def _gemma4_grid(settings: Mapping[str, Any], config: Mapping[str, Any]) -> AreaGrid:
    vision = {**GEMMA4_SIZES, **config["vision_config"]}
    for key in GEMMA4_SIZES:
        if settings[key] != vision[key]:
            raise ValueError(f"its {key} is {settings[key]}; the vision tower takes {vision[key]}")
    return AreaGrid(
        patch_size=int(settings["patch_size"]),
        merge_size=int(settings["pooling_kernel_size"]),
        resample=int(settings["resample"]),
        most_tokens=int(settings["max_soft_tokens"]),
    )


def _pixtral_grid(settings: Mapping[str, Any], config: Mapping[str, Any]) -> RowGrid:
    vision, longest_side = config["vision_config"], int(settings["size"]["longest_edge"])
    if longest_side > vision["image_size"]:
        raise ValueError(f"longest_edge is {longest_side}; the vision tower takes {vision['image_size']} pixels")
    return RowGrid(
        patch_size=int(vision["patch_size"]),
        merge_size=int(config.get("spatial_merge_size", 2)) if config["model_type"] == "mistral3" else 1,
        resample=int(settings["resample"]),
        longest_side=longest_side,
    )


def _idefics3_grid(settings: Mapping[str, Any], config: Mapping[str, Any]) -> SplitGrid:
    patch_size, side = tower_patches(config, settings["max_image_size"]["longest_edge"])
    return SplitGrid(
        patch_size=patch_size,
        merge_size=int(config.get("scale_factor", 2)),
        resample=int(settings["resample"]),
        side=side,
        longest_side=int(settings["size"]["longest_edge"]),
        splits=bool(settings["do_image_splitting"]),
    )


def _internvl_grid(settings: Mapping[str, Any], config: Mapping[str, Any]) -> TileGrid:
    patch_size, side = tower_patches(config, settings["size"]["height"])
    return TileGrid(
        patch_size=patch_size,
        merge_size=int(1 / config.get("downsample_ratio", 0.5)),
        resample=int(settings["resample"]),
        side=side,
        min_tiles=int(settings["min_patches"]),
        max_tiles=int(settings["max_patches"]),
    )


def _internvl_chat_grid(settings: Mapping[str, Any], config: Mapping[str, Any]) -> TileGrid:
    """Its image processor knows squares alone: config.json has the numbers of tiles, which code of InternVL's cuts."""
    patch_size, side = tower_patches(
        config, int(config.get("force_image_size") or config["vision_config"]["image_size"])
    )
    return TileGrid(
        patch_size=patch_size,
        merge_size=int(1 / config.get("downsample_ratio", 0.5)),
        resample=int(settings["resample"]),
        side=side,
        min_tiles=int(config.get("min_dynamic_patch", 1)),
        max_tiles=int(config.get("max_dynamic_patch", 12)),
    )


def _llava_grid(settings: Mapping[str, Any], config: Mapping[str, Any]) -> SquareGrid:
    crops = settings.get("do_center_crop", True)
    patch_size, side = tower_patches(config, settings["crop_size" if crops else "size"]["height"])
    if crops and (shortest := settings.get("size", {}).get("shortest_edge", side)) != side:
        raise ValueError(f"shortest_edge is {shortest}; supported is the height of crop_size, {side}")
    return SquareGrid(patch_size=patch_size, merge_size=1, resample=int(settings["resample"]), side=side, crops=crops)


def _llava_siglip_grid(settings: Mapping[str, Any], config: Mapping[str, Any]) -> SquareGrid:
    patch_size, side = tower_patches(config, settings["size"]["height"])
    return SquareGrid(patch_size=patch_size, merge_size=1, resample=int(settings["resample"]), side=side)


def _llava_next_grid(settings: Mapping[str, Any], config: Mapping[str, Any]) -> AnyresGrid:
    side = settings["crop_size"]["height"]
    if (shortest := settings["size"].get("shortest_edge")) != side:
        raise ValueError(f"shortest_edge is {shortest}; supported is the height of crop_size, {side}")
    return _anyres_grid(settings, config, side, max_features=None)


def _llava_onevision_grid(settings: Mapping[str, Any], config: Mapping[str, Any]) -> AnyresGrid:
    ratio = str(config.get("vision_aspect_ratio", "anyres_max_9"))
    if not (match := re.fullmatch(r"anyres_max_([1-9]\d*)", ratio)):
        raise ValueError(f"vision_aspect_ratio is {ratio!r}; supported is anyres_max_N")
    return _anyres_grid(settings, config, settings["size"]["height"], max_features=int(match[1]))


def _anyres_grid(
    settings: Mapping[str, Any], config: Mapping[str, Any], tile_side: int, max_features: int | None
) -> AnyresGrid:
    patch_size, side = tower_patches(config, tile_side)
    resolutions = tuple((int(height), int(width)) for height, width in settings["image_grid_pinpoints"])
    if (named := config.get("image_grid_pinpoints")) is not None and [list(one) for one in resolutions] != named:
        raise ValueError("its image_grid_pinpoints differ from those of config.json")
    if not resolutions or any(length < side or length % side for one in resolutions for length in one):
        raise ValueError(f"image_grid_pinpoints are {resolutions}; each must be a multiple of {side} pixels")
    return AnyresGrid(
        patch_size=patch_size,
        merge_size=1,
        resample=int(settings["resample"]),
        side=side,
        resolutions=resolutions,
        max_features=max_features,
    )


def _kimi_grid(settings: Mapping[str, Any], config: Mapping[str, Any]) -> NativeGrid:
    vision = config["vision_config"]
    side = int(vision.get("spatial_merge_size", 2))
    squares = [settings["merge_kernel_size"], vision.get("merge_kernel_size") or [side, side]]
    if any(list(square) != [side, side] for square in squares):
        raise ValueError(
            f"merge_kernel_size is {squares[0]}, and {squares[1]} in config.json; supported is {[side] * 2}"
        )
    if (patch_size := int(settings["patch_size"])) != vision.get("patch_size", 14):
        raise ValueError(f"its patch_size is {patch_size}; the vision tower takes {vision.get('patch_size', 14)}")
    if not settings["pad_input"]:
        raise ValueError("pad_input is False; supported is True, as images are cut to nothing otherwise")
    max_patches = int(settings["in_token_limit"])
    return NativeGrid(
        patch_size=patch_size,
        merge_size=side,
        resample=3,
        max_patches=max_patches,
        most_tokens=most_tokens(max_patches, side),
    )


def _lfm2_grid(settings: Mapping[str, Any], config: Mapping[str, Any]) -> ThumbnailGrid:
    sizes, tolerance = _lfm2_sizes(settings), float(settings["max_pixels_tolerance"])
    of_model = {**LFM2_SIZES, **config, "encoder_patch_size": config["vision_config"].get("patch_size", 16)}
    for key in ("encoder_patch_size", *LFM2_SIZES):
        if (expected := of_model[key]) != sizes[key]:
            is_lacking = key in LFM2_SIZES and key not in config
            has = "config.json lacks it, which means" if is_lacking else "config.json has"
            raise ValueError(f"{key} is {sizes[key]}; {has} {expected}")
    if not tolerance > 0:
        raise ValueError(f"max_pixels_tolerance is {tolerance}; it must be above 0")
    return ThumbnailGrid(
        patch_size=sizes["encoder_patch_size"],
        merge_size=sizes["downsample_factor"],
        resample=int(settings["resample"]),
        min_whole=sizes["min_image_tokens"],
        max_whole=sizes["max_image_tokens"],
        tolerance=tolerance,
        side=sizes["tile_size"],
        min_tiles=sizes["min_tiles"],
        max_tiles=sizes["max_tiles"] if settings["do_image_splitting"] else 0,
        has_thumbnail=bool(settings["use_thumbnail"]),
    )


def _lfm2_sizes(settings: Mapping[str, Any]) -> dict[str, int]:
    """Return the whole numbers of LFM2-VL's image processor. Raises ValueError for one outside its range."""
    patch_size = settings.get("encoder_patch_size", settings.get("patch_size", 16))
    keys = (*LFM2_SIZES, "min_image_tokens", "min_tiles", "max_tiles")
    sizes = {"encoder_patch_size": int(patch_size), **{key: int(settings[key]) for key in keys}}
    for key, value in sizes.items():
        if value < 1:
            raise ValueError(f"{key} is {value}; it must be at least 1")
    if (side := sizes["tile_size"]) % (factor := sizes["encoder_patch_size"] * sizes["downsample_factor"]):
        raise ValueError(f"tile_size is {side}; it must be a multiple of {factor}")
    if (fewest := sizes["min_image_tokens"]) > (most := sizes["max_image_tokens"]):
        raise ValueError(f"min_image_tokens is {fewest}; it must be at most max_image_tokens, {most}")
    if not 2 <= (least := sizes["min_tiles"]) <= sizes["max_tiles"]:
        raise ValueError(f"min_tiles is {least}; it must be between 2 and max_tiles, {sizes['max_tiles']}")
    _check_crops("max_tiles", sizes["max_tiles"])
    return sizes


def _molmo_grid(settings: Mapping[str, Any], config: Mapping[str, Any]) -> PaddedOverlapGrid:
    """Return the grid for the tower of `vision_config`, or of the library's defaults where it has none."""
    vision = config["vision_config"]
    of_tower = [*vision.get("image_default_input_size", [336, 336]), vision.get("image_patch_size", 14)]
    sizes = [*settings["base_image_input_size"], settings["image_patch_size"]]
    if sizes != of_tower or of_tower[0] != of_tower[1]:
        raise ValueError(f"its crops and patches have {sizes} pixels; the vision tower takes {of_tower}")
    side, _, patch_size = of_tower
    num_tokens = [settings["image_token_length_h"], settings["image_token_length_w"]]
    if num_tokens != (expected := [side // patch_size // POOL] * 2) or side % (POOL * patch_size):
        raise ValueError(f"a crop has {num_tokens} tokens along its sides; the vision tower makes {expected}")
    margin, *others = settings["overlap_margins"]
    most = (side // patch_size - 1) // 2
    if others != [margin] or margin % POOL or not POOL <= margin <= most:
        raise ValueError(f"overlap_margins are {[margin, *others]}; supported are two equal even numbers up to {most}")
    if (max_crops := int(settings["max_crops"])) < 1:
        raise ValueError(f"max_crops is {max_crops}; it must be at least 1")
    _check_crops("max_crops", max_crops)
    found = {"patch_size": patch_size, "merge_size": POOL, "side": side, "margin": margin, "max_crops": max_crops}
    return PaddedOverlapGrid(**found, resample=int(settings["resample"]))


def _molmo2_grid(settings: Mapping[str, Any], config: Mapping[str, Any]) -> OverlapGrid:
    tower, size = config["vision_config"]["vit_config"], settings["size"]
    of_tower = tower.get("image_default_input_size", 378)
    if isinstance(of_tower, list) and of_tower != of_tower[:1] * 2:
        raise ValueError(f"image_default_input_size is {of_tower}; supported are two equal numbers of pixels")
    sizes = {"patch_size": tower.get("image_patch_size", 14), "image_size": of_tower}
    patch_size, side = tower_patches({"vision_config": sizes}, size["height"])
    margin, *others = settings["overlap_margins"]
    if (given := (size["width"], settings["patch_size"], others)) != (expected := (side, patch_size, [margin])):
        raise ValueError(f"width, patch_size and second overlap margin are {given}; supported are {expected}")
    most = (side // patch_size - 1) // 2
    if not 1 <= margin <= most:
        raise ValueError(f"overlap_margins are {margin} patches; supported are 1 to {most}")
    if (pooling := list(settings["pooling_size"])) != [POOL, POOL]:
        raise ValueError(f"pooling_size is {pooling}; supported is {[POOL, POOL]}")
    if (max_crops := int(settings["max_crops"])) < 1:
        raise ValueError(f"max_crops is {max_crops}; it must be at least 1")
    _check_crops("max_crops", max_crops)
    return OverlapGrid(
        patch_size=patch_size,
        merge_size=POOL,
        resample=int(settings["resample"]),
        side=side,
        margin=int(margin),
        max_crops=max_crops,
    )


def _check_crops(key: str, value: int) -> None:
    """Raise ValueError if an image would have more than MAX_CROPS tiles or crops."""
    if value > MAX_CROPS:
        raise ValueError(f"{key} is {value}; it must be at most {MAX_CROPS}")


def _deepseek_ocr_grid(settings: Mapping[str, Any], config: Mapping[str, Any]) -> ViewGrid:
    red, green, blue = (int(value * 255) for value in settings["image_mean"])
    is_second = config["model_type"] == "deepseekocr_2"
    sides = DEEPSEEK_OCR_2 if is_second else DEEPSEEK_OCR
    return ViewGrid(
        patch_size=int(settings["patch_size"]),
        merge_size=int(settings["downsample_ratio"]),
        resample=int(settings["resample"]),
        side=sides.square,
        tile_side=sides.tile,
        max_tiles=sides.max_tiles,
        padding=(red, green, blue),
        has_ends=not is_second,
    )


def _phi3_grid(settings: Mapping[str, Any], config: Mapping[str, Any]) -> HDGrid:
    """Return the grid of CLIP's tower, whose sizes are not in config.json."""
    num_crops = settings.get("num_crops")
    if type(num_crops) is not int or num_crops < 1:
        raise ValueError(f"num_crops is {num_crops!r}; it must be an integer of at least 1")
    _check_crops("num_crops", num_crops)
    return HDGrid(patch_size=14, merge_size=2, resample=int(settings["resample"]), side=336, max_tiles=num_crops)


def _phi4_grid(settings: Mapping[str, Any], config: Mapping[str, Any]) -> NaFlexGrid:
    """Return the grid with the limits of config.json, with which an image processor's own must agree."""
    vision, tower = config["vision_config"], str(config.get("mm_vision_tower"))
    if "naflex" not in tower.lower():
        raise ValueError(f"mm_vision_tower is {tower}; supported are towers for images of any shape (naflex)")
    patch_size = int(vision.get("patch_size", 14 if "patch14" in tower.lower() else 16))
    sizes = {"patch_size": patch_size, **{key: int(config.get(key, most)) for key, most in PHI4_PATCHES.items()}}
    for key, expected in sizes.items():
        if settings.get(key, expected) != expected:
            raise ValueError(f"the image processor has {key}: {settings[key]!r}; config.json means {expected}")
    fewest, most = sizes["min_num_patches"], sizes["max_num_patches"]
    if not 1 <= fewest <= most:
        raise ValueError(f"min_num_patches is {fewest}; it must be between 1 and max_num_patches, {most}")
    return NaFlexGrid(
        patch_size=patch_size,
        merge_size=1,
        resample=int(settings["resample"]),
        min_patches=fewest,
        max_patches=most,
    )


def tower_patches(config: Mapping[str, Any], side: int) -> tuple[int, int]:
    """Return the pixels per side of the vision tower's patches and images. Raises ValueError if `side` is not those."""
    sizes = (config["vision_config"][key] for key in ("patch_size", "image_size"))
    patch_size, image_size = (int(size[0] if isinstance(size, list) else size) for size in sizes)
    if side != image_size:
        raise ValueError(f"it makes images of {side} pixels per side; the vision tower takes {image_size}")
    return patch_size, image_size


GRIDS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], ImageGrid]] = {
    "qwen_vl": _qwen_grid,
    "glm_v": _glm_grid,
    "paddleocr": _paddleocr_grid,
    "dots_ocr": _qwen_grid,
    "gemma3": _gemma3_grid,
    "gemma4": _gemma4_grid,
    "pixtral": _pixtral_grid,
    "idefics3": _idefics3_grid,
    "internvl": _internvl_grid,
    "internvl_chat": _internvl_chat_grid,
    "llava": _llava_grid,
    "llava_siglip": _llava_siglip_grid,
    "llava_next": _llava_next_grid,
    "llava_onevision": _llava_onevision_grid,
    "molmo": _molmo_grid,
    "molmo2": _molmo2_grid,
    "phi3_v": _phi3_grid,
    "phi4_siglip": _phi4_grid,
    "kimi_vl": _kimi_grid,
    "lfm2_vl": _lfm2_grid,
    "deepseek_ocr": _deepseek_ocr_grid,
    "deepseek_ocr_2": _deepseek_ocr_grid,
}
"""By family: builds the grid from the image processor's settings and config.json. See family_grids.py for all."""
