"""Positions of rows in AFM 7's last layers, which read the keys and values of the last layer before them.

mlx_vlm 0.7.10 takes them from the cache's `state`, and the position of a row from the number of their slots, which rows
of different lengths share. It can be removed when these layers take the offset and what the cache has returned.
"""

from typing import Any

import mlx.core as mx
from mlx_vlm.models.afm7.language import AFMModel
from mlx_vlm.models.base import create_attention_mask, scaled_dot_product_attention

LIBRARY: Any = AFMModel.__call__


class _Fetched:
    """A cache that remembers the keys and values that it has returned, dequantized if it packs them."""

    def __init__(self, cache: Any):
        self._cache = cache
        self.keys_and_values: tuple[mx.array, mx.array] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        keys, values = self._cache.update_and_fetch(keys, values)
        self.keys_and_values = keys, values
        return keys, values


def _model(self: Any, inputs: mx.array | None, inputs_embeds: mx.array | None = None, cache: Any = None) -> mx.array:
    if cache is None:
        return LIBRARY(self, inputs, inputs_embeds)
    hidden = self.embedding(inputs) if inputs_embeds is None else inputs_embeds
    mask, offset, last = create_attention_mask(hidden, cache[0]), cache[0].offset, _Fetched(cache[-1])
    for layer, layer_cache in zip(self.layers, [*cache[:-1], last], strict=True):
        hidden = layer(hidden, mask, cache=layer_cache)
    assert last.keys_and_values is not None
    for layer in self.kv_reuse_layers:
        hidden = hidden + _attend(layer.self_attn, layer.input_layernorm(hidden), *last.keys_and_values, mask, offset)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return self.output_norm(hidden)


def _attend(
    attention: Any, x: mx.array, keys: mx.array, values: mx.array, mask: Any, offset: int | mx.array
) -> mx.array:
    batch, length, _ = x.shape
    queries = attention.q_proj(x).reshape(batch, length, attention.n_heads, -1).transpose(0, 2, 1, 3)
    queries = attention.q_norm(attention.rope(queries, offset=offset))
    output = scaled_dot_product_attention(queries, keys, values, cache=None, scale=attention.scale, mask=mask)
    return attention.out_proj(output.transpose(0, 2, 1, 3).reshape(batch, length, -1))


def install() -> None:
    """Replace the library's method. May be called several times."""
    AFMModel.__call__ = _model
