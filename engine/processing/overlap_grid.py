"""OverlapGrid: a square of the whole image and overlapping crops of its enlarged copy, as Molmo2 takes them.

Image workers import this module, so it imports only NumPy and Pillow.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from PIL import Image

from engine.processing.image_grid import ImageGrid, ImageLayout
from engine.processing.pooled_patches import pooled


@dataclass(frozen=True)
class OverlapGrid(ImageGrid):
    """The steps of Molmo2's image processor before the normalisation of pixels.

    A token has the features of a square of patches, counted over the whole copy. A patch that several crops contain is
    taken from the crop in which it is farther from the edge.
    """

    side: int  # pixels of a crop
    margin: int  # patches along each edge of a crop that are taken from the next crop, where there is one
    max_crops: int  # without the square of the whole image

    @property
    def crop_side(self) -> int:
        """Patches along each side of a crop."""
        return self.side // self.patch_size

    @property
    def step(self) -> int:
        """Patches between the beginnings of two neighbouring crops."""
        return self.crop_side - 2 * self.margin

    @property
    def max_tokens(self) -> int:
        return max(self.num_tokens(self._layout(*pair)) for pair in self._choices)

    @property
    def token_bytes(self) -> int:
        """Most bytes of patches per token: an image may have more patches than squares of them."""
        return -(-3 * (1 + self.max_crops) * (self.crop_side * self.patch_size) ** 2 // self.max_tokens)

    def limited(self, max_tokens: int) -> "OverlapGrid":
        fewer = (replace(self, max_crops=max_crops) for max_crops in range(self.max_crops, 1, -1))
        return next((grid for grid in fewer if grid.max_tokens <= max_tokens), replace(self, max_crops=1))

    def layout(self, width: int, height: int) -> ImageLayout:
        return self._layout(*self._rows_and_columns(width, height))

    def num_tokens(self, layout: ImageLayout) -> int:
        height, width = layout.unpadded
        return pooled(self.crop_side) ** 2 + pooled(height) * pooled(width)

    def target_size(self, width: int, height: int) -> tuple[int, int]:
        return self._copy_size(width, height)

    def _copy_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height of the copy that is cut into crops."""
        new_height, new_width = self._layout(*self._rows_and_columns(width, height)).unpadded
        return new_width * self.patch_size, new_height * self.patch_size

    def _frames(self, image: Image.Image, width: int, height: int) -> list[Image.Image]:
        copy = self._resized(image, (width, height), self._copy_size(width, height))
        rows, columns = self._rows_and_columns(width, height)
        step = self.step * self.patch_size
        corners = [(column * step, row * step) for row in range(rows) for column in range(columns)]
        crops = [copy.crop((left, top, left + self.side, top + self.side)) for left, top in corners]
        return [self._resized(image, (width, height), (self.side, self.side)), *crops]

    def _resized(self, image: Image.Image, size: tuple[int, int], new_size: tuple[int, int]) -> Image.Image:
        """Return a copy of an image in a new size. size: The image's width and height before a reduced decoding."""
        return image.resize(new_size, resample=self.resample)

    def _layout(self, rows: int, columns: int) -> ImageLayout:
        unpadded = (rows * self.step + 2 * self.margin, columns * self.step + 2 * self.margin)
        return ImageLayout((1 + rows * columns, self.crop_side, self.crop_side), (rows, columns), unpadded)

    def _rows_and_columns(self, width: int, height: int) -> tuple[int, int]:
        """Return the crops along height and width that enlarge the image least, or else reduce it least.

        Source: `select_tiling` of mlx_vlm's Molmo2 processor, in whose float32 equal scales are told apart.
        """
        margins = 2 * self.margin * self.patch_size
        sides = np.array(self._choices, np.float32) * (self.step * self.patch_size)
        with np.errstate(divide="ignore"):
            scales = (sides / np.array((height - margins, width - margins), np.float32)).min(axis=-1)
        best = scales.argmax() if (scales < 1).all() else np.where(scales < 1, 1e9, scales).argmin()
        return self._choices[int(best)]

    @cached_property
    def _choices(self) -> list[tuple[int, int]]:
        sides = range(1, self.max_crops + 1)
        pairs = [(rows, columns) for rows in sides for columns in sides if rows * columns <= self.max_crops]
        return sorted(pairs, key=lambda pair: (pair[0] * pair[1], pair[0]))
