"""Qwen3-Next's recurrent layers, computed by those of Qwen3.5.

mlx_vlm 0.7.10 computes both with the same mathematics, but Qwen3-Next overwrites its states, so that rejected drafts
could not be taken back, while Qwen3.5 updates them through the cache's methods. The layers differ in their projections,
which Qwen3-Next has interleaved, and in the epsilon of a norm; both are as in the library here. It can be removed when
the library's Qwen3-Next calls `update_window` and `update_recurrent`.
"""

from typing import Any

import mlx.core as mx
from mlx_vlm.models.qwen3_5.language import Qwen3_5GatedDeltaNet
from mlx_vlm.models.qwen3_next.language import Qwen3NextGatedDeltaNet

QK_EPS = 1e-6

library_call: Any = Qwen3NextGatedDeltaNet.__call__


class _AsQwen35:
    """One forward of a Qwen3-Next layer, with the attributes of a Qwen3.5 layer."""

    def __init__(self, layer: Any, inputs: mx.array):
        self._layer = layer
        qkvz, ba = layer.in_proj_qkvz(inputs), layer.in_proj_ba(inputs)
        *qkv, self._z, self._b, self._a = layer.fix_query_key_value_ordering(qkvz, ba)
        self._qkv = mx.concatenate([part.reshape(*inputs.shape[:2], -1) for part in qkv], axis=-1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def in_proj_qkv(self, inputs: mx.array) -> mx.array:
        return self._qkv

    def in_proj_z(self, inputs: mx.array) -> mx.array:
        return self._z

    def _project_gates(self, inputs: mx.array) -> tuple[mx.array, mx.array]:
        return self._b, self._a

    def _normalize_qk(self, q: mx.array, k: mx.array) -> tuple[mx.array, mx.array]:
        scale = k.shape[-1] ** -0.5
        return scale**2 * mx.fast.rms_norm(q, None, QK_EPS), scale * mx.fast.rms_norm(k, None, QK_EPS)

    def _causal_conv1d_decode(self, conv_input: mx.array) -> mx.array:
        return Qwen3_5GatedDeltaNet._causal_conv1d_decode(self._layer, conv_input)


def _call(self: Any, inputs: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
    as_qwen35: Any = _AsQwen35(self, inputs)
    return Qwen3_5GatedDeltaNet.__call__(as_qwen35, inputs, mask, cache)


def install() -> None:
    """Replace the library's forward. May be called several times."""
    layer: Any = Qwen3NextGatedDeltaNet
    layer.__call__ = _call
