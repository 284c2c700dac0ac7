"""AnyresGrid: a square of the whole image and tiles of its padded copy, as LLaVA-NeXT and LLaVA-OneVision take them.

Image workers import this module, so it imports only NumPy and Pillow.
"""

import math
from dataclasses import dataclass, replace

from PIL import Image

from engine.processing.image_grid import ImageGrid, ImageLayout
from engine.processing.tile_grid import tiles_of

REDUCED_FROM = 1.1
"""How many times as long as the limit the sides of the tiles' features may be before they are reduced to it."""


@dataclass(frozen=True)
class AnyresGrid(ImageGrid):
    """The steps of LLaVA-NeXT's and LLaVA-OneVision's image processors before the normalisation of pixels.

    Features of the padding are dropped. LLaVA-OneVision reduces the rest of the tiles' features if they are too many.
    """

    side: int  # pixels of a tile
    resolutions: tuple[tuple[int, int], ...]  # heights and widths of padded images, in pixels; multiples of `side`
    max_features: int | None  # squares of features, as many as a tile has each, to which those of the tiles are reduced

    def __post_init__(self) -> None:
        object.__setattr__(self, "resolutions", tuple((height, width) for height, width in self.resolutions))

    @property
    def tile_side(self) -> int:
        """Features along each side of a tile."""
        return self.side // self.patch_size

    @property
    def max_tokens(self) -> int:
        return max(map(self._most_tokens, self.resolutions))

    @property
    def token_bytes(self) -> int:
        """Most bytes of patches per token: an image may have far more patches than tokens."""
        most = max(1 + height * width // self.side**2 for height, width in self.resolutions)
        return -(-3 * most * (self.tile_side * self.patch_size) ** 2 // self.max_tokens)

    def limited(self, max_tokens: int) -> "AnyresGrid":
        most = max(max_tokens, min(map(self._most_tokens, self.resolutions)))
        return replace(self, resolutions=tuple(one for one in self.resolutions if self._most_tokens(one) <= most))

    def layout(self, width: int, height: int) -> ImageLayout:
        rows, columns = (length // self.side for length in self._resolution(width, height))
        unpadded = self._unpadded(width, height, rows * self.tile_side, columns * self.tile_side)
        return ImageLayout((1 + rows * columns, self.tile_side, self.tile_side), (rows, columns), unpadded)

    def num_tokens(self, layout: ImageLayout) -> int:
        rows, columns = reduced(layout.unpadded, self.tile_side, self.max_features)
        return self.tile_side**2 + rows * (columns + 1)

    def target_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height in the padding, each at least those of the square of the whole."""
        inner_width, inner_height = self._inner_size(width, height)
        return max(inner_width, self.side), max(inner_height, self.side)

    def _inner_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height in the padding. Source: `get_patch_output_size` of transformers."""
        full_height, full_width = self._resolution(width, height)
        across, down = full_width / width, full_height / height
        if across < down:
            return full_width, min(math.ceil(height * across), full_height)
        return min(math.ceil(width * down), full_width), full_height

    def _frames(self, image: Image.Image, width: int, height: int) -> list[Image.Image]:
        full_height, full_width = self._resolution(width, height)
        new_width, new_height = self._inner_size(width, height)
        padded = Image.new("RGB", (full_width, full_height))
        resized = image.resize((new_width, new_height), resample=self.resample)
        padded.paste(resized, ((full_width - new_width) // 2, (full_height - new_height) // 2))
        return [image.resize((self.side, self.side), resample=self.resample), *tiles_of(padded, self.side)]

    def _most_tokens(self, resolution: tuple[int, int]) -> int:
        """Return an upper bound of the tokens of an image that is padded to this height and width."""
        rows, columns = (length // self.side * self.tile_side for length in resolution)
        most = rows * columns
        if self.max_features is not None:
            most = min(most, int(REDUCED_FROM**2 * self.max_features * self.tile_side**2) + 1)
        return self.tile_side**2 + most + rows

    def _resolution(self, width: int, height: int) -> tuple[int, int]:
        """Return the height and width that keep most of the image's pixels, and then waste the fewest.

        Source: `select_best_resolution` of transformers.
        """
        best, most, least_waste = self.resolutions[0], 0, math.inf
        for full_height, full_width in self.resolutions:
            scale = min(full_width / width, full_height / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            waste = full_width * full_height - kept
            if kept > most or (kept == most and waste < least_waste):
                best, most, least_waste = (full_height, full_width), kept, waste
        return best

    @staticmethod
    def _unpadded(width: int, height: int, rows: int, columns: int) -> tuple[int, int]:
        """Return the rows and columns of features without padding.

        Source: `_get_unpadded_features` of transformers' LLaVA-NeXT processor.
        """
        if width / height > columns / rows:
            return rows - (rows - int(round(height * (columns / width), 7))) // 2 * 2, columns
        return rows, columns - (columns - int(round(width * (rows / height), 7))) // 2 * 2


def reduced(unpadded: tuple[int, int], tile_side: int, max_features: int | None) -> tuple[int, int]:
    """Return the rows and columns to which the features of the tiles are reduced, or those that they have.

    Args:
        unpadded: Rows and columns of features without padding.
        tile_side: Features along each side of a tile.
        max_features: See AnyresGrid.
    """
    if max_features is None:
        return unpadded
    ratio = math.sqrt(unpadded[0] * unpadded[1] / (max_features * tile_side**2))
    return (int(unpadded[0] // ratio), int(unpadded[1] // ratio)) if ratio > REDUCED_FROM else unpadded
