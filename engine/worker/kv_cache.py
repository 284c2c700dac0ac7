"""The caches of a decode group: each row's tokens are left-justified in slots of their own.

The library's batch caches align all rows to one common end: rows that accept different numbers of draft tokens must be
rolled, and a join moves all rows. Here a row's tokens lie in slots 0, 1, 2, ..., and `Cursor.start` says, on the
device, where each row writes next. Rejected tokens are overwritten, so nothing moves and the host need not know how
many there are. Slots after a row's end are masked and finite.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import ArraysCache, KVCache, RotatingKVCache

from engine.worker.batch_layer import BatchLayer, SeenSlots
from engine.worker.chunk_layer import BatchChunkLayer, ChunkedCache
from engine.worker.pool_layer import BatchPoolInputs, BatchPoolLayer, PooledCache, PoolInputs
from engine.worker.quantized_kv import KVFormat, QuantizedKVCache, format_of
from engine.worker.recurrent_layer import BatchRecurrentLayer
from engine.worker.window_layer import BatchWindowLayer

SequenceCache = list[Any]
"""One row's caches, those of LAYERS, for each layer. A layer with several has them one after the other."""

SLOTS_STEP = 256  # slots are allocated in multiples of this number


@dataclass(slots=True, eq=False)
class Cursor:
    """Where the rows write in the next forward; shared by all layers, and set before each forward."""

    start: mx.array
    """int32 [B], on the device: each row's next slot."""
    extent: int
    """Slots that attention reads, at least max(start) + new tokens."""
    uniform_start: int | None = None
    """`start` if the host knows that it is the same for all rows: slices suffice then, without masks."""
    as_offset: bool = False
    """Whether the layers' offset is `start`, from which they derive positions, or the extent, with explicit
    positions."""
    _slots: tuple[mx.array, mx.array] | None = None
    """`start` and the slots of as many new tokens from it on; layers that write as many need them again."""

    def slots(self, num_new: int) -> mx.array:
        """Return the slots of new tokens, int32 [B, num_new]."""
        if self._slots is None or self._slots[0] is not self.start or self._slots[1].shape[1] != num_new:
            self._slots = self.start, self.start[:, None] + mx.arange(num_new)
        return self._slots[1]

    def mask(self, num_new: int, window_size: int | None) -> mx.array | str | None:
        """Return which slots each new token sees: bool [B, 1, num_new, extent], or the library's shorthand.

        The shorthand stands for all preceding tokens: None for one new token, otherwise "causal".
        """
        if self.uniform_start is not None and window_size is None:
            return None if num_new == 1 else "causal"
        slots = mx.arange(self.extent)[None, None]
        own = self.slots(num_new)[..., None]
        seen = slots <= own
        if window_size is not None:
            seen &= slots > own - window_size
        return seen[:, None]


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
    def of(cls, cache: KVCache, cursor: Cursor) -> "BatchKVLayer":
        """Return a layer with one row, whose cache this is."""
        keys, values = cache.keys, cache.values
        assert keys is not None and values is not None
        return cls(keys, values, cursor, format_of(cache))

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


