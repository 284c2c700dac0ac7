"""The vision towers of DeepSeek-OCR, as its authors compute them.

mlx_vlm 0.7.10 differs from their `deepencoder/clip_sdpa.py` and `sam_vary_sdpa.py` in four places. CLIP has QuickGELU
and an epsilon of 1e-5, where the library takes the exact GELU and 1e-6. CLIP's positions are reduced to those of a tile
along rows and columns, with antialiasing; the library reduces them along channels and rows, which leaves as many
numbers in another order. SAM's relative positions are interpolated between the centres of places, not between their
beginnings. It can be removed when the library does the same.
"""

import math
from typing import Any

import mlx.core as mx
from mlx_vlm.models.deepseekocr import sam
from mlx_vlm.models.deepseekocr.vision import MLP, EncoderLayer, VisionEmbeddings
from mlx_vlm.models.kernels import bicubic_interpolate

EPSILON = 1e-5

library_init: Any = EncoderLayer.__init__
library_mlp: Any = MLP.__call__
library_abs_pos: Any = VisionEmbeddings._get_abs_pos
library_rel_pos: Any = sam.get_rel_pos


def _init(self: Any, config: Any) -> None:
    library_init(self, config)
    self.layer_norm1.eps = self.layer_norm2.eps = EPSILON


def _mlp(self: Any, x: mx.array) -> mx.array:
    hidden = self.fc1(x)
    return self.fc2(hidden * mx.sigmoid(1.702 * hidden))


def _abs_pos(self: Any, abs_pos: mx.array, tgt_size: int) -> mx.array:
    """Return the positions [1, 1 + side * side, width] of a view. tgt_size: of all of them, with the class token."""
    side, num_places = math.isqrt(tgt_size), abs_pos.shape[1] - 1
    own_side, width = math.isqrt(num_places), abs_pos.shape[2]
    if side == own_side:
        return abs_pos
    places = abs_pos[:, 1:].astype(mx.float32).reshape(1, own_side, own_side, width).transpose(0, 3, 1, 2)
    resized = bicubic_interpolate(places, size=(side, side), antialias=True).astype(abs_pos.dtype)
    return mx.concatenate([abs_pos[:, :1], resized.transpose(0, 2, 3, 1).reshape(1, side * side, width)], axis=1)


def _rel_pos(q_size: int, k_size: int, rel_pos: mx.array) -> mx.array:
    """Return the embeddings [q_size, k_size, width] of the relative positions along one axis of a view."""
    num_distances, num_known = 2 * max(q_size, k_size) - 1, rel_pos.shape[0]
    if num_known != num_distances:
        places = (mx.arange(num_distances, dtype=mx.float32) + 0.5) * (num_known / num_distances) - 0.5
        places = mx.clip(places, 0, num_known - 1)
        below = mx.floor(places).astype(mx.int32)
        above, known = mx.minimum(below + 1, num_known - 1), rel_pos.astype(mx.float32)
        weight = (places - below)[:, None]
        rel_pos = (known[below] * (1 - weight) + known[above] * weight).astype(rel_pos.dtype)
    return library_rel_pos(q_size, k_size, rel_pos)


def install() -> None:
    """Replace the library's methods. May be called several times."""
    EncoderLayer.__init__ = _init
    MLP.__call__ = _mlp
    VisionEmbeddings._get_abs_pos = _abs_pos
    sam.get_rel_pos = _rel_pos
