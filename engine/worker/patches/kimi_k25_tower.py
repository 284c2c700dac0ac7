"""Kimi K2.5's vision tower as transformers computes it.

mlx_vlm 0.7.10 (models/kimi_k25/vision.py) has the exact GELU, where the tower has its tanh approximation, norms with an
epsilon of 1e-6 instead of 1e-5, and leaves out what lies behind the border when it interpolates positions, see
moonvit_positions.py. Its attention keeps the scores of all pairs of patches, 17 GB for the largest image. The patch can
be removed when the library does none of these.
"""

from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.models.kimi_k25 import vision

from engine.worker.patches.moonvit_positions import positions

EPSILON = 1e-5

LIBRARY: dict[Any, Any] = {
    vision.MLP: vision.MLP.__init__,
    vision.Qwen2VLVisionBlock: vision.Qwen2VLVisionBlock.__init__,
    vision.VisionModel: vision.VisionModel.__init__,
    vision.Learnable2DInterpPosEmb: vision.Learnable2DInterpPosEmb.__call__,
    vision.Attention: vision.Attention.__call__,
}
"""The library's methods that are replaced, by class."""


def _mlp_init(self: Any, dim: int, hidden_dim: int) -> None:
    LIBRARY[vision.MLP](self, dim, hidden_dim)
    self.activation_fn = nn.gelu_approx


def _block_init(self: Any, config: Any) -> None:
    LIBRARY[vision.Qwen2VLVisionBlock](self, config)
    self.norm0.eps = self.norm1.eps = EPSILON


def _tower_init(self: Any, config: Any) -> None:
    LIBRARY[vision.VisionModel](self, config)
    self.final_layernorm.eps = EPSILON


def _with_positions(self: Any, x: mx.array, grid_hws: mx.array) -> mx.array:
    """Add the positions of images [n, 2]; those of videos [n, 3] are the library's."""
    if grid_hws.shape[1] != 2:
        return LIBRARY[vision.Learnable2DInterpPosEmb](self, x, grid_hws)
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
    vision.MLP.__init__ = _mlp_init
    vision.Qwen2VLVisionBlock.__init__ = _block_init
    vision.VisionModel.__init__ = _tower_init
    vision.Learnable2DInterpPosEmb.__call__ = _with_positions
    vision.Attention.__call__ = _attend