class BatchCache:
    """All layers of a decode group. They are rebuilt one by one, so that at most one layer exists twice."""

    def __init__(self, layers: list[Any], cursor: Cursor):
        self.layers = layers
        self.cursor = cursor

    @classmethod
    def of(cls, row: SequenceCache, as_offset: bool = False) -> "BatchCache":
        """Create a group of one row, which takes over the row's arrays."""
        cursor = Cursor(mx.zeros(1, mx.int32), 0, None, as_offset)
        return cls([LAYERS[type(layer)].of(layer, cursor) for layer in row], cursor)

    def row(self, index: int, num_tokens: int) -> SequenceCache:
        """Return one row's caches with `num_tokens` tokens: lazy slices that later writes do not affect."""
        return [layer.row(index, num_tokens) for layer in self.layers]

    def join(self, rows: Sequence[SequenceCache], move: bool = False) -> None:
        """Add rows, evaluated. When it raises, the rows are as before.

        Args:
            rows: Caches of one row each.
            move: Free each layer of the new rows once it is copied; their caches must not be used afterwards.
        """
        before, done = self.num_rows, 0
        try:
            for done, mine in enumerate(self.layers):
                self._put(done, mine.append([row[done] for row in rows]))
                if move:
                    for row in rows:
                        row[done] = None
        except Exception:
            for i in range(done):
                self.layers[i] = self.layers[i].select(mx.arange(before), self.num_slots)
            raise

    def select(self, rows: list[int], num_slots: int, leaving: Sequence[Callable[[Any], None]] = ()) -> None:
        """Keep these rows in this order, with `num_slots` slots each. When it raises, all rows are lost.

        Args:
            rows: Indices of the rows.
            num_slots: Slots that they need.
            leaving: Called with each layer before it is replaced.
        """
        index = mx.array(rows, mx.int32)
        for i, layer in enumerate(self.layers):
            for call in leaving:
                call(layer)
            self._put(i, layer.select(index, num_slots) if rows else None)

    def _put(self, i: int, layer: Any) -> None:
        if layer is not None:
            mx.eval(layer.state)
        self.layers[i] = layer

    @property
    def num_rows(self) -> int:
        return self.layers[0].state[0].shape[0] if self.layers else 0

    @property
    def num_slots(self) -> int:
        """Tokens of a row for which an attention layer has slots, at most; 0 without one."""
        return max((layer.num_slots for layer in self.layers), default=0)

    def at(self, start: mx.array, extent: int, uniform_start: int | None = None, record: bool = False) -> list[Any]:
        """Return the layers, prepared for a forward that writes at `start`; see Cursor.

        With `record`, `commit` will follow.
        """
        self.reserve(extent)
        self.cursor.start, self.cursor.extent, self.cursor.uniform_start = start, extent, uniform_start
        for layer in self.layers:
            layer.recording = record
        return self.layers

    def commit(self, num_kept: mx.array) -> None:
        """Return recurrent layers to the state after `num_kept` int32 [B] tokens of the recorded forward."""
        for layer in self.layers:
            layer.commit(num_kept)

    def reserve(self, num_slots: int) -> int:
        """Allocate at least `num_slots` slots per row; return how many slots there are."""
        for layer in self.layers:
            if layer.reserve(num_slots):  # otherwise there is nothing to wait for
                mx.eval(layer.state)
        return max(self.num_slots, rounded(num_slots))

    @property
    def recorded(self) -> list[mx.array]:
        """The arrays that the last forward recorded for `commit`."""
        return [array for layer in self.layers for array in layer.recorded]

    def load(self, state: Sequence[mx.array], recorded: Sequence[mx.array]) -> None:
        """Set the arrays that `state` and `recorded` of a cache of the same structure returned."""
        arrays, records = iter(state), iter(recorded)
        for layer in self.layers:
            layer.load(arrays, records)

    def with_arrays(self, state: Sequence[mx.array]) -> "BatchCache":
        """Return another cache of the same structure with these arrays."""
        cursor = Cursor(self.cursor.start, 0, None, self.cursor.as_offset)
        arrays = iter(state)
        return BatchCache([layer.with_arrays(arrays, cursor) for layer in self.layers], cursor)

    @property
    def state(self) -> list[mx.array]:
        return [array for layer in self.layers for array in layer.state]

    @property
    def nbytes(self) -> int:
        return num_bytes(self.layers)


def num_bytes(cache: Sequence[Any]) -> int:
    """Return the bytes of all layers."""
    return sum(layer.nbytes for layer in cache)


LAYERS: dict[type, Any] = {
    KVCache: BatchKVLayer,
    QuantizedKVCache: BatchKVLayer,
    RotatingKVCache: BatchWindowLayer,
    ChunkedCache: BatchChunkLayer,
    PoolInputs: BatchPoolInputs,
    PooledCache: BatchPoolLayer,
    ArraysCache: BatchRecurrentLayer,
}
"""A row's cache -> the layer of a decode group. Exact types: subclasses store their state differently."""


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
