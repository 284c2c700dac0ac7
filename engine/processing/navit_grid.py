"""NavitGrid: images of their own size, in black padding up to whole squares of patches, as Kimi K2.5 takes them.

Image workers import this module, so it imports only NumPy and Pillow.
"""

import math
from dataclasses import dataclass

from engine.processing.native_grid import SHRINK, NativeGrid


@dataclass(frozen=True)
class NavitGrid(NativeGrid):
    """The steps of Kimi K2.5's image processor before the normalisation of pixels."""

    max_side: int  # patches along a side, with the padding

    def target_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height to which an image of this size is reduced, before the padding.

        Source: `navit_resize` of transformers; an operator's limit of tokens reduces the image further.
        """
        num_patches = max(width // self.patch_size, 1) * max(height // self.patch_size, 1)
        longest = self.max_side * self.patch_size
        scale = min(1.0, math.sqrt(self.max_patches / num_patches), longest / height, longest / width)
        while True:
            size = min(max(int(width * scale), 1), longest), min(max(int(height * scale), 1), longest)
            columns, rows = self._squares(*size)
            if columns * rows <= self.most_tokens:
                return size
            scale *= SHRINK


def most_squares(max_patches: int, max_side: int, merge_size: int) -> int:
    """Return a bound of the squares of an image with so many whole patches, in the mean of its sides, and such sides.

    Partial patches, which are not counted, may make each side longer by a part of a whole patch before it is scaled.
    """
    side, most = max_side // merge_size, 1
    for columns in range(1, side + 1):
        width = max((columns - 1) * merge_size, 1)  # patches, at least
        height = min(max_patches / width * (1 + 1 / width), max_side)
        height = min(height * (1 + 1 / max(math.floor(height), 1)), max_side)
        most = max(most, columns * math.ceil(height / merge_size))
    return most
