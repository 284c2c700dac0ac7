"""AreaGrid: images of any shape, enlarged or reduced to the most patches that a model takes, as Gemma 4's.

Image workers import this module, so it imports only NumPy and Pillow.
"""

import math
from dataclasses import dataclass, replace

from PIL import Image

from engine.processing.image_grid import ImageGrid, ImageLayout


@dataclass(frozen=True)
class AreaGrid(ImageGrid):
    """The steps of Gemma 4's image processor before the normalisation of pixels."""

    most_tokens: int  # squares of merge_size x merge_size patches

    @property
    def max_tokens(self) -> int:
        return self.most_tokens

    def limited(self, max_tokens: int) -> "AreaGrid":
        return replace(self, most_tokens=max(min(self.most_tokens, max_tokens), 1))

    def layout(self, width: int, height: int) -> ImageLayout:
        columns, rows = (side // self.patch_size for side in self.target_size(width, height))
        return ImageLayout((1, rows, columns))

    def target_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height to which an image of this size is resized.

        Both are whole squares, rounded down; the image may lose its ratio by that. Source: transformers'
        `get_aspect_ratio_preserving_size` of Gemma 4.
        """
        factor = math.sqrt(self.most_tokens * self.factor**2 / (width * height))
        columns, rows = (math.floor(factor * side / self.factor) for side in (width, height))
        if not rows:
            rows, columns = 1, min(width // height, self.most_tokens)
        elif not columns:
            rows, columns = min(height // width, self.most_tokens), 1
        return max(columns, 1) * self.factor, max(rows, 1) * self.factor

    def _frames(self, image: Image.Image, width: int, height: int) -> list[Image.Image]:
        return [image.resize(self.target_size(width, height), resample=self.resample)]
