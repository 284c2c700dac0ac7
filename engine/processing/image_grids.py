"""The kinds of image grids by name, as a planner describes one to its image workers."""

import json
from dataclasses import asdict

from engine.processing.anyres_grid import AnyresGrid
from engine.processing.area_grid import AreaGrid
from engine.processing.canvas_grid import CanvasGrid
from engine.processing.hd_grid import HDGrid
from engine.processing.image_grid import ImageGrid
from engine.processing.naflex_grid import NaFlexGrid
from engine.processing.native_grid import NativeGrid
from engine.processing.navit_grid import NavitGrid
from engine.processing.overlap_grid import OverlapGrid
from engine.processing.padded_anyres_grid import PaddedAnyresGrid
from engine.processing.padded_overlap_grid import PaddedOverlapGrid
from engine.processing.pan_grid import PanGrid
from engine.processing.patch_grid import PatchGrid, RasterGrid
from engine.processing.row_grid import RowGrid
from engine.processing.split_grid import SplitGrid
from engine.processing.square_grid import SquareGrid
from engine.processing.thumbnail_grid import ThumbnailGrid
from engine.processing.tile_grid import TileGrid
from engine.processing.view_grid import ViewGrid

KINDS: dict[str, type[ImageGrid]] = {
    kind.__name__: kind
    for kind in (
        AnyresGrid,
        AreaGrid,
        CanvasGrid,
        HDGrid,
        NaFlexGrid,
        NativeGrid,
        NavitGrid,
        OverlapGrid,
        PaddedAnyresGrid,
        PaddedOverlapGrid,
        PanGrid,
        PatchGrid,
        RasterGrid,
        RowGrid,
        SplitGrid,
        SquareGrid,
        ThumbnailGrid,
        TileGrid,
        ViewGrid,
    )
}


def to_json(grid: ImageGrid) -> str:
    """Describe a grid as JSON."""
    return json.dumps({"kind": type(grid).__name__, **asdict(grid)})


def from_json(text: str) -> ImageGrid:
    """Return the grid that `to_json` described."""
    fields = json.loads(text)
    return KINDS[fields.pop("kind")](**fields)
