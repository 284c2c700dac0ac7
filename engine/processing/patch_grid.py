"""PatchGrid: images of any shape, resized to whole tokens, as Qwen2-VL, its successors and GLM-4.1V take them.

Image workers import this module, so it imports only NumPy and Pillow.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image

from engine.processing.image_grid import ImageGrid, ImageLayout, within


@dataclass(frozen=True)
class PatchGrid(ImageGrid):
    """The steps of a Qwen2-VL or GLM-4.1V image processor before the normalisation of pixels."""

    min_pixels: int  # smaller images are enlarged
    max_pixels: int  # larger images are reduced
    enlarges: bool = False  # scales images with a side below `factor` up to it first, as GLM-4.1V does

    @property
    def max_tokens(self) -> int:
        return self.max_pixels // self.factor**2

    def limited(self, max_tokens: int) -> "PatchGrid":
        max_pixels = min(self.max_pixels, max_tokens * self.factor**2)
        return replace(self, max_pixels=max_pixels, min_pixels=min(self.min_pixels, max_pixels))

    def layout(self, width: int, height: int) -> ImageLayout:
        new_width, new_height = self.target_size(width, height)
        return ImageLayout((1, new_height // self.patch_size, new_width // self.patch_size))

    def target_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height to which an image of this size is resized: multiples of `factor`.

        Source: `smart_resize` of transformers' Qwen2-VL and GLM-4.1V image processors, which gives very narrow images
        more than max_pixels.
        """
        if self.enlarges and min(width, height) < self.factor:
            scale = max(self.factor / height, self.factor / width)
            width, height = int(width * scale), int(height * scale)
        rows, columns = (round(side / self.factor) for side in (height, width))
        pixels = rows * columns * self.factor**2
        if pixels > self.max_pixels:
            scale = math.sqrt(height * width / self.max_pixels)
            rows, columns = (max(1, math.floor(side / scale / self.factor)) for side in (height, width))
        elif pixels < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (height * width))
            rows, columns = (math.ceil(side * scale / self.factor) for side in (height, width))
        rows, columns = within(rows, columns, self.max_tokens)
        return columns * self.factor, rows * self.factor

    def _frames(self, image: Image.Image, width: int, height: int) -> list[Image.Image]:
        return [image.resize(self.target_size(width, height), resample=self.resample)]

    def _patches(self, pixels: np.ndarray, rows: int, columns: int) -> np.ndarray:
        """Cut uint8 [height, width, 3] into patches; those that share a token follow each other."""
        patch, merge = self.patch_size, self.merge_size
        blocks = pixels.reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
        patches = blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, patch, patch)
        return np.ascontiguousarray(patches)


@dataclass(frozen=True)
class RasterGrid(PatchGrid):
    """The steps of PaddleOCR-VL's image processor: likewise, but with the patches row by row.

    A side below `factor` is enlarged to it, one side after the other, before anything else.
    """

    def target_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height. Source: `smart_resize` of transformers' PaddleOCR-VL image processor."""
        if height < self.factor:
            width, height = round(width * self.factor / height), self.factor
        if width < self.factor:
            width, height = self.factor, round(height * self.factor / width)
        return super().target_size(width, height)

    def _patches(self, pixels: np.ndarray, rows: int, columns: int) -> np.ndarray:
        return ImageGrid._patches(self, pixels, rows, columns)
