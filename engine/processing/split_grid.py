"""SplitGrid: images scaled to a longest side, cut into tiles, with a thumbnail, as Idefics3 and SmolVLM take them.

Image workers import this module, so it imports only NumPy and Pillow.
"""

import math
from dataclasses import dataclass, replace

from PIL import Image

from engine.processing.image_grid import ImageGrid, ImageLayout
from engine.processing.tile_grid import tiles_of

MAX_SIDE = 4096
"""Most pixels per side before an image is cut into tiles."""


@dataclass(frozen=True)
class SplitGrid(ImageGrid):
    """The steps of Idefics3's image processor before the normalisation of pixels."""

    side: int  # pixels of a tile
    longest_side: int  # pixels to which the longer side is scaled, up or down, before the cut
    splits: bool = True  # otherwise every image is one tile

    @property
    def tile_tokens(self) -> int:
        return (self.side // self.patch_size) ** 2 // self.merge_size**2

    @property
    def max_tokens(self) -> int:
        most = -(-min(self.longest_side, MAX_SIDE) // self.side) if self.splits else 1
        return self.tile_tokens * (most**2 + (most > 1))

    def limited(self, max_tokens: int) -> "SplitGrid":
        if max_tokens >= self.max_tokens:
            return self
        most = max(math.isqrt(max(max_tokens // self.tile_tokens - 1, 0)), 1)
        return replace(self, longest_side=min(self.longest_side, most * self.side))

    def layout(self, width: int, height: int) -> ImageLayout:
        new_width, new_height = self._whole_tiles(width, height)
        rows, columns, num_patches = new_height // self.side, new_width // self.side, self.side // self.patch_size
        if rows * columns == 1:
            return ImageLayout((1, num_patches, num_patches))
        return ImageLayout((rows * columns + 1, num_patches, num_patches), (rows, columns))

    def target_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height with the longest side. Source: `resize` of transformers' processor."""
        ratio = width / height
        if width >= height:
            width, height = self.longest_side, int(self.longest_side / ratio)
            height += height % 2
        else:
            width, height = int(self.longest_side * ratio), self.longest_side
            width += width % 2
        width, height = max(width, 1), max(height, 1)
        ratio = width / height
        if width >= height and width > MAX_SIDE:
            width, height = MAX_SIDE, int(MAX_SIDE / ratio)
        elif height > width and height > MAX_SIDE:
            width, height = int(MAX_SIDE * ratio), MAX_SIDE
        return max(width, 1), max(height, 1)

    def _whole_tiles(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height, multiples of a tile's side, that are cut."""
        if not self.splits:
            return self.side, self.side
        width, height = self.target_size(width, height)
        ratio = width / height
        if width >= height:
            width = self._up(width)
            return width, self._up(int(width / ratio))
        height = self._up(height)
        return self._up(int(height * ratio)), height

    def _up(self, length: int) -> int:
        return math.ceil(length / self.side) * self.side

    def _frames(self, image: Image.Image, width: int, height: int) -> list[Image.Image]:
        scaled = image.resize(self.target_size(width, height), resample=self.resample)
        whole = scaled.resize(self._whole_tiles(width, height), resample=self.resample)
        frames = tiles_of(whole, self.side)
        return frames if len(frames) == 1 else [*frames, whole.resize((self.side, self.side), resample=self.resample)]
