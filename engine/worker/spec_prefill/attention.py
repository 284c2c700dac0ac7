"""Reads what tokens attend to from the public modules of a model's layers, without patching them.

Supports decoder blocks of the common form (`input_layernorm`, `self_attn`, `post_attention_layernorm`, `mlp`) with
rotary positions, with or without query and key norms and output gates: Llama, Qwen2, Qwen3, Qwen3-VL, Qwen3.5.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import KVCache

from engine.errors import EngineFailed
from engine.worker.layer_kinds import is_recurrent, keeps_all

POOL = 13
"""Scores are averaged over this many neighbours, because a single token says little about its surroundings."""

KEYS_AT_ONCE = 4096
"""Keys of low precision are converted to float32 in pieces of this many tokens."""

BLOCK_PARTS = ("self_attn", "input_layernorm", "post_attention_layernorm", "mlp")
ATTENTION_PARTS = ("q_proj", "o_proj", "scale")


@dataclass(frozen=True, slots=True, eq=False)
class AttentionLayer:
    """A block with full attention."""

    index: int  # Index of the layer.
    block: Any  # The library's module.
    num_heads: int  # Query heads.
    normalize: Callable[[mx.array], mx.array]  # Normalizes queries [1, n, heads, head_dim].
    rotate: Callable[[mx.array, int], mx.array]
    """Rotates queries [1, heads, n, head_dim], given the position of the first."""

    def query(self, hidden: mx.array, position: int, head_dim: int) -> tuple[mx.array, mx.array | None]:
        """Return the queries of the tokens from `position` on, and the gates of their outputs if q_proj computes them.

        Args:
            hidden: [1, n, hidden], the block's input.
            position: Position of the first token.
            head_dim: Size of the keys.

        Returns:
            Queries [1, heads, n, head_dim], and gates [1, n, heads * head_dim] or None.

        Raises:
            EngineFailed: q_proj has an unsupported shape.
        """
        attention, num_tokens = self.block.self_attn, hidden.shape[1]
        heads = attention.q_proj(self.block.input_layernorm(hidden)).reshape(1, num_tokens, self.num_heads, -1)
        gate = None
        if heads.shape[-1] == 2 * head_dim:
            heads, gate = mx.split(heads, 2, axis=-1)
            gate = gate.reshape(1, num_tokens, -1)
        if heads.shape[-1] != head_dim:
            raise EngineFailed(f"q_proj returns {heads.shape[-1]} values per head, but keys have {head_dim}")
        return self.rotate(self.normalize(heads).transpose(0, 2, 1, 3), position), gate

    def output(self, hidden: mx.array, position: int, cache: KVCache) -> mx.array:
        """Return the block's output [1, 1, hidden] for the newest token, from its query and the cached keys."""
        attention, block = self.block.self_attn, self.block
        keys, values = _cached(cache)
        query, gate = self.query(hidden, position, keys.shape[-1])
        weights = self.weights(query, cache, cache.offset)[:, 0]
        grouped = weights.reshape(values.shape[1], -1, cache.offset)  # [kv heads, heads per kv head, n]
        attended = grouped @ values[0, :, : cache.offset].astype(mx.float32)
        attended = attended.reshape(1, 1, -1).astype(hidden.dtype)
        if gate is not None:
            attended = attended * mx.sigmoid(gate)
        hidden = hidden + attention.o_proj(attended)
        return hidden + block.mlp(block.post_attention_layernorm(hidden))

    def weights(self, query: mx.array, cache: KVCache, num_keys: int) -> mx.array:
        """Return the softmax over the first `num_keys` keys, float32 [heads, n, num_keys].

        `query` is [1, heads, n, head_dim].
        """
        keys, num_queries = _cached(cache)[0], query.shape[2]
        scaled = query[0].astype(mx.float32) * self.block.self_attn.scale
        grouped = scaled.reshape(keys.shape[1], -1, keys.shape[-1])
        ends = [min(start + KEYS_AT_ONCE, num_keys) for start in range(0, num_keys, KEYS_AT_ONCE)]
        scores = [
            grouped @ keys[0, :, start:end].astype(mx.float32).swapaxes(-1, -2)
            for start, end in zip([0, *ends], ends, strict=False)
        ]
        whole = scores[0] if len(scores) == 1 else mx.concatenate(scores, axis=-1)
        return mx.softmax(whole.reshape(self.num_heads, num_queries, num_keys), axis=-1)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionTrace:
    """One token's pass through an attention layer."""

    layer: AttentionLayer  # The layer.
    cache: KVCache  # The layer's cache.
    before: mx.array  # [1, 1, hidden], the block's input.
    behind: mx.array  # [1, 1, hidden], the block's output.


