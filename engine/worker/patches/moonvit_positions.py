"""Position embeddings of Kimi-VL's tower for images of any shape, as its authors interpolate them.

PyTorch's cubic interpolation repeats the values of the border. mlx_vlm 0.7.10 leaves out what lies behind it, which
changes the outer two rows and columns of positions. It can be removed when the library repeats them.
"""

from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.models.kimi_vl.vision import Learnable2DInterpPosEmb

SHARPNESS = -0.75
"""The parameter of PyTorch's cubic kernel."""

library_positions: Any = Learnable2DInterpPosEmb._get_pos_emb


def positions(self: Any, shape: tuple[int, int]) -> mx.array:
    """Return the position embeddings [height * width, dim] of an image with so many patches."""
    rows, columns, dim = self.weight.shape
    if tuple(shape) == (rows, columns):
        return self.weight.reshape(-1, dim)
    of_rows, of_columns = (mx.array(_weights(own, new)) for own, new in zip((rows, columns), shape, strict=True))
    table = self.weight.astype(mx.float32)
    along_rows = (of_rows @ table.reshape(rows, -1)).reshape(-1, columns, dim)
    return (of_columns @ along_rows).reshape(-1, dim)


def _weights(num_own: int, num_new: int) -> np.ndarray:
    """Return the share of each of `num_own` values in each of `num_new` interpolated ones, float32 [new, own]."""
    places = (np.arange(num_new) + 0.5) * num_own / num_new - 0.5
    taps = np.floor(places).astype(int)[:, None] + np.arange(-1, 3)
    distance = np.abs(places[:, None] - taps)
    near = ((SHARPNESS + 2) * distance - (SHARPNESS + 3)) * distance**2 + 1
    far = ((distance - 5) * distance + 8) * distance * SHARPNESS - 4 * SHARPNESS
    weights = np.zeros((num_new, num_own), np.float32)
    np.add.at(weights, (np.arange(num_new)[:, None], taps.clip(0, num_own - 1)), np.where(distance <= 1, near, far))
    return weights


def install() -> None:
    """Replace the library's method. May be called several times."""
    embeddings: Any = Learnable2DInterpPosEmb
    embeddings._get_pos_emb = positions
