"""The squares of patches that become one token each in Molmo2, also where its overlapping crops are put together.

Image workers import this module, so it imports only NumPy.
"""

import numpy as np

POOL = 2
"""Patches along each side of the square of one token."""


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
    side, (height, width) = pooled(crop_side), map(pooled, unpadded)
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
    height, width = (pooled(length) for length in patches.shape)
    padding = [(0, POOL * height - patches.shape[0]), (0, POOL * width - patches.shape[1])]
    padded = np.pad(patches, padding, constant_values=-1)
    return padded.reshape(height, POOL, width, POOL).transpose(0, 2, 1, 3).reshape(-1, POOL * POOL)


def pooled(length: int) -> int:
    """Return the tokens along one side of an image of so many patches."""
    return -(-length // POOL)
