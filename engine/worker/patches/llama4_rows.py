"""Llama 4 with rows at different positions: each layer's own mask, and each row's own temperature.

mlx_vlm 0.7.10 makes one mask of chunks, and one temperature of the layers without rope, for the longest of all rows,
and waits for the device to learn how long it is. It can be removed when the library takes the mask of a layer from its
cache and offsets [B].
"""

from typing import Any

import mlx.core as mx
from mlx_vlm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_vlm.models.llama4.language import Attention, LlamaModel

from engine.worker.layer_kinds import is_replaced
from engine.worker.patches.row_positions import positions_of

LIBRARY: dict[Any, Any] = {module: module.__call__ for module in (Attention, LlamaModel)}
"""The library's forwards, by class."""


def _forward(
    self: Any, input_ids: Any = None, input_embeds: Any = None, mask: Any = None, cache: Any = None
) -> mx.array:
    """Compute the layers; the library's own forward does so for its own caches, which have no mask of chunks."""
    if cache is None or is_replaced(cache[0]):
        return LIBRARY[LlamaModel](self, input_ids, input_embeds, mask, cache)
    hidden = self.embed_tokens(input_ids) if input_embeds is None else input_embeds
    masks: dict[bool, Any] = {}
    for layer, layer_cache in zip(self.layers, cache, strict=True):
        is_chunked = bool(layer.use_chunked_attention)
        if is_chunked not in masks:
            masks[is_chunked] = create_attention_mask(hidden, layer_cache)
        hidden = layer(hidden, masks[is_chunked], cache=layer_cache)
    return self.norm(hidden)


def _attend(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
    if self.use_rope or cache is None or not isinstance(cache.offset, mx.array):
        return LIBRARY[Attention](self, x, mask, cache)
    batch, length, _ = x.shape

    def heads(projected: mx.array, number: int) -> mx.array:
        return projected.reshape(batch, length, number, self.head_dim).transpose(0, 2, 1, 3)

    queries, keys = heads(self.q_proj(x), self.n_heads), heads(self.k_proj(x), self.n_kv_heads)
    if self.attn_temperature_tuning:
        steps = mx.floor((positions_of(cache.offset, length) + 1) / self.floor_scale)
        scales = mx.log(steps + 1.0) * self.attn_scale + 1.0
        queries = (queries * scales[:, None, :, None]).astype(queries.dtype)
    keys, values = cache.update_and_fetch(keys, heads(self.v_proj(x), self.n_kv_heads))
    output = scaled_dot_product_attention(queries, keys, values, cache, scale=self.scale, mask=mask)
    return self.o_proj(output.transpose(0, 2, 1, 3).reshape(batch, length, -1))


def install() -> None:
    """Replace the library's methods. May be called several times."""
    LlamaModel.__call__ = _forward
    Attention.__call__ = _attend
