"""How the grid of each family's images is built."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from engine.processing import grid_settings
from engine.processing.canvas_grid import CanvasGrid
from engine.processing.image_grid import ImageGrid
from engine.processing.native_grid import MAX_SIDE
from engine.processing.navit_grid import NavitGrid, most_squares
from engine.processing.padded_anyres_grid import PaddedAnyresGrid
from engine.processing.paligemma_grid import paligemma_grid
from engine.processing.tile_grid import TileGrid


def _aya_grid(settings: Mapping[str, Any], config: Mapping[str, Any]) -> TileGrid:
    """Return the grid of InternVL's processor for the projector. Raises ValueError if it takes no such tiles."""
    grid = grid_settings.GRIDS["internvl"](settings, config)
    assert isinstance(grid, TileGrid)
    if (width := settings["size"].get("width", grid.side)) != grid.side:
        raise ValueError(f"it makes images of {width} x {grid.side} pixels; supported are squares")
    num_patches, factor = grid.side // grid.patch_size, int(config.get("downsample_factor", 2))
    if factor < 1 or num_patches % factor:
        raise ValueError(f"downsample_factor is {factor}; it must divide the {num_patches} patches of a tile's side")
    if grid.max_tiles > grid_settings.MAX_CROPS:
        raise ValueError(f"max_patches is {grid.max_tiles}; it must be at most {grid_settings.MAX_CROPS}")
    return replace(grid, merge_size=factor)


def _deepseek_vl2_grid(settings: Mapping[str, Any], config: Mapping[str, Any]) -> PaddedAnyresGrid:
    """Return the grid of tiles. Raises ValueError if the tower or the projector takes others."""
    vision, projector = config["vision_config"], config.get("projector_config", {})
    resolutions = [(int(width), int(height)) for width, height in settings["candidate_resolutions"]]
    sizes = resolutions[0][0], int(settings["patch_size"]), int(settings["downsample_ratio"])
    taken = vision.get("image_size", 384), vision.get("patch_size", 16), projector.get("downsample_ratio", 2)
    if sizes != taken:
        raise ValueError(f"tiles, patches and squares of patches are {sizes}; those of config.json are {taken}")
    side, patch_size, merge_size = sizes
    if (named := config.get("candidate_resolutions")) is not None and [list(one) for one in resolutions] != named:
        raise ValueError("its candidate_resolutions differ from those of config.json")
    if odd := next((one for one in resolutions if min(one) < side or any(length % side for length in one)), None):
        raise ValueError(f"candidate_resolutions has {list(odd)}; both must be multiples of {side}, as of the first")
    red, green, blue = (int(255 * value) for value in settings["image_mean"])
    resample, padding = int(settings["resample"]), (red, green, blue)
    return PaddedAnyresGrid(patch_size, merge_size, resample, side, tuple(resolutions), padding)


def _kimi_k25_grid(settings: Mapping[str, Any], config: Mapping[str, Any]) -> NavitGrid:
    """Return the grid, by the names of the published settings or of transformers' class. Raises ValueError."""
    vision, square = config["vision_config"], settings.get("merge_size", settings["merge_kernel_size"])
    given = square if isinstance(square, list) else [square, square]
    merge_size, patch_size = int(given[0]), int(settings["patch_size"])
    merged = vision.get("merge_kernel_size", [2, 2])
    taken = *(merged if isinstance(merged, list) else [merged]), vision.get("patch_size", 14)
    if (sizes := (*given, patch_size)) != taken or given[0] != given[1]:
        raise ValueError(f"merged patches and pixels of a patch are {sizes}; the vision tower takes {taken}")
    places = [vision.get(f"init_pos_emb_{axis}", vision.get(f"pos_emb_{axis}", 64)) for axis in ("height", "width")]
    if places[0] != places[1]:
        raise ValueError(f"the vision tower has {places[0]} x {places[1]} positions; supported are squares")
    max_patches = int(settings.get("max_patches", settings["in_patch_limit"]))
    side = settings["patch_limit_on_one_side"]
    sides = {settings["size"].get(f"max_{axis}") for axis in ("height", "width")} if "size" in settings else {side}
    max_side, *others = sides
    if others or not isinstance(max_side, int) or not merge_size <= max_side <= MAX_SIDE or max_side % merge_size:
        raise ValueError(
            f"patches along a side are at most {max_side}; supported are multiples of {merge_size} to {MAX_SIDE}"
        )
    if max_patches < merge_size**2:
        raise ValueError(f"the most patches of an image are {max_patches}; it must be at least {merge_size**2}")
    most = most_squares(max_patches, max_side, merge_size)
    return NavitGrid(patch_size, merge_size, int(settings["resample"]), max_patches, most, max_side)


def _llama4_grid(settings: Mapping[str, Any], config: Mapping[str, Any]) -> CanvasGrid:
    """Return the grid of tiles. Raises ValueError if the tower takes others."""
    patch_size, side = grid_settings.tower_patches(config, settings["size"]["height"])
    if (width := settings["size"].get("width", side)) != side:
        raise ValueError(f"it makes images of {width} x {side} pixels; supported are squares")
    num_patches, ratio = side // patch_size, float(config["vision_config"].get("pixel_shuffle_ratio", 0.5))
    merge_size = round(1 / ratio) if 0 < ratio <= 1 else 0
    if not merge_size or merge_size * ratio != 1 or num_patches % merge_size:
        raise ValueError(f"pixel_shuffle_ratio is {ratio}; its inverse must divide the {num_patches} patches of a side")
    if not 1 <= (max_tiles := int(settings["max_patches"])) <= grid_settings.MAX_CROPS:
        raise ValueError(f"max_patches is {max_tiles}; it must be between 1 and {grid_settings.MAX_CROPS}")
    return CanvasGrid(patch_size, merge_size, int(settings["resample"]), side, max_tiles)


GRIDS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], ImageGrid]] = {
    **grid_settings.GRIDS,
    "aya_vision": _aya_grid,
    "deepseek_vl2": _deepseek_vl2_grid,
    "kimi_k25": _kimi_k25_grid,
    "llama4": _llama4_grid,
    "paligemma": paligemma_grid,
}
"""By family: builds the grid from the image processor's settings and config.json."""
