"""Qwen4's index for rows at different positions, and its contexts of n-grams from the first token on.

mlx_vlm 0.7.10 takes one length of the cache for all rows that are not padded on the left. It has no context of n-grams
before the first token of a prompt, which is one of end tokens, so rows of which only some have begun get zeros. The
functions can be removed as the index takes offsets [B], and as `make_cache` sets that context.
"""

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
from mlx_vlm.models.qwen4_exp.language import LanguageModel, Qwen4ExpNGramEmbedding, Qwen4ExpQSAIndexer

from engine.worker.layer_kinds import is_replaced
from engine.worker.patches.row_positions import positions_of

LIBRARY: dict[str, Any] = {
    "select": Qwen4ExpQSAIndexer.select_from_projected,
    "make_cache": LanguageModel.make_cache,
    "embed": Qwen4ExpNGramEmbedding.__call__,
}
"""The library's methods."""


def _select(self: Any, qk: mx.array, cache: Any, position_ids: Any) -> SimpleNamespace | None:
    """Return which blocks of keys each query sees, as the library's method; None if these are all."""
    if cache is None or is_replaced(cache):
        return LIBRARY["select"](self, qk, cache, position_ids)
    batch, length, _ = qk.shape
    ends = positions_of(cache.starts, length) + 1
    heads = qk.reshape(batch, length, self.n_heads + self.kv_heads, self.head_dim)
    keys, positions = cache.update_indexer(heads[:, :, self.n_heads], position_ids)
    num_blocks = keys.shape[1] // self.compress_ratio
    if length == 1 and num_blocks <= self.block_topk:
        return None
    queries = self.q_layernorm(heads[:, :, : self.n_heads]).transpose(0, 2, 1, 3)
    blocks = keys[:, : num_blocks * self.compress_ratio].reshape(batch, num_blocks, self.compress_ratio, self.head_dim)
    blocks = self.k_layernorm(blocks.astype(mx.float32).mean(axis=2).astype(keys.dtype))[:, None]
    first = positions[..., : num_blocks * self.compress_ratio : self.compress_ratio]
    queries, blocks = self._apply_rope(queries, position_ids), self._apply_rope(blocks, first)
    scores = queries.astype(mx.float32) @ blocks.astype(mx.float32).swapaxes(-1, -2)
    scores = mx.maximum(scores, 0).sum(axis=1) / self.head_dim**0.5
    num_complete = mx.broadcast_to(ends // self.compress_ratio, (batch, length))
    scores = mx.where(mx.arange(num_blocks) < num_complete[..., None], scores, -mx.inf)
    if (missing := self.block_topk - num_blocks) > 0:
        scores = mx.pad(scores, [(0, 0), (0, 0), (0, missing)], constant_values=-mx.inf)
    best = mx.argpartition(scores, kth=-self.block_topk, axis=-1)[..., -self.block_topk :].astype(mx.int32)
    return SimpleNamespace(
        selected_blocks=mx.where(best < num_complete[..., None], best, -1),
        query_ends=mx.broadcast_to(ends, (batch, length)),
        complete_counts=num_complete,
        left_padding=mx.zeros(batch, mx.int32),
        key_len=keys.shape[1],
        zero_padding=True,
    )


def _make_cache(self: Any) -> list[Any]:
    layers = LIBRARY["make_cache"](self)
    for block, layer in zip(self.layers, layers, strict=True):
        if "ple" in block:
            grams = block.ple.ple_embedding
            layer[3] = mx.full((1, grams.context_len), grams.eos_token_id, mx.int64)
    return layers


def _embed(self: Any, input_ids: mx.array, cache: Any) -> mx.array:
    num_rows = input_ids.shape[0]
    if cache is not None and cache[3] is not None and len(cache[3]) < num_rows:  # an empty cache is of one row
        cache[3] = mx.repeat(cache[3], num_rows, axis=0)
    return LIBRARY["embed"](self, input_ids, cache)


def install() -> None:
    """Replace the library's methods. May be called several times."""
    Qwen4ExpQSAIndexer.select_from_projected = _select
    LanguageModel.make_cache = _make_cache
    Qwen4ExpNGramEmbedding.__call__ = _embed
