"""Positions and attention of Kimi K2.5's vision tower.

mlx_vlm 0.7.10 (models/kimi_k25/vision.py) leaves out what lies behind the border when it interpolates positions, see
moonvit_positions.py, and keeps the scores of all pairs of patches, 17 GB for the largest image. The patch can be
removed when the library does neither.
"""

from itertools import pairwise
from typing import Any

import mlx.core as mx
from mlx_vlm.models.kimi_k25 import vision

from engine.worker.patches.moonvit_positions import positions

library_positions: Any = vision.Learnable2DInterpPosEmb.__call__


def _with_positions(self: Any, x: mx.array, grid_hws: mx.array) -> mx.array:
    """Add the positions of images [n, 2]; those of videos [n, 3] are the library's."""
    if grid_hws.shape[1] != 2:
        return library_positions(self, x, grid_hws)
    shapes: Any = grid_hws.tolist()
    return x + mx.concatenate([positions(self, (rows, columns)) for rows, columns in shapes]).astype(x.dtype)


def _attend(self: Any, x: mx.array, cu_seqlens: Any, rotary_pos_emb: Any = None) -> mx.array:
    """Return the attention among the patches [n, dim] of each image, which begin at `cu_seqlens`."""
    queries, keys, values = self.wqkv(x).reshape(len(x), 3, self.num_heads, self.head_dim).swapaxes(0, 1)
    queries, keys = vision.apply_rope(queries, keys, rotary_pos_emb)
    bounds, outputs = [int(bound) for bound in cu_seqlens], []
    for begin, end in pairwise(bounds):
        heads = [one[begin:end].swapaxes(0, 1)[None] for one in (queries, keys, values)]
        seen = mx.fast.scaled_dot_product_attention(*heads, scale=self.scale)
        outputs.append(seen[0].swapaxes(0, 1).reshape(end - begin, -1))
    return self.wo(mx.concatenate(outputs))


def install() -> None:
    """Replace the library's methods. May be called several times."""
    vision.Learnable2DInterpPosEmb.__call__ = _with_positions
    vision.Attention.__call__ = _attend
