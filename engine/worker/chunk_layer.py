"""Attention layers whose tokens see only their own chunk of the context: of one row, in a burst, in a decode group.

Chunks are counted from the first token of the context (Llama 4). Before a token lie fewer tokens of its chunk than a
chunk has, so a window of one chunk holds all that it sees, and only the mask differs from that of a sliding window.
"""

from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import ChunkedKVCache, RotatingKVCache

from engine.processing.reference_config import Reach
from engine.worker.window_layer import BatchWindowLayer, BurstWindow, WindowKind


class ChunkedCache(RotatingKVCache):
    """One row's layer: its last tokens, at most a chunk of `max_size`, the oldest first.

    It takes the place of the library's ChunkedKVCache, which keeps the same tokens and has no mask of its own.
    """

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append keys and values [1, heads, L, head_dim]; return those of the chunk before them as well."""
        return self._update_concat(keys, values)

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> mx.array:
        """Return which slots each of N new tokens sees: bool [N, slots]."""
        slots = mx.arange(max(self.offset - self.max_size + 1, 0), self.offset + N)
        return same_chunk(slots, mx.arange(self.offset, self.offset + N)[:, None], self.max_size)


class BatchChunkLayer(BatchWindowLayer):
    """One layer of all rows, as a ring of one chunk."""

    row_class = ChunkedCache

    def _sees(self, held: mx.array, own: mx.array, window: int) -> mx.array:
        return same_chunk(held, own, self.window)


class BurstChunks(BurstWindow):
    """One attention layer of all prompts whose tokens see only their own chunk."""

    def make_mask(self, num_new: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """Return which slots each new token sees: bool [B, 1, num_new, extent]."""
        starts, num_before = self.starts, mx.array(self._num_before, mx.int32)
        positions = (starts - num_before)[:, None] + mx.arange(max(self._num_before) + num_new)
        own = starts[:, None] + mx.arange(num_new)
        return same_chunk(positions[:, None, None], own[:, None, :, None], self._caches[0].max_size)


class ChunkKind(WindowKind):
    """Keys and values of the last tokens, at most a chunk."""

    library = (ChunkedKVCache,)
    rows = (ChunkedCache,)
    batch = BatchChunkLayer
    burst = BurstChunks

    def unserved_reason(self, cache: Any) -> str | None:
        return None

    def reach(self, cache: Any) -> Reach:
        return cache.chunk_size

    def row_caches(self, cache: ChunkedKVCache) -> tuple[ChunkedCache, ...]:
        return (ChunkedCache(cache.chunk_size),)


def same_chunk(positions: mx.array, own: mx.array, chunk_size: int) -> mx.array:
    """Return which of the positions are seen from `own`: those up to it in the same chunk."""
    return (positions <= own) & (positions >= own // chunk_size * chunk_size)
