"""DeepSeek V4's pools of a prompt in pieces, its choice among many entries, several tokens of a group, and its memory.

mlx_vlm 0.7.10 makes an entry of overlapping windows as if each piece of a prompt, and each decoded token, began the
context: nothing of the window before is left. Here it is kept, as transformers does. From 1024 entries on the library
chooses entries only from the blocks of 64 whose means score best, other ones for one token than for several; here all
entries are scored. Up to 8 tokens are attended to one after the other, each written where the first belongs; here they
are attended to at once. The scores of all queries of a chunk exist at once, and 512 entries of each query: 0.6 MB per
token and layer, which begin behind a prompt of 2048 tokens. Here a few queries are computed at a time. The functions
can be removed as the tests beside this file say.
"""

from typing import Any

import mlx.core as mx
from mlx_vlm.models.base import scaled_dot_product_attention
from mlx_vlm.models.deepseek_v4 import language
from mlx_vlm.models.deepseek_v4.language import Compressor, Indexer, LocalAttention

LIBRARY: dict[str, Any] = {
    "compress": Compressor.__call__,
    "index": Indexer.__call__,
    "attend": LocalAttention.__call__,
    "attention": scaled_dot_product_attention,
    "sparse_attention": language._sparse_pooled_attention,
}
"""The library's methods and functions."""

SCORED_PAIRS = 2**17
"""Queries times keys whose scores exist at once, 32 MB with 64 heads."""
GATHERED_QUERIES = 16
"""Queries whose entries are gathered at once."""


def _compress(self: Any, x: mx.array, pool_cache: Any, offset: int | mx.array) -> mx.array:
    """Add new tokens [B, L, hidden] to a pool; return its entries [B, n, head_dim]."""
    if pool_cache is None:
        return LIBRARY["compress"](self, x, None, offset)
    ratio = self.compress_ratio
    kv, gate, position = pool_cache.accumulate_windows(self.wkv(x), self.wgate(x), offset)
    if kv.shape[1] == 0:
        return pool_cache.update_and_fetch(mx.zeros((len(kv), 0, self.head_dim), x.dtype))
    if self.overlap:
        before = getattr(pool_cache, "before", None)
        before = before or (mx.zeros_like(kv[:, :ratio]), mx.full((len(kv), ratio, kv.shape[2]), -mx.inf, gate.dtype))
        pool_cache.before = kv[:, -ratio:], gate[:, -ratio:]  # read again only with the library's cache
        kv, gate = (mx.concatenate([one, new], axis=1) for one, new in zip(before, (kv, gate), strict=True))
    kv, gate = (mx.unflatten(one, 1, (-1, ratio)) for one in (kv, gate))
    gate = gate.astype(mx.float32) + self.ape
    if self.overlap:
        kv, gate = (
            mx.concatenate([one[:, :-1, :, : self.head_dim], one[:, 1:, :, self.head_dim :]], axis=2)
            for one in (kv, gate)
        )
    entries = (kv * mx.softmax(gate, axis=-2).astype(kv.dtype)).sum(axis=-2)
    return pool_cache.update_and_fetch(self.rope(self.norm(entries)[:, None], offset=position).squeeze(1))


def _index(
    self: Any, x: mx.array, q_residual: mx.array, position_rope: Any, pool_cache: Any, offset: int | mx.array
) -> mx.array | None:
    """Return the entries with the best scores for each new token, int32 [B, L, k]; None while there are none."""
    if pool_cache is None:
        return LIBRARY["index"](self, x, q_residual, position_rope, pool_cache, offset)
    batch, length, _ = x.shape
    entries = self.compressor(x, pool_cache, offset)
    if (num_entries := entries.shape[1]) == 0:
        return None
    queries = self.wq_b(q_residual).reshape(batch, length, self.n_heads, self.head_dim).transpose(0, 2, 1, 3)
    queries = position_rope(queries, offset).astype(mx.float32)
    weights = (self.weights_proj(x).astype(mx.float32) * self.n_heads**-0.5).swapaxes(-1, -2)[..., None]
    keys, seen = entries[:, None].swapaxes(-1, -2).astype(mx.float32), pool_cache.make_mask(length, offset)
    num_best, best = min(self.index_topk, num_entries), []
    for at in slices(length, SCORED_PAIRS // num_entries):
        scores = mx.maximum(queries[:, :, at] @ keys, 0) * self.scale
        scores = (scores * weights[:, :, at]).sum(axis=1)
        if seen is not None:
            scores = mx.where(seen[..., at, :], scores, mx.finfo(scores.dtype).min)
        best.append(mx.argpartition(-scores, kth=num_best - 1, axis=-1)[..., :num_best])
    return mx.concatenate(best, axis=1)


def _attend(
    self: Any, x: mx.array, mask: Any = None, cache: Any = None, position_offset: Any = None, causal: bool = False
) -> mx.array:
    return LIBRARY["attend"](self, x, mask, cache, position_offset)


def _attention(
    queries: mx.array, keys: mx.array, values: mx.array, cache: Any, scale: float, mask: Any, sinks: Any = None
) -> mx.array:
    """Compute attention in the place of the library's function, a few queries at a time."""
    parts = slices(queries.shape[2], SCORED_PAIRS // keys.shape[2])
    if len(parts) == 1 or not isinstance(mask, mx.array):
        return LIBRARY["attention"](queries, keys, values, cache, scale, mask, sinks)
    one = [LIBRARY["attention"](queries[:, :, at], keys, values, cache, scale, mask[..., at, :], sinks) for at in parts]
    return mx.concatenate(one, axis=2)


def _sparse_attention(
    queries: mx.array, keys: mx.array, entries: mx.array, chosen: mx.array, mask: Any, chosen_mask: Any, *more: Any
) -> mx.array:
    """Compute attention to keys and to each query's entries, as the library's function, a few queries at a time."""
    parts = [
        LIBRARY["sparse_attention"](
            queries[:, :, at],
            keys,
            entries,
            chosen[:, at],
            None if mask is None else mask[..., at, :],
            None if chosen_mask is None else chosen_mask[..., at, :],
            *more,
        )
        for at in slices(queries.shape[2], GATHERED_QUERIES)
    ]
    return mx.concatenate(parts, axis=2)


def slices(length: int, size: int) -> list[slice]:
    """Return slices of at least one element that cover `length` of them."""
    return [slice(start, start + max(size, 1)) for start in range(0, length, max(size, 1))]


def install() -> None:
    """Replace the library's methods. May be called several times."""
    Compressor.__call__ = _compress
    Indexer.__call__ = _index
    LocalAttention.__call__ = _attend
    module: Any = language
    module.scaled_dot_product_attention, module._sparse_pooled_attention = _attention, _sparse_attention
