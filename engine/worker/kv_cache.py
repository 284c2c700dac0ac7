"""The caches of a decode batch: every row left-justified in slots of its own, whatever its neighbours do.

The library's batch caches push all rows to one common end: rows that accept different numbers of draft tokens must be
rolled, a join moves everybody. Here a row's tokens lie in slots 0, 1, 2, ... and `Cursor.start` says, on the device,
where each row writes next. To forget rejected tokens is to write over them; nothing moves and nobody waits to know
how many there are. What lies behind a row's end is masked out and finite.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import ArraysCache, KVCache

from engine.worker.delta_rule import Factors

RowCache = list[Any]
"""Per layer the library's cache for one row: KVCache (attention) or ArraysCache (recurrent state)."""

SLOTS_STEP = 256  # room for so many tokens is added at once


@dataclass(slots=True, eq=False)
class Cursor:
    """Where the rows write in the next forward; shared by all layers, set before each.

    start: int32 [B], on the device. extent: slots to look at, at least max(start) + new tokens. uniform_start: the
    same for all rows, where the host knows it: then slices and no masks will do. as_offset: what the layers call
    their offset is `start` (they take their positions from it) or the extent (positions come from outside).
    """

    start: mx.array
    extent: int
    uniform_start: int | None = None
    as_offset: bool = False

    def mask(self, num_new: int, window_size: int | None) -> mx.array | str | None:
        """What each of the new tokens sees: bool [B, 1, num_new, extent], or the library's word for all before it."""
        if self.uniform_start is not None and window_size is None:
            return None if num_new == 1 else "causal"
        slots = mx.arange(self.extent)[None, None]
        own = (self.start[:, None] + mx.arange(num_new))[..., None]
        seen = slots <= own
        if window_size is not None:
            seen &= slots > own - window_size
        return seen[:, None]


class KVRows:
    """One attention layer. keys, values: [B, heads, slots, head_dim]."""

    def __init__(self, keys: mx.array, values: mx.array, cursor: Cursor):
        self.keys, self.values = keys, values
        self.cursor = cursor

    @property
    def offset(self) -> int | mx.array:
        return self.cursor.start if self.cursor.as_offset else self.cursor.extent

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
        extent = self.cursor.extent
        self.keys = _written(_with_slots(self.keys, extent), keys, self.cursor)
        self.values = _written(_with_slots(self.values, extent), values, self.cursor)
        return self.keys[..., :extent, :], self.values[..., :extent, :]

    def row(self, index: int, num_tokens: int) -> KVCache:
        cache = KVCache()
        cache.keys, cache.values = self.keys[index : index + 1], self.values[index : index + 1]
        cache.offset = num_tokens
        return cache

    def with_rows(self, rows: Sequence[Any]) -> "KVRows":
        keys, values = zip(*(row.state[:2] for row in rows), strict=True)
        return KVRows(_stacked([self.keys, *keys]), _stacked([self.values, *values]), self.cursor)

    def kept(self, rows: mx.array, num_slots: int) -> "KVRows":
        slots = min(rounded(num_slots), self.keys.shape[2])
        return KVRows(self.keys[rows, :, :slots], self.values[rows, :, :slots], self.cursor)


