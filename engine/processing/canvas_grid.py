"""CanvasGrid: tiles of the canvas that fits an image best, and a square of the whole, as Llama 4 takes them.

Image workers import this module, so it imports only NumPy and Pillow.
"""

import math
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from PIL import Image

from engine.processing.image_grid import ImageGrid, ImageLayout
from engine.processing.tile_grid import tiles_of


@dataclass(frozen=True)
class CanvasGrid(ImageGrid):
    """The steps of the image processor of transformers' Llama 4 before the normalisation of pixels.

    The image keeps its ratio in the upper left corner of a black canvas of whole tiles. Scales are float32 where that
    processor computes them with tensors: sizes are rounded down, and some differ by a pixel otherwise.
    """

    side: int  # pixels of a tile, and of the square
    max_tiles: int  # without the square

    @property
    def tile_tokens(self) -> int:
        return (self.side // self.patch_size) ** 2 // self.merge_size**2

    @property
    def max_tokens(self) -> int:
        return self.tile_tokens * (self.max_tiles + (self.max_tiles > 1))

    def limited(self, max_tokens: int) -> "CanvasGrid":
        num_tiles = max_tokens // self.tile_tokens
        return replace(self, max_tiles=min(self.max_tiles, num_tiles - 1 if num_tiles > 2 else 1))

    def layout(self, width: int, height: int) -> ImageLayout:
        rows, columns = self._canvas(width, height)
        num_tiles, num_patches = rows * columns, self.side // self.patch_size
        return ImageLayout((num_tiles + (num_tiles > 1), num_patches, num_patches), (rows, columns))

    def target_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height in the canvas or in the square, whichever is larger."""
        inner_width, inner_height = self._inner(width, height)
        least = self.side if self._canvas(width, height) != (1, 1) else 1
        return max(inner_width, least), max(inner_height, least)

    def _frames(self, image: Image.Image, width: int, height: int) -> list[Image.Image]:
        rows, columns = self._canvas(width, height)
        canvas = Image.new("RGB", (columns * self.side, rows * self.side))
        canvas.paste(image.resize(self._inner(width, height), resample=self.resample))
        frames = tiles_of(canvas, self.side)
        return frames if len(frames) == 1 else [*frames, image.resize((self.side, self.side), resample=self.resample)]

    def _canvas(self, width: int, height: int) -> tuple[int, int]:
        """Return the tiles along height and width of the canvas that enlarges an image least, or else reduces it least.

        Equally good ones are compared by their area; then the first one counts. Source: `get_best_fit`.
        """
        choices = canvases(self.max_tiles)
        sides = np.array(choices, np.float32) * np.float32(self.side)
        scales = (sides / np.array((height, width), np.float32)).min(axis=1)
        enlarging = scales[scales >= 1]
        best = enlarging.min() if len(enlarging) else scales.max()
        return min((choices[i] for i in np.flatnonzero(scales == best)), key=math.prod)

    def _inner(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height in the canvas; no side is enlarged beyond that of a tile.

        Source: `_preprocess` and `get_max_res_without_distortion`.
        """
        rows, columns = self._canvas(width, height)
        new_width, new_height = self._longest(width, columns), self._longest(height, rows)
        along_width, along_height = new_width / width, new_height / height
        if along_width < along_height:
            new_height = min(math.floor(height * along_width), new_height)
        else:
            new_width = min(math.floor(width * along_height), new_width)
        return max(int(new_width), 1), max(int(new_height), 1)

    def _longest(self, length: int, num_tiles: int) -> int | np.float32:
        """Return the most pixels along one side, as a float32 where it is the canvas's."""
        own, canvas = max(length, self.side), num_tiles * self.side
        return np.float32(canvas) if canvas < own else own


@cache
def canvases(max_tiles: int) -> tuple[tuple[int, int], ...]:
    """Return the tiles along height and width of all canvases, those of equal ratio behind each other.

    Source: `find_supported_resolutions` of transformers' Llama 4.
    """
    by_ratio: dict[float, list[tuple[int, int]]] = {}
    for num_tiles in range(max_tiles, 0, -1):
        for rows in (rows for rows in range(1, num_tiles + 1) if num_tiles % rows == 0):
            columns = num_tiles // rows
            by_ratio.setdefault(rows / columns, []).append((rows, columns))
    return tuple(canvas for equal in by_ratio.values() for canvas in equal)
