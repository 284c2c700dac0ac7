"""How the grid of each family's images is built."""

from collections.abc import Callable, Mapping
from typing import Any

from engine.processing import grid_settings
from engine.processing.image_grid import ImageGrid
from engine.processing.padded_anyres_grid import PaddedAnyresGrid
from engine.processing.paligemma_grid import paligemma_grid


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


GRIDS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], ImageGrid]] = {
    **grid_settings.GRIDS,
    "deepseek_vl2": _deepseek_vl2_grid,
    "paligemma": paligemma_grid,
}
"""By family: builds the grid from the image processor's settings and config.json."""
