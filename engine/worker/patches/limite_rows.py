"""Rows of different lengths in Limite, whose layers take masks and the own values of new tokens from one length.

mlx_vlm 0.7.10 makes each layer's mask from an offset that must be a number, and takes the values of the new tokens,
whose direction some heads remove from their output, from the last slots. It can be removed when the library takes
offsets [B].
"""

from typing import Any

import mlx.core as mx
from mlx_vlm.models.base import scaled_dot_product_attention
from mlx_vlm.models.limite.language import Attention, LimiteModel, fold, rms_norm

from engine.worker.patches.row_positions import positions_of

LIBRARY: dict[Any, Any] = {Attention: Attention.__call__, LimiteModel: LimiteModel.__call__}
"""The library's forwards, by class."""


def _model(self: Any, inputs: mx.array, cache: Any = None, positions: mx.array | None = None) -> mx.array:
    if positions is None and cache is not None:
        positions = mx.broadcast_to(positions_of(cache[0].offset, inputs.shape[1]), inputs.shape)
    return LIBRARY[LimiteModel](self, inputs, cache, positions)


def _attend(self: Any, attn_in: mx.array, ve_rows: mx.array, positions: mx.array, cache: Any = None) -> mx.array:
    """Attend; positions: [B, L], those of the slots of each row."""
    batch, length, _ = attn_in.shape

    def heads(projection: Any, number: int) -> mx.array:
        return (attn_in @ fold(self.qkv_scale, projection.weight).T).reshape(batch, length, number, self.head_dim)

    queries, keys, own = heads(self.q_proj, self.n_heads), heads(self.k_proj, self.n_kv), heads(self.v_proj, self.n_kv)
    if self.uses_ve:
        own = self._value_embeddings(attn_in, own, ve_rows)
    queries, keys = rms_norm(queries), rms_norm(keys)
    if self.uses_rope:
        rotated = self.rotary(queries.flatten(0, 1), keys.flatten(0, 1), positions.reshape(-1))
        queries, keys = rotated[0].reshape(queries.shape), rotated[1].reshape(keys.shape)
    queries, keys, values = (one.transpose(0, 2, 1, 3) for one in (queries, keys, own))
    if cache is not None:
        keys, values = cache.update_and_fetch(keys, values)
    slots, at = mx.arange(keys.shape[2]), positions[:, None, :, None]
    mask = slots <= at if self.window is None else (slots <= at) & (slots >= at - self.window)
    output = scaled_dot_product_attention(queries, keys, values, cache=cache, scale=self.scale, mask=mask)
    output = output.transpose(0, 2, 1, 3)
    if self.uses_xsa:
        output = _without_own(self, output, own)
    if self.attn_gate_channels:
        gate = mx.sigmoid(attn_in[..., : self.attn_gate_channels] @ self.attn_gate.astype(attn_in.dtype).T)
        output = output * (self.attn_gate_scale * gate)[..., None].astype(output.dtype)
    return output.reshape(batch, length, -1) @ fold(self.o_scale, self.o_proj.weight).T


def _without_own(self: Any, output: mx.array, own: mx.array) -> mx.array:
    """Remove a learned part of the direction of each token's own value from its output [B, L, heads, head_dim]."""
    direction = self._expand_kv(own).astype(mx.float32)
    direction = direction / mx.maximum(mx.linalg.norm(direction, axis=-1, keepdims=True), self.xsa_eps)
    part = (output.astype(mx.float32) * direction).sum(-1, keepdims=True)
    part = mx.tanh(self.xsa_alpha.astype(mx.float32))[:, None] * part
    return output - (part * direction).astype(output.dtype)


def install() -> None:
    """Replace the library's methods. May be called several times."""
    LimiteModel.__call__ = _model
    Attention.__call__ = _attend
