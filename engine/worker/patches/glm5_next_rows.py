"""GLM-5-Next's sparse attention for rows at different positions, without keys and values of every head.

mlx_vlm 0.7.10 takes one length of the cache for all rows that are not padded on the left. It keeps a bit per token that
tells padding and, while a prompt is computed, the projected keys and values of all heads, 64 times the latents. Here
queries are projected instead, and latents are gathered for a few queries at a time: a layer keeps its latents and the
pool of its index. The functions can be removed as the index takes offsets [B].
"""

from typing import Any

import mlx.core as mx
from mlx_vlm.models.base import scaled_dot_product_attention
from mlx_vlm.models.cache import CacheList, KVCache
from mlx_vlm.models.glm5_next import language
from mlx_vlm.models.glm5_next.language import Glm5NextAttention, Glm5NextIndexer, LanguageModel
from mlx_vlm.models.linear import linear

from engine.worker.layer_kinds import is_combined, is_replaced
from engine.worker.patches.deepseek_v4_pools import GATHERED_QUERIES, SCORED_PAIRS, slices
from engine.worker.patches.row_positions import positions_of

LIBRARY: dict[str, Any] = {
    "make_cache": LanguageModel.make_cache,
    "index": Glm5NextIndexer.__call__,
    "attend": Glm5NextAttention.__call__,
}
"""The library's methods."""


def _make_cache(self: Any) -> list[Any]:
    return kept_caches(LIBRARY["make_cache"](self))


def kept_caches(layers: list[Any]) -> list[Any]:
    """Return the library's caches but those for padding and for projected keys."""
    for i, layer in enumerate(layers):
        if is_combined(layer):
            pools = [cache for cache in layer.caches if is_replaced(cache)]
            layers[i] = CacheList(KVCache(), *pools)
    return layers


def _index(self: Any, x: mx.array, q_resid: mx.array, cache: Any, starts: int | mx.array) -> mx.array:
    """Return the tokens that each query sees, int32 [B, L, n]; -1 where there are fewer.

    x are new tokens [B, L, hidden], q_resid their low-rank queries [B, L, q_lora_rank], cache is the index's pool, and
    starts are each row's tokens before the new ones, an int or int32 [B].
    """
    batch, length, _ = x.shape
    keys, gates = self._project_keys(x)
    keys, gates, _ = cache.accumulate_windows(keys, gates.astype(keys.dtype), starts)
    pool_keys = cache.update_and_fetch(self._compress_pools(keys, gates))
    ends = mx.broadcast_to(positions_of(starts, length) + 1, (batch, length))
    num_pools, size = pool_keys.shape[1], self.index_kpool
    num_chosen, num_complete = min(self.index_topk // size, num_pools), (ends // size)[..., None]
    if num_chosen == num_pools:
        chosen = mx.broadcast_to(mx.arange(num_pools, dtype=mx.int32), (batch, length, num_pools))
    else:
        queries, weights = self._project_queries(x, q_resid)
        chosen = mx.concatenate(
            [
                _best(queries[:, at], pool_keys, weights[:, at], num_complete[:, at], num_chosen, self.softmax_scale)
                for at in slices(length, SCORED_PAIRS // num_pools)
            ],
            axis=1,
        )
    chosen = mx.sort(mx.where(chosen < num_complete, chosen, num_pools), axis=-1)[..., None]
    seen = mx.where(chosen < num_pools, chosen * size + mx.arange(size), -1).reshape(batch, length, -1)
    tail = num_complete * size + mx.arange(size - 1)
    return mx.concatenate([seen, mx.where(tail < ends[..., None], tail, -1)], axis=-1).astype(mx.int32)


def _best(
    queries: mx.array, keys: mx.array, weights: mx.array, num_complete: mx.array, num_chosen: int, scale: float
) -> mx.array:
    """Return the complete entries with the best scores, int32 [B, L, num_chosen], in any order."""
    scores = language._score_index_keys(queries, keys, weights, scale)
    scores = mx.where(mx.arange(keys.shape[1]) < num_complete, scores, mx.finfo(mx.float32).min)
    return mx.argpartition(-scores, kth=num_chosen - 1, axis=-1)[..., :num_chosen].astype(mx.int32)


def _attend(
    self: Any,
    x: mx.array,
    padding_mask: mx.array | None = None,
    cache: Any = None,
    prev_topk_indices: mx.array | None = None,
    last_only: bool = False,
) -> tuple[mx.array, mx.array]:
    """Return the output [B, L, hidden], and the tokens that each query has seen, as the library's method."""
    if cache is None:
        return LIBRARY["attend"](self, x, padding_mask, cache, prev_topk_indices, last_only)
    batch, length, _ = x.shape
    projected: Any = linear(self.qkv_a_proj, x)
    low_rank, latent = mx.split(projected, [self.q_lora_rank], axis=-1)
    low_rank, latent = self.q_a_layernorm(low_rank), self.kv_a_layernorm(latent)[:, None]
    queries: Any = linear(self.q_b_proj, low_rank)
    queries = queries.reshape(batch, length, self.num_heads, self.q_head_dim).transpose(0, 2, 1, 3)
    queries = self.embed_q(queries)
    starts = cache[0].offset
    latents, _ = cache[0].update_and_fetch(latent, mx.zeros((*latent.shape[:3], 0), latent.dtype))
    seen = prev_topk_indices if self.indexer is None else _index(self.indexer, x, low_rank, cache[1], starts)
    if seen is None:
        raise ValueError("a layer that shares its index has no layer with an index before it")
    outputs = [
        _gathered(queries[:, :, at], latents[:, 0], seen[:, at], self.scale, cache[0])
        for at in slices(length, GATHERED_QUERIES)
    ]
    output = self.unembed_out(mx.concatenate(outputs, axis=2)).transpose(0, 2, 1, 3)
    output: Any = linear(self.o_proj, output.reshape(batch, length, -1))
    return output, seen


def _gathered(queries: mx.array, latents: mx.array, seen: mx.array, scale: float, cache: Any) -> mx.array:
    """Return attention [B, heads, L, dim] of queries [B, heads, L, dim] over the latents [B, slots, dim] they see."""
    batch, heads, length, dim = queries.shape
    index = mx.maximum(seen, 0).reshape(batch, -1, 1)
    chosen = mx.take_along_axis(latents, mx.broadcast_to(index, (*index.shape[:2], dim)), axis=1)
    chosen = chosen.reshape(batch * length, 1, -1, dim)
    output = scaled_dot_product_attention(
        queries.transpose(0, 2, 1, 3).reshape(batch * length, heads, 1, dim),
        chosen,
        chosen,
        cache=cache,
        scale=scale,
        mask=(seen >= 0).reshape(batch * length, 1, 1, -1),
    )
    return output.reshape(batch, length, heads, dim).transpose(0, 2, 1, 3)


def install() -> None:
    """Replace the library's methods. May be called several times."""
    LanguageModel.make_cache = _make_cache
    Glm5NextAttention.__call__ = _attend
