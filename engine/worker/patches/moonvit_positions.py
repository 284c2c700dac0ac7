"""Position embeddings of Kimi-VL's tower for images of any shape, as its authors interpolate them.

PyTorch's cubic interpolation repeats the values of the border. mlx_vlm 0.7.10 leaves out what lies behind it, which
changes the outer two rows and columns of positions. It can be removed when the library repeats them.
"""

from typing import Any

import mlx.core as mx
from mlx_vlm.models.kimi_vl.vision import Learnable2DInterpPosEmb

from engine.worker.cubic_weights import cubic_weights

library_positions: Any = Learnable2DInterpPosEmb._get_pos_emb


def positions(self: Any, shape: tuple[int, int]) -> mx.array:
    """Return the position embeddings [height * width, dim] of an image with so many patches."""
    rows, columns, dim = self.weight.shape
    if tuple(shape) == (rows, columns):
        return self.weight.reshape(-1, dim)
    of_rows, of_columns = (mx.array(cubic_weights(own, new)) for own, new in zip((rows, columns), shape, strict=True))
    table = self.weight.astype(mx.float32)
    along_rows = (of_rows @ table.reshape(rows, -1)).reshape(-1, columns, dim)
    return (of_columns @ along_rows).reshape(-1, dim)


def install() -> None:
    """Replace the library's method. May be called several times."""
    embeddings: Any = Learnable2DInterpPosEmb
    embeddings._get_pos_emb = positions
