"""How the grid of each family's images is built."""

from collections.abc import Callable, Mapping
from typing import Any

from engine.processing import grid_settings
from engine.processing.image_grid import ImageGrid
from engine.processing.paligemma_grid import paligemma_grid

GRIDS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], ImageGrid]] = {
    **grid_settings.GRIDS,
    "paligemma": paligemma_grid,
}
"""By family: builds the grid from the image processor's settings and config.json."""
