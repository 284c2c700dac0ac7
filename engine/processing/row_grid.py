"""RowGrid: images of any shape up to a longest side, as Pixtral takes them; their rows are told apart in the prompt.

Image workers import this module, so it imports only NumPy and Pillow.
"""

import math
from dataclasses import dataclass, replace

from PIL import Image

from engine.processing.image_grid import ImageGrid, ImageLayout


@dataclass(frozen=True)
class RowGrid(ImageGrid):
    """The steps of Pixtral's image processor before the normalisation of pixels."""

    longest_side: int  # pixels

    @property
    def max_tokens(self) -> int:
        return (-(-self.longest_side // self.factor)) ** 2

    def limited(self, max_tokens: int) -> "RowGrid":
        if max_tokens >= self.max_tokens:
            return self
        return replace(self, longest_side=math.isqrt(max_tokens) * self.factor)

    def layout(self, width: int, height: int) -> ImageLayout:
        new_width, new_height = self.target_size(width, height)
        return ImageLayout((1, new_height // self.patch_size, new_width // self.patch_size))

    def target_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height to which an image of this size is resized: multiples of `factor`.

        Source: `get_resize_output_image_size` of transformers' Pixtral image processor.
        """
        ratio = max(width, height) / self.longest_side
        if ratio > 1:
            width, height = math.floor(width / ratio), math.floor(height / ratio)
        new_width, new_height = (((side - 1) // self.factor + 1) * self.factor for side in (width, height))
        return max(new_width, self.factor), max(new_height, self.factor)

    def _frames(self, image: Image.Image, width: int, height: int) -> list[Image.Image]:
        return [image.resize(self.target_size(width, height), resample=self.resample)]
