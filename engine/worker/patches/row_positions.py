"""Each row's own positions, in families whose library modules compute one position for all rows.

mlx_vlm 0.7.10 rotates all rows of Jina VLM by the last row's position and those of Hunyuan VL as if they were as long
as the whole cache, and fails for rows of GPT-BigCode and LongCat-Flash-Sparse at different positions. The functions
here can be removed one by one as the library takes offsets [B] in them.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_vlm.models.gpt_bigcode.language import GPTBigCodeModel
from mlx_vlm.models.hunyuan_vl import language as hunyuan_vl
from mlx_vlm.models.jina_vlm.language import RoPE as JinaRoPE
from mlx_vlm.models.longcat_flash_sparse.language import Indexer

LIBRARY: dict[Any, Any] = {
    module: module.__call__ for module in (GPTBigCodeModel, JinaRoPE, Indexer, hunyuan_vl.Attention)
}
"""The library's forwards, by class."""


def positions_of(offset: int | mx.array, length: int) -> mx.array:
    """Return the positions int32 [B or 1, length] of new tokens behind `offset`, an int or int32 [B]."""
    return mx.array(offset).reshape(-1, 1) + mx.arange(length)


def _rotated(x: mx.array, positions: mx.array, inverse_frequencies: mx.array) -> mx.array:
    """Rotate the halves of x [B, heads, L, head_dim] by positions [B or 1, L]."""
    angles = positions[:, None, :, None].astype(mx.float32) * inverse_frequencies
    angles = mx.concatenate([angles, angles], axis=-1)
    first, second = mx.split(x, 2, axis=-1)
    return (x * mx.cos(angles) + mx.concatenate([-second, first], axis=-1) * mx.sin(angles)).astype(x.dtype)


def _jina_rope(self: Any, x: mx.array, offset: int | mx.array = 0) -> mx.array:
    return _rotated(x, positions_of(offset, x.shape[2]), self._inv_freq)


def _gpt_bigcode(self: Any, inputs: mx.array, cache: Any = None, inputs_embeds: mx.array | None = None) -> mx.array:
    hidden = self.wte(inputs) if inputs_embeds is None else inputs_embeds
    layers: Any = [None] * len(self.h) if cache is None else cache
    offset = 0 if layers[0] is None else layers[0].offset
    mask = create_attention_mask(hidden, layers[0])
    hidden = hidden + self.wpe(positions_of(offset, hidden.shape[1]))
    for layer, layer_cache in zip(self.h, layers, strict=True):
        hidden = layer(hidden, mask, cache=layer_cache)
    return self.ln_f(hidden)


def _hunyuan_attention(
    self: Any, x: mx.array, mask: Any = None, cache: Any = None, position_ids: mx.array | None = None
) -> mx.array:
    """Attend among tokens of text, whose positions are the same on all axes of the rope."""
    batch, length, _ = x.shape

    def heads(projection: nn.Module, number: int) -> mx.array:
        return projection(x).reshape(batch, length, number, self.head_dim).transpose(0, 2, 1, 3)

    positions = positions_of(0 if cache is None else cache.offset, length)
    frequencies = self.rotary_emb._inv_freq
    queries = _rotated(heads(self.q_proj, self.n_heads).astype(mx.float32), positions, frequencies).astype(x.dtype)
    keys = _rotated(heads(self.k_proj, self.n_kv_heads).astype(mx.float32), positions, frequencies).astype(x.dtype)
    values = heads(self.v_proj, self.n_kv_heads)
    if self.config.use_qk_norm:
        queries, keys = self.query_layernorm(queries), self.key_layernorm(keys)
    if cache is not None:
        keys, values = cache.update_and_fetch(keys, values)
    output = scaled_dot_product_attention(queries, keys, values, cache=cache, scale=self.scale, mask=mask)
    return self.o_proj(output.transpose(0, 2, 1, 3).reshape(batch, length, -1))


def _longcat_indexer(self: Any, x: mx.array, qr: mx.array, mask: Any, cache: Any = None) -> mx.array | None:
    """Return the indices of the tokens that are attended to; None if these are all."""
    batch, length, _ = x.shape
    offset = 0 if cache is None else cache.offset
    queries = self.wq_b(qr).reshape(batch, length, self.n_heads, self.head_dim).swapaxes(1, 2)
    queries = self.rope(queries, offset=offset)
    keys = self.rope(self.k_norm(self.wk(x)).reshape(batch, 1, length, self.head_dim), offset=offset)
    if cache is not None:
        keys, _ = cache.update_and_fetch(keys, mx.zeros([batch, 1, length, 0]))
    if keys.shape[2] <= self.index_topk:
        return None
    weights = self.weights_proj(x) * (self.n_heads**-0.5 * self.softmax_scale)
    scores = mx.maximum(queries @ keys.swapaxes(-1, -2), 0) * weights.swapaxes(-1, -2)[..., None]
    scores = scores.sum(axis=1, keepdims=True)
    slots, own = mx.arange(keys.shape[2]), positions_of(offset, length)[:, None, :, None]
    is_local = (slots <= own) & (slots > own - self.index_local_tokens)
    scores = mx.where((slots < self.index_init_tokens) | is_local, float("inf"), scores)
    if mask is not None:
        scores = mx.where(mask, scores, -float("inf"))
    return mx.argpartition(scores, kth=-self.index_topk, axis=-1)[..., -self.index_topk :]


def install() -> None:
    """Replace the library's methods. May be called several times."""
    GPTBigCodeModel.__call__ = _gpt_bigcode
    JinaRoPE.__call__ = _jina_rope
    Indexer.__call__ = _longcat_indexer
    hunyuan_vl.Attention.__call__ = _hunyuan_attention
