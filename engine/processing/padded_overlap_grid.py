"""PaddedOverlapGrid: a square of the whole image and overlapping crops, both of its padded copy, as Molmo takes them.

Image workers import this module, so it imports only NumPy and Pillow.
"""

from dataclasses import dataclass, replace

import numpy as np
from PIL import Image

from engine.processing.image_grid import ImageLayout
from engine.processing.overlap_grid import OverlapGrid


@dataclass(frozen=True)
class PaddedOverlapGrid(OverlapGrid):
    """The steps of Molmo's image processor before the normalisation of pixels.

    An image keeps its ratio, in black padding. How much of each patch is padding is known to the tower.
    """

    def limited(self, max_tokens: int) -> "PaddedOverlapGrid":
        return replace(self, max_crops=super().limited(max_tokens).max_crops)

    def layout(self, width: int, height: int) -> ImageLayout:
        inner_width, inner_height = inner_size(width, height, *self._copy_size(width, height))
        return replace(super().layout(width, height), inner=(inner_height, inner_width))

    def target_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height in the padding of the copy that is cut into crops, or of the square."""
        of_crops = inner_size(width, height, *self._copy_size(width, height))
        of_square = inner_size(width, height, self.side, self.side)
        return max(of_crops[0], of_square[0]), max(of_crops[1], of_square[1])

    def _resized(self, image: Image.Image, size: tuple[int, int], new_size: tuple[int, int]) -> Image.Image:
        (new_width, new_height), (inner_width, inner_height) = new_size, inner_size(*size, *new_size)
        padded = Image.new("RGB", new_size)
        resized = image.resize((inner_width, inner_height), resample=self.resample)
        padded.paste(resized, ((new_width - inner_width) // 2, (new_height - inner_height) // 2))
        return padded

    def _salt(self, layout: ImageLayout) -> str:
        return f"{super()._salt(layout)}inner {layout.inner} "


def inner_size(width: int, height: int, new_width: int, new_height: int) -> tuple[int, int]:
    """Return the width and height of an image within a padded copy of this new width and height.

    Source: `resize_and_pad` of mlx_vlm's Molmo processor, which computes in float32; it leaves nothing of an extremely
    narrow image.
    """
    scale = min(np.float32(new_width) / np.float32(width), np.float32(new_height) / np.float32(height))
    return max(int(np.float32(width) * scale), 1), max(int(np.float32(height) * scale), 1)
