"""Masks of several rows for Gemma 2, whose attention groups its heads in a fifth axis.

mlx_vlm 0.7.10 applies a mask [B, 1, L, slots] to scores [B, kv_heads, repeats, L, slots] as it is, so the rows' axis
meets that of the heads: an error, or wrong scores where both have the same size. It can be removed when the library
aligns the mask, as it does in models/base.py for quantized caches.
"""

from typing import Any

import mlx.core as mx
from mlx_vlm.models.gemma2.language import Attention

_library = Attention.__call__


def _attend(self: Any, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
    if mask is not None and mask.ndim == 4 and self.repeats > 1:
        mask = mask[:, None]
    return _library(self, x, mask, cache)


def install() -> None:
    """Replace the library's method. May be called several times."""
    Attention.__call__ = _attend
