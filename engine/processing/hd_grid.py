"""HDGrid: tiles of the enlarged image in white padding, as Phi-3-vision takes them.

Image workers import this module, so it imports only NumPy and Pillow.
"""

import math
from dataclasses import dataclass, replace

from PIL import Image

from engine.processing.image_grid import ImageGrid, ImageLayout
from engine.processing.tile_grid import tiles_of

WHITE = (255, 255, 255)


@dataclass(frozen=True)
class HDGrid(ImageGrid):
    """The steps of the published processor of Phi-3-vision before the normalisation of pixels.

    The square of the whole image is no part of it: the tower computes it from the normalised tiles, as the processor
    does, whose cubic interpolation leaves the range of uint8.
    """

    side: int  # pixels of a tile
    max_tiles: int  # without the square of the whole image

    @property
    def tile_side(self) -> int:
        """Tokens along each side of a tile."""
        return self.side // self.factor

    @property
    def max_tokens(self) -> int:
        return self._num_tokens(self.max_tiles, 1)

    def limited(self, max_tokens: int) -> "HDGrid":
        fewer = (replace(self, max_tiles=most) for most in range(self.max_tiles, 1, -1))
        return next((grid for grid in fewer if grid.max_tokens <= max_tokens), replace(self, max_tiles=1))

    def layout(self, width: int, height: int) -> ImageLayout:
        across, inner = self._inner_size(max(width, height), min(width, height))
        columns, rows = across // self.side, math.ceil(inner / self.side)
        tiles = (columns, rows) if width < height else (rows, columns)
        num_patches = self.side // self.patch_size
        return ImageLayout((rows * columns, num_patches, num_patches), tiles)

    def num_tokens(self, layout: ImageLayout) -> int:
        return self._num_tokens(*layout.tiles)

    def target_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height of the image in the padding."""
        longer, shorter = self._inner_size(max(width, height), min(width, height))
        return (shorter, longer) if width < height else (longer, shorter)

    def _frames(self, image: Image.Image, width: int, height: int) -> list[Image.Image]:
        is_upright = width < height  # such an image is prepared as a transposed one, whose rounding differs
        turned = image.transpose(Image.Transpose.TRANSPOSE) if is_upright else image
        across, inner = self._inner_size(max(width, height), min(width, height))
        padded = Image.new("RGB", (across, math.ceil(inner / self.side) * self.side), WHITE)
        padded.paste(turned.resize((across, inner), resample=self.resample), (0, (padded.height - inner) // 2))
        return tiles_of(padded.transpose(Image.Transpose.TRANSPOSE) if is_upright else padded, self.side)

    def _num_tokens(self, rows: int, columns: int) -> int:
        """Return the tokens of the tiles, of the ends of their rows, of the separator, and likewise of the square."""
        side = self.tile_side
        return rows * side * (columns * side + 1) + 1 + side * (side + 1)

    def _inner_size(self, longer: int, shorter: int) -> tuple[int, int]:
        """Return the sides in the padding, as long as the most tiles allow. Source: `HD_transform` of the processor."""
        ratio, most = longer / shorter, 1
        while (most + 1) * math.ceil((most + 1) / ratio) <= self.max_tiles:
            most += 1
        across = most * self.side
        return across, max(int(across / ratio), 1)

    def _salt(self, layout: ImageLayout) -> str:
        return f"tiles {layout.tiles} "
