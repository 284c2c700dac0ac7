"""The layers of Qwen3.5 in decode steps on CUDA, of few kernels.

mlx_vlm 0.7.10 computes a recurrent layer by some thirty operations and an attention layer by some forty, and a step of
32 layers takes the host longer than the device. Here a recurrent layer takes five kernels: its norm and input
projections are one, as is what follows up to the output projection (delta_layer_cuda), the norm and the gated half of
the MLP, and each of the two products that are added to the hidden states. An attention layer takes eight, or nine
behind 512 tokens: beside projections and MLP the norms and rope of the heads (rotated_heads_cuda), two writes of keys
and values, and the gated attention (step_attention_cuda). What a kernel does not support is computed as in the library.
It can be removed when the library computes a step of a layer by as few kernels.
"""

from typing import Any

import mlx.core as mx
from mlx_vlm.models.base import scaled_dot_product_attention
from mlx_vlm.models.qwen3_5.language import (
    Qwen3_5Attention,
    Qwen3_5DecoderLayer,
    Qwen3_5GatedDeltaNet,
    Qwen3_5MLP,
)

from engine.worker.layer_kinds import in_group
from engine.worker.patches import delta_layer_cuda, few_rows_cuda, rotated_heads_cuda, step_attention_cuda

_library_recurrent: Any = Qwen3_5GatedDeltaNet.__call__
_library_attention: Any = Qwen3_5Attention.__call__


def recurrent(
    self: Any,
    inputs: mx.array,
    mask: mx.array | None = None,
    cache: Any = None,
    to: mx.array | None = None,
    norm: Any = None,
) -> mx.array:
    """Stand for `Qwen3_5GatedDeltaNet.__call__`, behind a norm if there is one; the result is added to `to`, if any."""
    if not delta_layer_cuda.is_supported(self, inputs, mask, cache):
        y = _library_recurrent(self, inputs if norm is None else norm(inputs), mask, cache)
        return y if to is None else to + y
    projections = (self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)
    qkv, z, b, a = few_rows_cuda.products(projections, inputs, norm)
    y = delta_layer_cuda.step(self, qkv, z, b, a, cache)
    y = y.reshape(*inputs.shape[:2], -1)
    return self.out_proj(y) if to is None else few_rows_cuda.added(to, self.out_proj, y)


def attention(
    self: Any,
    x: mx.array,
    mask: Any = None,
    cache: Any = None,
    position_ids: mx.array | None = None,
    position_embeddings: tuple[mx.array, mx.array] | None = None,
    to: mx.array | None = None,
    norm: Any = None,
) -> mx.array:
    """Stand for `Qwen3_5Attention.__call__`, behind a norm if there is one; the result is added to `to`, if any."""
    if position_embeddings is None and position_ids is not None:
        position_embeddings = self.rotary_emb(x, position_ids)
    if (
        position_embeddings is None
        or not rotated_heads_cuda.is_supported(self, x, position_embeddings[0])
        or not _sees_all(mask, cache)
    ):
        normed = x if norm is None else norm(x)
        y = _library_attention(self, normed, mask, cache, position_ids, position_embeddings)
        return y if to is None else to + y
    batch, length, _ = x.shape
    queries_and_gates, keys, values = few_rows_cuda.products((self.q_proj, self.k_proj, self.v_proj), x, norm)
    queries, keys = rotated_heads_cuda.rotated_heads(self, queries_and_gates, keys, *position_embeddings)
    values = values.reshape(keys.shape).transpose(0, 2, 1, 3)
    seen = cache.update_and_fetch(keys.transpose(0, 2, 1, 3), values)
    if step_attention_cuda.is_supported(self, x, cache):
        y = step_attention_cuda.attend(queries, queries_and_gates, cache, self.scale)
    else:
        y = scaled_dot_product_attention(queries.transpose(0, 2, 1, 3), *seen, cache=cache, scale=self.scale, mask=mask)
        gates = queries_and_gates.reshape(batch, length, self.num_attention_heads, -1)[..., self.head_dim :]
        y = y.transpose(0, 2, 1, 3).reshape(batch, length, -1) * mx.sigmoid(gates.reshape(batch, length, -1))
    return self.o_proj(y) if to is None else few_rows_cuda.added(to, self.o_proj, y)


def _sees_all(mask: Any, cache: Any) -> bool:
    """Return whether each token sees all earlier ones of its row, and the mask has the length of what is fetched."""
    return (in_group(cache) and cache.appends) or (cache is not None and not isinstance(mask, mx.array))


def mlp(self: Any, x: mx.array, to: mx.array | None = None, norm: Any = None) -> mx.array:
    """Stand for `Qwen3_5MLP.__call__`, behind a norm if there is one; the result is added to `to`, if there is one."""
    y = few_rows_cuda.gated(self.gate_proj, self.up_proj, x, norm)
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
    x = mixer(self, x, mask, cache, position_ids, position_embeddings)
    return mlp(self.mlp, x, to=x, norm=self.post_attention_layernorm)


def mixer(
    self: Any,
    x: mx.array,
    mask: Any,
    cache: Any,
    position_ids: mx.array | None,
    position_embeddings: tuple[mx.array, mx.array] | None,
) -> mx.array:
    """Return x + the recurrent layer or the attention of a decoder layer, behind its norm."""
    norm = self.input_layernorm
    if self.is_linear:
        return recurrent(self.linear_attn, x, mask, cache, to=x, norm=norm)
    return attention(self.self_attn, x, mask, cache, position_ids, position_embeddings, to=x, norm=norm)


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
