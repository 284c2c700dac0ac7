"""NativeGrid: images of their own size, in black padding up to whole squares of patches, as Kimi-VL's.

Image workers import this module, so it imports only NumPy and Pillow.
"""

import math
from dataclasses import dataclass, replace

from PIL import Image

from engine.processing.image_grid import ImageGrid, ImageLayout

MAX_SIDE = 512
"""Patches along a side must be fewer: the tower has no more positions."""

SHRINK = 0.98
"""Factor by which an image is reduced further until it is within all limits."""


@dataclass(frozen=True)
class NativeGrid(ImageGrid):
    """The steps of Kimi-VL's image processor before the normalisation of pixels."""

    max_patches: int  # whole ones of the image without its padding; larger images are reduced
    most_tokens: int

    @property
    def max_tokens(self) -> int:
        return self.most_tokens

    def limited(self, max_tokens: int) -> "NativeGrid":
        return replace(self, most_tokens=max(min(self.most_tokens, max_tokens), 1))

    def layout(self, width: int, height: int) -> ImageLayout:
        columns, rows = self._squares(*self.target_size(width, height))
        return ImageLayout((1, rows * self.merge_size, columns * self.merge_size))

    def target_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height to which an image of this size is reduced, before the padding.

        Source: `KimiVLImageProcessor.rescale` of mlx_vlm; limits of tokens and sides, of which the library has none or
        raises an error, reduce the image further.
        """
        num_patches = (width // self.patch_size) * (height // self.patch_size)
        scale = math.sqrt(self.max_patches / num_patches) if num_patches > self.max_patches else 1.0
        while True:
            size = max(int(width * scale), 1), max(int(height * scale), 1)
            columns, rows = self._squares(*size)
            if columns * rows <= self.most_tokens and max(columns, rows) * self.merge_size < MAX_SIDE:
                return size
            scale *= SHRINK

    def _squares(self, width: int, height: int) -> tuple[int, int]:
        return -(-width // self.factor), -(-height // self.factor)

    def _frames(self, image: Image.Image, width: int, height: int) -> list[Image.Image]:
        size = self.target_size(width, height)
        columns, rows = self._squares(*size)
        padded = Image.new("RGB", (columns * self.factor, rows * self.factor))
        padded.paste(image if image.size == size else image.resize(size, resample=self.resample))
        return [padded]


def most_tokens(max_patches: int, merge_size: int) -> int:
    """Return the most tokens of an image with so many whole patches, whose last row and column are mostly padding."""
    side, whole = (MAX_SIDE - 1) // merge_size, max_patches // merge_size**2
    return max(columns * min(whole // max(columns - 1, 1) + 1, side) for columns in range(1, side + 1))
