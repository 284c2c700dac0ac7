"""PanGrid: one square of the whole image and squares of its crops, as Gemma 3 takes them with pan-and-scan.

Image workers import this module, so it imports only NumPy and Pillow.
"""

import math
from dataclasses import dataclass, replace

from PIL import Image

from engine.processing.image_grid import ImageGrid, ImageLayout


@dataclass(frozen=True)
class PanGrid(ImageGrid):
    """The steps of Gemma 3's image processor with pan-and-scan before the normalisation of pixels."""

    side: int  # pixels of a square
    min_crop_side: int  # pixels; images whose crops would be smaller are not cropped
    max_crops: int  # 0: no image is cropped
    min_ratio: float  # of the longer side to the shorter one; other images are not cropped

    @property
    def square_tokens(self) -> int:
        return (self.side // self.patch_size) ** 2 // self.merge_size**2

    @property
    def max_tokens(self) -> int:
        return self.square_tokens * (1 + self.max_crops)

    def limited(self, max_tokens: int) -> "PanGrid":
        if max_tokens >= self.max_tokens:
            return self
        max_crops = max_tokens // self.square_tokens - 1
        return replace(self, max_crops=max_crops if max_crops > 1 else 0)

    def layout(self, width: int, height: int) -> ImageLayout:
        rows, columns = self._crops(width, height)
        num_patches = self.side // self.patch_size
        return ImageLayout((1 + rows * columns, num_patches, num_patches), (rows, columns))

    def target_size(self, width: int, height: int) -> tuple[int, int]:
        rows, columns = self._crops(width, height)
        return max(columns, 1) * self.side, max(rows, 1) * self.side

    def _frames(self, image: Image.Image, width: int, height: int) -> list[Image.Image]:
        rows, columns = self._crops(width, height)
        if not rows:
            return [self._square(image)]
        across, down = -(-image.width // columns), -(-image.height // rows)
        corners = [(across * column, down * row) for row in range(rows) for column in range(columns)]
        boxes = [(left, top, min(left + across, image.width), min(top + down, image.height)) for left, top in corners]
        return [self._square(image), *(self._square(image.crop(box)) for box in boxes)]

    def _square(self, image: Image.Image) -> Image.Image:
        return image.resize((self.side, self.side), resample=self.resample)

    def _crops(self, width: int, height: int) -> tuple[int, int]:
        """Return the crops along height and width, (0, 0) for an image that is not cropped.

        Source: `pan_and_scan` of transformers' Gemma 3 image processor.
        """
        longer, shorter = max(width, height), min(width, height)
        if not self.max_crops or longer / shorter < self.min_ratio:
            return 0, 0
        wanted = min(math.floor(longer / self.min_crop_side), math.floor(longer / shorter + 0.5))
        num_crops = min(self.max_crops, max(2, wanted))
        if min(-(-longer // num_crops), shorter) < self.min_crop_side:
            return 0, 0
        return (1, num_crops) if width >= height else (num_crops, 1)
