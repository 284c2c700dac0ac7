"""ThumbnailGrid: images of any shape, and tiles of larger ones with a thumbnail of any shape, as LFM2-VL takes them.

Image workers import this module, so it imports only NumPy and Pillow.
"""

import math
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from PIL import Image

from engine.processing.image_grid import ImageGrid, ImageLayout, within
from engine.processing.tile_grid import closest_tiles, tiles_of


@dataclass(frozen=True)
class ThumbnailGrid(ImageGrid):
    """The steps of LFM2-VL's image processor before the normalisation of pixels."""

    min_whole: int  # tokens; smaller images in one piece are enlarged
    max_whole: int  # tokens; larger images in one piece are reduced, and so are thumbnails
    tolerance: float  # times as many tokens as max_whole are still reduced instead of divided into tiles
    side: int  # pixels of a tile
    min_tiles: int
    max_tiles: int  # without the thumbnail; 0: no image is divided
    has_thumbnail: bool

    @property
    def tile_tokens(self) -> int:
        return (self.side // self.factor) ** 2

    @property
    def max_tokens(self) -> int:
        return max(self.max_whole, self.max_tiles * self.tile_tokens + bool(self.max_tiles) * self._thumbnail_tokens)

    @property
    def _thumbnail_tokens(self) -> int:
        return self.max_whole if self.has_thumbnail else 0

    def limited(self, max_tokens: int) -> "ThumbnailGrid":
        if max_tokens >= self.max_tokens:
            return self
        fewer = replace(self, max_whole=min(self.max_whole, max_tokens))
        if fewer.max_whole < self.max_whole:  # enlarging rounds up to whole tokens: the least is far below the most
            fewer = replace(fewer, min_whole=min(self.min_whole, max(fewer.max_whole // 4, 1)))
        max_tiles = min((max_tokens - fewer._thumbnail_tokens) // self.tile_tokens, self.max_tiles)
        return replace(fewer, max_tiles=max_tiles if max_tiles >= self.min_tiles else 0)

    def layout(self, width: int, height: int) -> ImageLayout:
        whole_width, whole_height = self._whole_size(width, height)
        whole = whole_height // self.patch_size, whole_width // self.patch_size
        if not self._is_divided(width, height):
            return ImageLayout((1, *whole))
        rows, columns = self._rows_and_columns(width, height)
        side = self.side // self.patch_size
        thumbnail = whole if self.has_thumbnail else (0, 0)
        return ImageLayout((rows * columns, side, side), (rows, columns), thumbnail=thumbnail)

    def target_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height that suffice for the tiles and for the thumbnail."""
        whole_width, whole_height = self._whole_size(width, height)
        if not self._is_divided(width, height):
            return whole_width, whole_height
        rows, columns = self._rows_and_columns(width, height)
        return max(columns * self.side, whole_width), max(rows * self.side, whole_height)

    def _frames(self, image: Image.Image, width: int, height: int) -> list[Image.Image]:
        whole = self._whole_size(width, height)
        if not self._is_divided(width, height):
            return [image.resize(whole, resample=self.resample)]
        rows, columns = self._rows_and_columns(width, height)
        tiles = tiles_of(image.resize((columns * self.side, rows * self.side), resample=self.resample), self.side)
        return [*tiles, image.resize(whole, resample=self.resample)] if self.has_thumbnail else tiles

    def _patches(self, pixels: np.ndarray, rows: int, columns: int) -> np.ndarray:
        height, width, _ = pixels.shape  # a thumbnail has not the shape of a tile
        return super()._patches(pixels, height // self.patch_size, width // self.patch_size)

    def _whole_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height in one piece.

        Source: `_smart_resize` of mlx_vlm's LFM2-VL processor, which gives very narrow images more than max_whole.
        """
        rows, columns = (max(1, round(side / self.factor)) for side in (height, width))
        if rows * columns > self.max_whole:
            scale = math.sqrt(height * width / (self.max_whole * self.factor**2))
            rows, columns = (max(1, math.floor(side / scale / self.factor)) for side in (height, width))
        elif rows * columns < self.min_whole:
            scale = math.sqrt(self.min_whole * self.factor**2 / (height * width))
            rows, columns = (math.ceil(side * scale / self.factor) for side in (height, width))
        rows, columns = within(rows, columns, self.max_whole)
        return columns * self.factor, rows * self.factor

    def _is_divided(self, width: int, height: int) -> bool:
        """Return whether an image is divided into tiles. Source: `_is_image_too_large` of mlx_vlm's processor."""
        new_width, new_height = (
            max(self.patch_size, round(side / self.factor) * self.factor) for side in (width, height)
        )
        most = self.max_whole * self.factor**2 * self.tolerance
        return self.max_tiles > 0 and new_width * new_height > most

    def _rows_and_columns(self, width: int, height: int) -> tuple[int, int]:
        """Return the tiles along height and width whose ratio is closest to the image's.

        Source: `_get_grid_layout` of mlx_vlm's LFM2-VL processor; of ratios that are equally close, the order of a set
        decides there.
        """
        return closest_tiles(width, height, self.side, _arrangements(self.min_tiles, self.max_tiles))


@cache
def _arrangements(fewest: int, most: int) -> tuple[tuple[int, int], ...]:
    """Return rows and columns of tiles whose product is in a range, in the library's order."""
    pairs = ((c, r) for n in range(fewest, most + 1) for c in range(1, n + 1) for r in range(1, n + 1))
    allowed = {pair for pair in pairs if fewest <= pair[0] * pair[1] <= most}
    return tuple((rows, columns) for columns, rows in sorted(allowed, key=lambda pair: pair[0] * pair[1]))