class RecurrentRows:
    """One recurrent layer: slots (convolution window, state), arrays [B, ...]. Speaks the library's ArraysCache.

    While it records, it keeps what `commit` needs to go back to the state after any token of the forward: the states,
    or, where they are computed so (is_factored), the factors of their change; then the state itself waits for `commit`.
    """

    lengths = None  # no row is padded
    is_factored = False  # for all layers of the process: see patches/gated_delta_rows.py

    def __init__(self, slots: Sequence[mx.array]):
        self.slots = list(slots)
        self.recording = False
        self._windows: dict[int, tuple[mx.array, int]] = {}
        self._states: dict[int, mx.array] = {}
        self._factors: dict[int, Factors] = {}

    def __getitem__(self, index: int) -> mx.array:
        return self.slots[index]

    @property
    def state(self) -> list[mx.array]:
        return self.slots

    @property
    def nbytes(self) -> int:
        return sum(slot.nbytes for slot in self.slots)

    @property
    def recorded(self) -> list[mx.array]:
        windows = [source for source, _ in self._windows.values()]
        factors = [array for factors in self._factors.values() for array in factors.arrays]
        return [*windows, *self._states.values(), *factors]

    def load(self, arrays: Iterator[mx.array], recorded: Iterator[mx.array]) -> None:
        self.slots = [next(arrays) for _ in self.slots]
        if self.recording:
            self._windows = {0: (next(recorded), self.slots[0].shape[1])}
            if self.is_factored:
                self._factors = {1: Factors(next(recorded), next(recorded), next(recorded))}
            else:
                self._states = {1: next(recorded)}

    def update_window(self, index: int, source: mx.array, width: int, *, lengths: None = None) -> None:
        """source [B, width + L, channels]: the window after t tokens is source[:, t : t + width]."""
        self.slots[index] = mx.contiguous(source[:, source.shape[1] - width :])
        if self.recording:
            self._windows[index] = (source, width)

    def update_recurrent(self, index: int, length: int, update: Callable[..., Any]) -> tuple[mx.array, mx.array]:
        """update(state, n) -> output, last state, and if n is given the states [B, n, ...] after the first n tokens."""
        keep_all = self.recording and length > 1
        output, state, *before = update(self.slots[index], length - 1 if keep_all else None)
        self.slots[index] = state
        if keep_all:
            self._states[index] = mx.concatenate([before[0], state[:, None]], axis=1)
        return output, state

    def record_factors(self, index: int, factors: Factors) -> None:
        self._factors[index] = factors

    def commit(self, num_kept: mx.array) -> None:
        """Goes back to the state after `num_kept` int32 [B] >= 1 tokens of the recorded forward."""
        for index, (source, width) in self._windows.items():
            at = num_kept[:, None] + mx.arange(width)
            self.slots[index] = mx.take_along_axis(source, at[..., None], axis=1)
        for index, states in self._states.items():
            batch, length = states.shape[:2]
            at = mx.arange(batch) * length + num_kept - 1
            self.slots[index] = mx.take(states.reshape(batch * length, *states.shape[2:]), at, axis=0)
        for index, factors in self._factors.items():
            self.slots[index] = factors.state_after(self.slots[index], num_kept)
        self._windows, self._states, self._factors, self.recording = {}, {}, {}, False

    def row(self, index: int, num_tokens: int) -> ArraysCache:
        cache = ArraysCache(len(self.slots))
        cache.cache = [mx.contiguous(slot[index : index + 1]) for slot in self.slots]
        return cache

    def with_rows(self, rows: Sequence[Any]) -> "RecurrentRows":
        others = [row.slots if isinstance(row, RecurrentRows) else row.cache for row in rows]
        return RecurrentRows([mx.concatenate(list(slots)) for slots in zip(self.slots, *others, strict=True)])

    def kept(self, rows: mx.array, num_slots: int) -> "RecurrentRows":
        return RecurrentRows([slot[rows] for slot in self.slots])