def attention_layers(blocks: Sequence[Any], cache: Sequence[Any]) -> list[AttentionLayer | None]:
    """Return how each layer's attention is read; None for a layer with a recurrent state.

    Raises:
        EngineFailed: A layer cannot be read; the message names it.
    """
    layers = [_attention_layer(i, block, one) for i, (block, one) in enumerate(zip(blocks, cache, strict=True))]
    if not any(layers):
        raise EngineFailed(f"none of the {len(layers)} layers has attention")
    return layers


def importance(
    layers: Sequence[tuple[AttentionLayer, KVCache]], before: Sequence[mx.array], position: int, num_keys: int
) -> mx.array:
    """Return the maximum over layers and heads of the smoothed attention to each key, lazy.

    Args:
        layers: The attention layers with their caches.
        before: Each layer's input [1, n, hidden] for the tokens from `position` on.
        position: Position of the first of these tokens.
        num_keys: Keys to consider, from the first.

    Returns:
        float32 [n, num_keys].
    """
    best = mx.zeros((before[0].shape[1], num_keys))
    for (layer, cache), hidden in zip(layers, before, strict=True):
        query, _ = layer.query(hidden, position, _cached(cache)[0].shape[-1])
        best = mx.maximum(best, pooled(layer.weights(query, cache, num_keys)).max(axis=0))
    return best


def pooled(weights: mx.array) -> mx.array:
    """Return means over POOL neighbours along the last axis; at the edges over the existing ones."""
    n, reach = weights.shape[-1], POOL // 2
    ones = mx.pad(weights, [(0, 0)] * (weights.ndim - 1) + [(reach, reach)])
    twos = ones[..., :-1] + ones[..., 1:]
    fours = twos[..., :-2] + twos[..., 2:]
    eights = fours[..., :-4] + fours[..., 4:]
    sums = eights[..., :n] + fours[..., 8 : 8 + n] + ones[..., 12:]
    place = mx.arange(n)
    return sums / (mx.minimum(place + reach, n - 1) - mx.maximum(place - reach, 0) + 1)


def _cached(cache: KVCache) -> tuple[mx.array, mx.array]:
    """Return keys and values [1, kv heads, slots, head_dim] of a non-empty cache."""
    keys: Any = cache.keys
    return keys, cache.values  # type: ignore[return-value]


def _attention_layer(index: int, block: Any, cache: Any) -> AttentionLayer | None:
    if is_recurrent(cache):
        return None
    name = f"layer {index} ({type(block).__name__})"
    if not keeps_all(cache):
        raise EngineFailed(f"{name} stores its keys in a {type(cache).__name__}, which does not keep all of them")
    for part in BLOCK_PARTS:
        if not hasattr(block, part):
            raise EngineFailed(f"{name} has no {part}")
    attention = block.self_attn
    for part in ATTENTION_PARTS:
        if not hasattr(attention, part):
            raise EngineFailed(f"the attention of {name} has no {part}")
    num_heads = getattr(attention, "n_heads", None) or getattr(attention, "num_attention_heads", None)
    if num_heads is None:
        raise EngineFailed(f"the attention of {name} has neither n_heads nor num_attention_heads")
    normalize = attention.q_norm if hasattr(attention, "q_norm") else lambda heads: heads
    return AttentionLayer(index, block, num_heads, normalize, _rotation(name, attention))


def _rotation(name: str, attention: Any) -> Callable[[mx.array, int], mx.array]:
    if hasattr(attention, "rope"):
        return lambda queries, position: attention.rope(queries, offset=position)
    if not hasattr(getattr(attention, "rotary_emb", None), "apply_rotary"):
        raise EngineFailed(f"the attention of {name} has neither rope nor rotary_emb.apply_rotary")

    def rotate(queries: mx.array, position: int) -> mx.array:
        positions = mx.arange(position, position + queries.shape[2], dtype=mx.int32)
        positions = mx.broadcast_to(positions, (3, 1, queries.shape[2]))
        return attention.rotary_emb.apply_rotary(queries, queries, positions, unsqueeze_dim=1)[0]

    return rotate
