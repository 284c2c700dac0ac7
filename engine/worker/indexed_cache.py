"""Attention layers with an index: keys of its own for each token, by which a query chooses the tokens that it sees.

The index keys are one more array per token. In a row and in a decode group they are a second layer of keys and values,
whose values are empty (MiniMax M3) or the tokens' positions (Qwen4): rows, snapshots and memory costs need no more.
"""

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import KVCache
from mlx_vlm.models.minimax_m3_vl.language import MiniMaxM3KVCache
from mlx_vlm.models.qwen4_exp.language import QSAKVCache

from engine.worker.kv_layer import KVKind


class IndexedCache:
    """Both layers, as the library's module takes them. It keeps no state and serves one forward."""

    index_offset = 0  # not read, as queries have explicit positions

    def __init__(self, attention: Any, index: Any):
        self._attention = attention
        self._index = index

    @property
    def offset(self) -> int | mx.array:
        return self._attention.offset

    @property
    def starts(self) -> int | mx.array:
        """Slots of each row before the forward: an int, or int32 [B]."""
        return self._index.offset if isinstance(self._index, KVCache) else self._index.starts

    @property
    def make_mask(self) -> Callable[..., Any]:
        return self._attention.make_mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return self._attention.update_and_fetch(keys, values)

    def update_index_and_fetch(self, keys: mx.array) -> mx.array:
        """Append index keys [B, heads, L, index_dim]; return those of the whole extent."""
        return self._index.update_and_fetch(keys, mx.zeros((*keys.shape[:-1], 0), keys.dtype))[0]

    def update_indexer(self, keys: mx.array, positions: mx.array) -> tuple[mx.array, mx.array]:
        """Append index keys [B, L, index_dim] and rope positions int32 [3, B, L]; return those of the whole extent."""
        values = positions.astype(mx.int32).transpose(1, 2, 0)[:, None]
        keys, values = self._index.update_and_fetch(keys[:, None], values)
        return keys[:, 0], values[:, 0].transpose(2, 0, 1)


class IndexedKind(KVKind):
    """Keys and values of all tokens, and the keys of their index."""

    library = (MiniMaxM3KVCache, QSAKVCache)
    rows = ()

    def row_caches(self, cache: Any) -> tuple[KVCache, KVCache]:
        return KVCache(), KVCache()

    def as_taken(self, cache: Any, caches: Iterator[Any]) -> IndexedCache:
        return IndexedCache(next(caches), next(caches))