class RowsCache:
    """All layers of a batch. What rebuilds them does so layer by layer: no more than one of them is there twice."""

    def __init__(self, layers: list[Any], cursor: Cursor):
        self.layers = layers
        self.cursor = cursor

    @classmethod
    def of(cls, row: RowCache, as_offset: bool = False) -> "RowsCache":
        """A batch of this one row, in its very arrays. Raises TypeError for a layer that cannot be batched."""
        cursor = Cursor(mx.zeros(1, mx.int32), 0, None, as_offset)
        return cls([_rows_of(i, layer, cursor) for i, layer in enumerate(row)], cursor)

    def row(self, index: int, num_tokens: int) -> RowCache:
        """What one row, of so many tokens, would have alone: lazy, of the batch's arrays, which writes do not reach."""
        return [layer.row(index, num_tokens) for layer in self.layers]

    def join(self, rows: Sequence[RowCache], move: bool = False) -> None:
        """Adds rows, evaluated. When it raises, the rows are as they were.

        rows: caches of one row each, or the layers of another batch.
        move: let go of the new rows' own layers, one after the other; what is left of them is of no use.
        """
        before, done = self.num_rows, 0
        try:
            for done, mine in enumerate(self.layers):
                self._put(done, mine.with_rows([row[done] for row in rows]))
                if move:
                    for row in rows:
                        row[done] = None
        except Exception:
            for i in range(done):
                self.layers[i] = self.layers[i].kept(mx.arange(before), self.num_slots)
            raise

    def keep(self, rows: list[int], num_slots: int, leaving: Sequence[Callable[[Any], None]] = ()) -> None:
        """These rows in this order, with room for `num_slots` tokens each. When it raises, all are lost.

        leaving: called with each layer before it goes.
        """
        index = mx.array(rows, mx.int32)
        for i, layer in enumerate(self.layers):
            for call in leaving:
                call(layer)
            self._put(i, layer.kept(index, num_slots) if rows else None)

    def _put(self, i: int, layer: Any) -> None:
        if layer is not None:
            mx.eval(layer.state)
        self.layers[i] = layer

    @property
    def num_rows(self) -> int:
        return self.layers[0].state[0].shape[0]

    @property
    def num_slots(self) -> int:
        """Of the attention layers; 0 without one."""
        return max((layer.keys.shape[2] for layer in self.layers if isinstance(layer, KVRows)), default=0)

    def at(self, start: mx.array, extent: int, uniform_start: int | None = None, record: bool = False) -> list[Any]:
        """The layers, ready for a forward that writes at `start`; see Cursor. record: `commit` will follow."""
        self.reserve(extent)
        self.cursor.start, self.cursor.extent, self.cursor.uniform_start = start, extent, uniform_start
        for layer in self.layers:
            if isinstance(layer, RecurrentRows):
                layer.recording = record
        return self.layers

    def commit(self, num_kept: mx.array) -> None:
        for layer in self.layers:
            if isinstance(layer, RecurrentRows):
                layer.commit(num_kept)

    def reserve(self, num_slots: int) -> int:
        """Makes room for that many tokens in every row; returns how many slots there are now."""
        for layer in self.layers:
            if isinstance(layer, KVRows) and layer.keys.shape[2] < num_slots:
                layer.keys, layer.values = _with_slots(layer.keys, num_slots), _with_slots(layer.values, num_slots)
                mx.eval(layer.state)
        return self.num_slots or rounded(num_slots)

    @property
    def recorded(self) -> list[mx.array]:
        """What a forward has recorded for `commit`."""
        layers = [layer for layer in self.layers if isinstance(layer, RecurrentRows)]
        return [array for layer in layers for array in layer.recorded]

    def load(self, state: Sequence[mx.array], recorded: Sequence[mx.array]) -> None:
        """Takes what `state` and `recorded` of a cache of the same structure gave."""
        arrays, records = iter(state), iter(recorded)
        for layer in self.layers:
            layer.load(arrays, records)

    def like(self, state: Sequence[mx.array]) -> "RowsCache":
        """Another cache of the same structure with these arrays."""
        cursor = Cursor(self.cursor.start, 0, None, self.cursor.as_offset)
        arrays = iter(state)
        layers = [
            KVRows(next(arrays), next(arrays), cursor)
            if isinstance(layer, KVRows)
            else RecurrentRows([next(arrays) for _ in layer.slots])
            for layer in self.layers
        ]
        return RowsCache(layers, cursor)

    @property
    def state(self) -> list[mx.array]:
        return [array for layer in self.layers for array in layer.state]

    @property
    def nbytes(self) -> int:
        return num_bytes(self.layers)


def num_bytes(cache: Sequence[Any]) -> int:
    return sum(layer.nbytes for layer in cache)


def _rows_of(i: int, layer: Any, cursor: Cursor) -> KVRows | RecurrentRows:
    kind: Any = type(layer)  # exactly: what derives from them stores otherwise
    if kind is KVCache:
        return KVRows(layer.keys, layer.values, cursor)
    if kind is ArraysCache and all(slot is not None for slot in layer.cache):
        return RecurrentRows(layer.cache)
    raise TypeError(f"layer {i}: {type(layer).__name__} cannot be batched")


def rounded(num_slots: int) -> int:
    """Room for so many tokens, and for more."""
    return -(-num_slots // SLOTS_STEP) * SLOTS_STEP


def slots_like(array: mx.array, num_slots: int) -> mx.array:
    """Empty ones, for so many tokens, of the kind of an array [B, heads, slots, head_dim]."""
    batch, heads, _, head_dim = array.shape
    return mx.zeros((batch, heads, rounded(num_slots), head_dim), array.dtype)


def _with_slots(array: mx.array, num_slots: int) -> mx.array:
    missing = rounded(num_slots) - array.shape[2] if num_slots > array.shape[2] else 0
    return mx.pad(array, [(0, 0), (0, 0), (0, missing), (0, 0)]) if missing else array


def _stacked(parts: Sequence[mx.array]) -> mx.array:
    """Written into one new array, where padding all of them first would take as much again."""
    _, heads, _, head_dim = parts[0].shape
    num_rows, slots = sum(part.shape[0] for part in parts), rounded(max(part.shape[2] for part in parts))
    stacked, done = mx.zeros((num_rows, heads, slots, head_dim), parts[0].dtype), 0
    for part in parts:
        stacked[done : done + part.shape[0], :, : part.shape[2]] = part
        done += part.shape[0]
    return stacked


def _written(slots: mx.array, new: mx.array, cursor: Cursor) -> mx.array:
    """new [B, heads, L, head_dim] at slots start .. start + L of each row; in place, as nobody else holds `slots`."""
    at, length = cursor.uniform_start, new.shape[2]
    if at is not None:
        slots[..., at : at + length, :] = new
        return slots
    index = (cursor.start[:, None] + mx.arange(length))[:, None, :, None]
    return mx.put_along_axis(slots, mx.broadcast_to(index, new.shape), new, axis=2)
