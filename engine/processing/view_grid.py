"""ViewGrid: a padded square of the whole image and smaller tiles of it, as DeepSeek-OCR takes them.

Image workers import this module, so it imports only NumPy and Pillow.
"""

import math
from dataclasses import dataclass, replace

from PIL import Image

from engine.processing.image_grid import ImageGrid, ImageLayout
from engine.processing.tile_grid import arrangements, closest_tiles, tiles_of

MIN_TILES = 2
"""Fewest tiles of an image that is cut."""


@dataclass(frozen=True)
class ViewSides:
    """The views that a tower takes: the whole image in padding, and its tiles."""

    square: int  # pixels per side
    tile: int  # pixels per side
    max_tiles: int

    @property
    def block(self) -> int:
        """Pixels per side of the largest square that divides both views."""
        return math.gcd(self.square, self.tile)

    @property
    def square_blocks(self) -> int:
        return (self.square // self.block) ** 2

    @property
    def tile_blocks(self) -> int:
        return (self.tile // self.block) ** 2


DEEPSEEK_OCR = ViewSides(square=1024, tile=640, max_tiles=9)
DEEPSEEK_OCR_2 = ViewSides(square=1024, tile=768, max_tiles=6)


@dataclass(frozen=True)
class ViewGrid(ImageGrid):
    """The steps of the library's DeepSeek-OCR processors before the normalisation of pixels.

    The library's processor of DeepSeek-OCR-2 cuts every image, small ones into a single tile, unless it is told
    otherwise; the authors and transformers cut only images larger than a tile, into two at least, and so does this.
    As the views differ in size, the frames are the blocks that divide them: those of the square, then of each tile.
    """

    side: int  # pixels of the square
    tile_side: int  # pixels of a tile; smaller images are not cut
    max_tiles: int  # below MIN_TILES no image is cut
    padding: tuple[int, int, int]  # red, green and blue around the image in the square
    has_ends: bool  # whether a token ends each row of the square, and of all tiles together

    def __post_init__(self) -> None:
        object.__setattr__(self, "padding", tuple(self.padding))

    @property
    def sides(self) -> ViewSides:
        return ViewSides(self.side, self.tile_side, self.max_tiles)

    @property
    def max_tokens(self) -> int:
        return self._square_tokens + (self._tiles_tokens(self.max_tiles, 1) if self.max_tiles >= MIN_TILES else 0)

    def limited(self, max_tokens: int) -> "ViewGrid":
        choices = [replace(self, max_tiles=most) for most in range(self.max_tiles, MIN_TILES - 1, -1)]
        return next((one for one in choices if one.max_tokens <= max_tokens), replace(self, max_tiles=MIN_TILES - 1))

    def layout(self, width: int, height: int) -> ImageLayout:
        rows, columns = self._rows_and_columns(width, height)
        sides, num_patches = self.sides, self.sides.block // self.patch_size
        num_blocks = sides.square_blocks + rows * columns * sides.tile_blocks
        return ImageLayout((num_blocks, num_patches, num_patches), (rows, columns))

    def num_tokens(self, layout: ImageLayout) -> int:
        rows, columns = layout.tiles
        return self._square_tokens + (self._tiles_tokens(rows, columns) if rows else 0)

    @property
    def _square_tokens(self) -> int:
        """Tokens of the square, and one behind the whole image."""
        per_side = self.side // self.factor
        return per_side * (per_side + self.has_ends) + 1

    def _tiles_tokens(self, rows: int, columns: int) -> int:
        per_side = self.tile_side // self.factor
        return rows * per_side * (columns * per_side + self.has_ends)

    def target_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height in the square or of all tiles together, whichever is larger."""
        rows, columns = self._rows_and_columns(width, height)
        inner_width, inner_height = self._inner_size(width, height)
        return max(inner_width, columns * self.tile_side), max(inner_height, rows * self.tile_side)

    def _frames(self, image: Image.Image, width: int, height: int) -> list[Image.Image]:
        inner = self._inner_size(width, height)
        square = Image.new("RGB", (self.side, self.side), self.padding)
        left, top = (round((self.side - length) * 0.5) for length in inner)
        square.paste(image.resize(inner, resample=self.resample), (left, top))
        views, (rows, columns) = [square], self._rows_and_columns(width, height)
        if rows:
            size = columns * self.tile_side, rows * self.tile_side
            views += tiles_of(image.resize(size, resample=self.resample), self.tile_side)
        return [block for view in views for block in tiles_of(view, self.sides.block)]

    def _inner_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height in the padding of the square. Source: `ImageOps.contain` of Pillow."""
        if width > height:
            return self.side, round(height / width * self.side)
        return round(width / height * self.side), self.side

    def _rows_and_columns(self, width: int, height: int) -> tuple[int, int]:
        """Return the tiles along height and width, (0, 0) for an image that is not cut."""
        if max(width, height) <= self.tile_side or self.max_tiles < MIN_TILES:
            return 0, 0
        return closest_tiles(width, height, self.tile_side, arrangements(MIN_TILES, self.max_tiles))

    def _salt(self, layout: ImageLayout) -> str:
        return f"tiles {layout.tiles} " if any(layout.tiles) else ""
