"""Attention layers that keep the keys and values of all tokens, as computed or packed."""

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import KVCache
from mlx_vlm.models.hy_v4.cache import HyV4KVCache

from engine.worker.batch_layer import BatchLayer, SeenSlots
from engine.worker.burst_layer import BurstAttention, BurstForward
from engine.worker.cursor import Cursor
from engine.worker.layer_kind import LayerKind
from engine.worker.quantized_kv import KVFormat, QuantizedKVCache

SLOTS_STEP = 256  # slots are allocated in multiples of this number


class BatchKVLayer(BatchLayer):
    """One attention layer of all rows.

    Args:
        keys: [B, heads, slots, head_dim], or packed [B, heads, slots, words].
        values: Likewise.
        cursor: Where the rows write.
        kv_format: How keys and values are packed; None if they are stored as computed.
    """

    appends = True

    def __init__(self, keys: mx.array, values: mx.array, cursor: Cursor, kv_format: KVFormat | None = None):
        self.keys, self.values = keys, values
        self.cursor = cursor
        self.kv_format = kv_format

    @classmethod
    def of(cls, cache: KVCache, cursor: Cursor, kv_format: KVFormat | None = None) -> "BatchKVLayer":
        """Return a layer with one row, whose cache this is, packed in this format."""
        keys, values = cache.keys, cache.values
        assert keys is not None and values is not None
        return cls(keys, values, cursor, kv_format)

    @property
    def offset(self) -> int | mx.array:
        return self.cursor.start if self.cursor.as_offset else self.cursor.extent

    @property
    def starts(self) -> mx.array:
        """int32 [B], each row's next slot."""
        return self.cursor.start

    @property
    def num_slots(self) -> int:
        return self.keys.shape[2]

    @property
    def state(self) -> list[mx.array]:
        return [self.keys, self.values]

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def load(self, arrays: Iterator[mx.array], recorded: Iterator[mx.array]) -> None:
        self.keys, self.values = next(arrays), next(arrays)

    def make_mask(
        self, num_new: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        if return_array:
            self.cursor.uniform_start = None
        return self.cursor.mask(num_new, window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write keys and values [B, heads, L, head_dim] at the cursor; return those of the whole extent."""
        extent, kv_format = self.cursor.extent, self.kv_format
        if kv_format is not None:
            keys, values = kv_format.pack(keys, values)
        self.keys = _written(_with_slots(self.keys, extent), keys, self.cursor)
        self.values = _written(_with_slots(self.values, extent), values, self.cursor)
        keys, values = self.keys[..., :extent, :], self.values[..., :extent, :]
        return (keys, values) if kv_format is None else kv_format.unpack(keys, values)

    def seen_slots(self, lengths: mx.array, extent: int) -> SeenSlots:
        slots = self.keys[..., :extent, :], self.values[..., :extent, :]
        keys, values = slots if self.kv_format is None else self.kv_format.unpack(*slots)
        return SeenSlots(keys, values, (mx.arange(keys.shape[2]) < lengths[:, None])[:, None, None])

    def row(self, index: int, num_tokens: int) -> KVCache:
        """Return one row's cache with `num_tokens` tokens, as lazy slices."""
        cache = KVCache() if self.kv_format is None else QuantizedKVCache(self.kv_format)
        cache.keys, cache.values = self.keys[index : index + 1], self.values[index : index + 1]
        cache.offset = num_tokens
        return cache

    def append(self, rows: Sequence[Any]) -> "BatchKVLayer":
        keys, values = zip(*(row.state[:2] for row in rows), strict=True)
        return self._with(_stacked([self.keys, *keys]), _stacked([self.values, *values]))

    def select(self, rows: mx.array, num_slots: int) -> "BatchKVLayer":
        slots = min(rounded(num_slots), self.keys.shape[2])
        return self._with(self.keys[rows, :, :slots], self.values[rows, :, :slots])

    def reserve(self, num_slots: int) -> bool:
        if self.keys.shape[2] >= num_slots:
            return False
        self.keys, self.values = _with_slots(self.keys, num_slots), _with_slots(self.values, num_slots)
        return True

    def with_arrays(self, arrays: Iterator[mx.array], cursor: Cursor) -> "BatchKVLayer":
        return BatchKVLayer(next(arrays), next(arrays), cursor, self.kv_format)

    def _with(self, keys: mx.array, values: mx.array) -> "BatchKVLayer":
        return BatchKVLayer(keys, values, self.cursor, self.kv_format)


class KVKind(LayerKind):
    """Keys and values of all tokens, as computed."""

    library = rows = (KVCache,)
    batch = BatchKVLayer
    burst = BurstAttention
    attention = "full"

    def num_slots(self, cache: KVCache, num_tokens: int) -> int:
        return rounded(num_tokens)

    def num_lacking(self, cache: KVCache, num_tokens: int, inputs_lack: int) -> int:
        return num_tokens - cache.offset

    def newest(self, cache: KVCache) -> list[mx.array]:
        if not cache.offset:
            return []
        slots: list[Any] = [cache.keys, cache.values]
        newest, kv_format = [array[..., cache.offset - 1 : cache.offset, :] for array in slots], self.kv_format(cache)
        return newest if kv_format is None else list(kv_format.unpack(*newest))


class QuantizedKVKind(KVKind):
    """Keys and values of all tokens, packed."""

    library = ()
    rows = (QuantizedKVCache,)

    def kv_format(self, cache: QuantizedKVCache) -> KVFormat:
        return cache.kv_format

    def batch_layer(self, cache: QuantizedKVCache, cursor: Cursor) -> BatchKVLayer:
        return BatchKVLayer.of(cache, cursor, cache.kv_format)

    def burst_layer(self, caches: Sequence[QuantizedKVCache], forward: BurstForward) -> BurstAttention:
        return BurstAttention(caches, forward, caches[0].kv_format)


class ReplacedKVKind(KVKind):
    """A cache of the library that differs from KVCache in how it grows; rows have a KVCache instead."""

    library = (HyV4KVCache,)
    rows = ()

    def row_caches(self, cache: HyV4KVCache) -> tuple[KVCache, ...]:
        return (KVCache(),)


def rounded(num_slots: int) -> int:
    """Round a number of slots up to a multiple of SLOTS_STEP."""
    return -(-num_slots // SLOTS_STEP) * SLOTS_STEP


def slots_like(array: mx.array, num_slots: int) -> mx.array:
    """Return empty slots, shaped like an array [B, heads, slots, head_dim]."""
    batch, heads, _, head_dim = array.shape
    return mx.zeros((batch, heads, num_slots, head_dim), array.dtype)


def _with_slots(array: mx.array, num_slots: int) -> mx.array:
    missing = rounded(num_slots) - array.shape[2] if num_slots > array.shape[2] else 0
    return mx.pad(array, [(0, 0), (0, 0), (0, missing), (0, 0)]) if missing else array


def _stacked(parts: Sequence[mx.array]) -> mx.array:
    """Concatenate rows of different slots in one new array; padding all of them first would take the memory twice."""
    _, heads, _, head_dim = parts[0].shape
    num_rows, slots = sum(part.shape[0] for part in parts), rounded(max(part.shape[2] for part in parts))
    stacked, done = mx.zeros((num_rows, heads, slots, head_dim), parts[0].dtype), 0
    for part in parts:
        stacked[done : done + part.shape[0], :, : part.shape[2]] = part
        done += part.shape[0]
    return stacked


def _written(slots: mx.array, new: mx.array, cursor: Cursor) -> mx.array:
    """Write new [B, heads, L, head_dim or words] to slots start .. start + L of each row.

    The write is in place if `slots` has no other reference.
    """
    at, length = cursor.uniform_start, new.shape[2]
    if at is not None:
        slots[..., at : at + length, :] = new
        return slots
    index = cursor.slots(length)[:, None, :, None]
    return mx.put_along_axis(slots, mx.broadcast_to(index, new.shape), new, axis=2)
