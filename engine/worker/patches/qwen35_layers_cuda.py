"""The layers of Qwen3.5 in decode steps on CUDA, of few kernels.

mlx_vlm 0.7.10 computes a recurrent layer by some thirty operations, and a step of 32 layers takes the host longer than
the device. Here a recurrent layer takes five kernels and two norms: its input projections are one kernel, as is what
follows up to the output projection (delta_layer_cuda), the gated half of the MLP, and each of the two products that are
added to the hidden states. In an attention layer the projections are one kernel, and the rest is the library's. What a
kernel does not support is computed as in the library. It can be removed when the library computes a step of a layer by
as few kernels.
"""

from typing import Any

import mlx.core as mx
from mlx_vlm.models.qwen3_5.language import (
    Qwen3_5Attention,
    Qwen3_5DecoderLayer,
    Qwen3_5GatedDeltaNet,
    Qwen3_5MLP,
)

from engine.worker.patches import delta_layer_cuda, few_rows_cuda

_library_recurrent: Any = Qwen3_5GatedDeltaNet.__call__
_library_attention: Any = Qwen3_5Attention.__call__


class _Projected:
    """One forward of an attention layer whose queries, keys and values are already computed.

    Args:
        layer: The layer.
        x: Its input [B, L, hidden].
        to: What the layer's output is added to; None for nothing.
    """

    def __init__(self, layer: Any, x: mx.array, to: mx.array | None):
        self._layer, self._to = layer, to
        self._queries, self._keys, self._values = few_rows_cuda.products((layer.q_proj, layer.k_proj, layer.v_proj), x)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def q_proj(self, x: mx.array) -> mx.array:
        return self._queries

    def k_proj(self, x: mx.array) -> mx.array:
        return self._keys

    def v_proj(self, x: mx.array) -> mx.array:
        return self._values

    def o_proj(self, x: mx.array) -> mx.array:
        return self._layer.o_proj(x) if self._to is None else few_rows_cuda.added(self._to, self._layer.o_proj, x)


def recurrent(
    self: Any, inputs: mx.array, mask: mx.array | None = None, cache: Any = None, to: mx.array | None = None
) -> mx.array:
    """Stand for `Qwen3_5GatedDeltaNet.__call__`; the result is added to `to`, if there is one."""
    if not delta_layer_cuda.is_supported(self, inputs, mask, cache):
        y = _library_recurrent(self, inputs, mask, cache)
        return y if to is None else to + y
    projections = (self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)
    qkv, z, b, a = few_rows_cuda.products(projections, inputs)
    y = delta_layer_cuda.step(self, qkv, z, b, a, cache)
    y = y.reshape(*inputs.shape[:2], -1)
    return self.out_proj(y) if to is None else few_rows_cuda.added(to, self.out_proj, y)


def attention(self: Any, x: mx.array, *args: Any, to: mx.array | None = None, **kwargs: Any) -> mx.array:
    """Stand for `Qwen3_5Attention.__call__`; the result is added to `to`, if there is one."""
    return _library_attention(_Projected(self, x, to), x, *args, **kwargs)


def mlp(self: Any, x: mx.array, to: mx.array | None = None) -> mx.array:
    """Stand for `Qwen3_5MLP.__call__`; the result is added to `to`, if there is one."""
    y = few_rows_cuda.gated(self.gate_proj, self.up_proj, x)
    return self.down_proj(y) if to is None else few_rows_cuda.added(to, self.down_proj, y)


def decoder_layer(
    self: Any,
    x: mx.array,
    mask: Any = None,
    cache: Any = None,
    position_ids: mx.array | None = None,
    position_embeddings: tuple[mx.array, mx.array] | None = None,
) -> mx.array:
    """Stand for `Qwen3_5DecoderLayer.__call__`."""
    normed = self.input_layernorm(x)
    if self.is_linear:
        x = recurrent(self.linear_attn, normed, mask, cache, to=x)
    else:
        x = attention(self.self_attn, normed, mask, cache, position_ids, position_embeddings, to=x)
    return mlp(self.mlp, self.post_attention_layernorm(x), to=x)


def install() -> None:
    """Replace the library's forwards; CUDA devices of compute capability 8 and above. May be called several times."""
    if int(mx.device_info().get("compute_capability_major", 0)) < 8:
        return
    forwards: dict[Any, Any] = {
        Qwen3_5GatedDeltaNet: recurrent,
        Qwen3_5Attention: attention,
        Qwen3_5MLP: mlp,
        Qwen3_5DecoderLayer: decoder_layer,
    }
    for layer, forward in forwards.items():
        layer.__call__ = forward
