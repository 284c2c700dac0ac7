"""TileGrid: images cut into tiles of one size, with a thumbnail of the whole, as InternVL takes them.

Image workers import this module, so it imports only NumPy and Pillow.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

from PIL import Image

from engine.processing.image_grid import ImageGrid, ImageLayout


@dataclass(frozen=True)
class TileGrid(ImageGrid):
    """The steps of GOT-OCR2's image processor, which InternVL uses, before the normalisation of pixels."""

    side: int  # pixels of a tile
    min_tiles: int
    max_tiles: int  # without the thumbnail

    @property
    def tile_tokens(self) -> int:
        return (self.side // self.patch_size) ** 2 // self.merge_size**2

    @property
    def max_tokens(self) -> int:
        return self.tile_tokens * (self.max_tiles + (self.max_tiles > 1))

    def limited(self, max_tokens: int) -> "TileGrid":
        num_tiles = max_tokens // self.tile_tokens
        max_tiles = min(self.max_tiles, num_tiles - 1 if num_tiles > 2 else 1)
        return replace(self, max_tiles=max_tiles, min_tiles=min(self.min_tiles, max_tiles))

    def layout(self, width: int, height: int) -> ImageLayout:
        rows, columns = self._rows_and_columns(width, height)
        num_tiles, num_patches = rows * columns, self.side // self.patch_size
        return ImageLayout((num_tiles + (num_tiles > 1), num_patches, num_patches), (rows, columns))

    def target_size(self, width: int, height: int) -> tuple[int, int]:
        rows, columns = self._rows_and_columns(width, height)
        return columns * self.side, rows * self.side

    def _frames(self, image: Image.Image, width: int, height: int) -> list[Image.Image]:
        size = self.target_size(width, height)
        resized = image.resize(size, resample=self.resample)
        frames = tiles_of(resized, self.side)
        return frames if len(frames) == 1 else [*frames, image.resize((self.side, self.side), resample=self.resample)]

    def _rows_and_columns(self, width: int, height: int) -> tuple[int, int]:
        return closest_tiles(width, height, self.side, arrangements(self.min_tiles, self.max_tiles))


def closest_tiles(width: int, height: int, side: int, choices: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Return the tiles along height and width whose ratio is closest to that of an image of this width and height.

    Of equally close ones the last counts whose area is less than twice the image's.

    Source: `get_optimal_tiled_canvas` of transformers' GOT-OCR2 image processor.

    Args:
        width: Pixels.
        height: Pixels.
        side: Pixels per side of a tile.
        choices: Tiles along height and width that are allowed, (1, 1) if there are none.
    """
    best, least = (1, 1), float("inf")
    for rows, columns in choices:
        difference = abs(width / height - columns / rows)
        is_filled = width * height > 0.5 * side**2 * rows * columns
        if difference < least or (difference == least and is_filled):
            best, least = (rows, columns), difference
    return best


@cache
def arrangements(min_tiles: int, max_tiles: int) -> tuple[tuple[int, int], ...]:
    """Return the tiles along height and width whose number is in a range, those of fewer tiles first."""
    sides = range(1, max_tiles + 1)
    pairs = [(rows, columns) for columns in sides for rows in sides]
    allowed = [pair for pair in pairs if min_tiles <= pair[0] * pair[1] <= max_tiles]
    return tuple(sorted(allowed, key=lambda pair: pair[0] * pair[1]))


def tiles_of(image: Image.Image, side: int) -> list[Image.Image]:
    """Cut an image whose sides are multiples of `side` into squares, row by row."""
    corners = [(left, top) for top in range(0, image.height, side) for left in range(0, image.width, side)]
    return [image.crop((left, top, left + side, top + side)) for left, top in corners]
