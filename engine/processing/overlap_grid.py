"""OverlapGrid: a square of the whole image and overlapping crops of its enlarged copy, as Molmo2 takes them.

Image workers import this module, so it imports only NumPy and Pillow.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from PIL import Image

from engine.processing.image_grid import ImageGrid, ImageLayout

POOL = 2
"""Patches along each side of the square of one token."""


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
        return _pooled(self.crop_side) ** 2 + _pooled(height) * _pooled(width)

    def target_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height of the copy that is cut into crops."""
        new_height, new_width = self.layout(width, height).unpadded
        return new_width * self.patch_size, new_height * self.patch_size

    def _frames(self, image: Image.Image, width: int, height: int) -> list[Image.Image]:
        copy = image.resize(self.target_size(width, height), resample=self.resample)
        rows, columns = self._rows_and_columns(width, height)
        step = self.step * self.patch_size
        corners = [(column * step, row * step) for row in range(rows) for column in range(columns)]
        crops = [copy.crop((left, top, left + self.side, top + self.side)) for left, top in corners]
        return [image.resize((self.side, self.side), resample=self.resample), *crops]

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


def pooled_patches(crop_side: int, tiles: tuple[int, int], unpadded: tuple[int, int]) -> np.ndarray:
    """Return the patches of each token, int32 [num_tokens, POOL * POOL]; -1 behind the edge of the image.

    Patches are counted from the first of the square of the whole image, then crop by crop.

    Args:
        crop_side: Patches along each side of a crop.
        tiles: Crops along height and width.
        unpadded: Patches of all crops together, without those in which they overlap, likewise.
    """
    whole = np.arange(crop_side**2, dtype=np.int32).reshape(crop_side, crop_side)
    (row, y), (column, x) = (_places(*of_side, crop_side) for of_side in zip(unpadded, tiles, strict=True))
    crop = 1 + row[:, None] * tiles[1] + column
    return np.concatenate([_squares(whole), _squares(crop * crop_side**2 + y[:, None] * crop_side + x)])


def row_lengths(crop_side: int, unpadded: tuple[int, int]) -> tuple[int, ...]:
    """Return the tokens of each row, of the square of the whole image and then of the crops together.

    Args:
        crop_side: See `pooled_patches`.
        unpadded: See `pooled_patches`.
    """
    side, (height, width) = _pooled(crop_side), map(_pooled, unpadded)
    return (side,) * side + (width,) * height


def _places(length: int, num_crops: int, crop_side: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the crop of each patch along one side of the image, and the patch's place in it, int32 [length]."""
    at = np.arange(length, dtype=np.int32)
    overlap = (num_crops * crop_side - length) // (num_crops - 1) if num_crops > 1 else 0
    step = crop_side - overlap
    crop = np.clip((at - overlap // 2) // step, 0, num_crops - 1)
    return crop, at - crop * step


def _squares(patches: np.ndarray) -> np.ndarray:
    """Return the patches [height, width] of each square, [squares, POOL * POOL]."""
    height, width = (_pooled(length) for length in patches.shape)
    padding = [(0, POOL * height - patches.shape[0]), (0, POOL * width - patches.shape[1])]
    padded = np.pad(patches, padding, constant_values=-1)
    return padded.reshape(height, POOL, width, POOL).transpose(0, 2, 1, 3).reshape(-1, POOL * POOL)


def _pooled(length: int) -> int:
    return -(-length // POOL)
