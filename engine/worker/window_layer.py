"""Attention layers with a sliding window: of one row, in a burst, and as a ring of the window's size in a decode group.

The token at position p lies in slot p mod R of its row. R exceeds the window by RING_MARGIN, so that neither rejected
drafts nor the tokens that are computed after a row's last one overwrite what the row still sees. The host need not know
where a row is: which position a slot holds follows from the row's newest one.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import RotatingKVCache

from engine.processing.reference_config import Reach
from engine.worker.batch_layer import BatchLayer, SeenSlots
from engine.worker.burst_layer import BurstAttention, BurstForward
from engine.worker.layer_kind import LayerKind

RING_MARGIN = 32
"""Slots of a ring beyond its window; bounds the tokens per step and the tokens computed after a row's last one."""


class BatchWindowLayer(BatchLayer):
    """One sliding-window layer of all rows.

    Args:
        keys: [B, heads, slots, head_dim]; at most `ring_slots(window)` slots, fewer while no row has reached them.
        values: Likewise.
        window: How many tokens a token sees, itself included.
        cursor: Where the rows write, see Cursor.
    """

    margin = RING_MARGIN
    row_class: type[RotatingKVCache] = RotatingKVCache  # of one row's cache

    @classmethod
    def of(cls, cache: RotatingKVCache, cursor: Any) -> "BatchWindowLayer":
        """Return a layer with one row, whose cache this is."""
        assert not cache.keep, "WindowKind refuses windows that keep their first tokens"
        window = cache.max_size
        keys, values = last_tokens(cache)
        if cache.offset > ring_slots(window) or keys.shape[2] < cache.offset:
            ring, first = ring_slots(window), cache.offset - keys.shape[2]
            keys, values = (mx.roll(_padded(array, ring), first % ring, 2) for array in (keys, values))
        return cls(keys, values, window, cursor)

    def __init__(self, keys: mx.array, values: mx.array, window: int, cursor: Any):
        self.keys, self.values = keys, values
        self.window = self.max_size = window
        self.cursor = cursor

    @property
    def offset(self) -> int | mx.array:
        return self.cursor.start if self.cursor.as_offset else self.cursor.extent

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
        """Return which slots each new token sees: bool [B, 1, num_new, slots], or the library's shorthand."""
        cursor, window = self.cursor, min(window_size or self.window, self.window)
        if cursor.uniform_start is not None and cursor.extent <= window and not return_array:
            return None if num_new == 1 else "causal"
        num_slots = min(cursor.extent, ring_slots(self.window))
        positions = self._positions_of_slots(cursor.start + num_new - 1, num_slots)[:, None]
        own = cursor.slots(num_new)[..., None]
        return self._sees(positions, own, window)[:, None]

    def _positions_of_slots(self, newest: mx.array, num_slots: int) -> mx.array:
        """Return the positions that slots hold, int32 [B, num_slots]; those of empty slots are negative.

        Args:
            newest: int32 [B], of the rows' newest tokens. Slots of tokens after them count as those of the tokens one
                ring before, which no token sees any more.
            num_slots: Slots of each row.
        """
        newest = newest[:, None]
        return newest - (newest - mx.arange(num_slots)) % ring_slots(self.window)

    def seen_slots(self, lengths: mx.array, extent: int) -> SeenSlots:
        num_slots = min(extent, self.keys.shape[2])
        newest = (lengths - 1)[:, None]
        seen = self._sees(self._positions_of_slots(lengths - 1, num_slots), newest, self.window)[:, None, None]
        return SeenSlots(self.keys[..., :num_slots, :], self.values[..., :num_slots, :], seen)

    def _sees(self, held: mx.array, own: mx.array, window: int) -> mx.array:
        """Return which of the positions that slots hold are seen from `own`; negative ones are of empty slots."""
        return (held >= 0) & (held <= own) & (held > own - window)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write keys and values [B, heads, L, head_dim] at the cursor; return all slots of the ring in use."""
        extent, ring = self.cursor.extent, ring_slots(self.window)
        assert keys.shape[2] <= RING_MARGIN
        self.reserve(extent)
        num_slots = min(extent, ring)
        index = (self.cursor.slots(keys.shape[2]) % ring)[:, None, :, None]
        self.keys = mx.put_along_axis(self.keys, mx.broadcast_to(index, keys.shape), keys, axis=2)
        self.values = mx.put_along_axis(self.values, mx.broadcast_to(index, values.shape), values, axis=2)
        return self.keys[..., :num_slots, :], self.values[..., :num_slots, :]

    def reserve(self, num_slots: int) -> bool:
        """Allocate slots for `num_slots` tokens per row, at most a whole ring; return whether there are more now."""
        if self._allocated(num_slots) <= self.keys.shape[2]:
            return False
        self.keys, self.values = (_padded(slots, self._allocated(num_slots)) for slots in self.state)
        return True

    def row(self, index: int, num_tokens: int) -> RotatingKVCache:
        """Return one row's cache with `num_tokens` tokens, oldest first, as lazy copies."""
        first = max(num_tokens - self.window, 0)
        slots = mx.arange(first, num_tokens) % ring_slots(self.window)
        keys, values = (array[index : index + 1][:, :, slots] for array in self.state)
        cache = self.row_class(max_size=self.window)
        cache.keys, cache.values = keys, values
        cache.offset, cache._idx = num_tokens, keys.shape[2]
        return cache

    def append(self, rows: Sequence[Any]) -> "BatchWindowLayer":
        """Return the layer with more rows, given the cache of each."""
        others = [self.of(row, self.cursor) for row in rows]
        num_slots = max(layer.keys.shape[2] for layer in [self, *others])
        keys, values = (
            mx.concatenate([_padded(slots, num_slots) for slots in arrays])
            for arrays in zip(*(layer.state for layer in [self, *others]), strict=True)
        )
        return type(self)(keys, values, self.window, self.cursor)

    def select(self, rows: mx.array, num_slots: int) -> "BatchWindowLayer":
        num_slots = min(self._allocated(num_slots), self.keys.shape[2])
        return type(self)(self.keys[rows, :, :num_slots], self.values[rows, :, :num_slots], self.window, self.cursor)

    def with_arrays(self, arrays: Iterator[mx.array], cursor: Any) -> "BatchWindowLayer":
        return type(self)(next(arrays), next(arrays), self.window, cursor)

    def _allocated(self, num_slots: int) -> int:
        step = RotatingKVCache.step
        return min(-(-num_slots // step) * step, ring_slots(self.window))


class BurstWindow(BurstAttention):
    """One sliding-window layer of all prompts."""

    def __init__(self, caches: Sequence[RotatingKVCache], forward: BurstForward):
        self._window = self.max_size = caches[0].max_size
        super().__init__(caches, forward)

    def _kept_before(self, cache: RotatingKVCache) -> tuple[mx.array, mx.array] | None:
        return last_tokens(cache) if cache.offset else None


class WindowKind(LayerKind):
    """Keys and values of the last tokens."""

    library = rows = (RotatingKVCache,)
    batch = BatchWindowLayer
    burst = BurstWindow
    attention = "window"

    def unserved_reason(self, cache: RotatingKVCache) -> str | None:
        if not cache.keep:
            return None
        return f"has a window that keeps its first {cache.keep} tokens; other windows are served"

    def reach(self, cache: RotatingKVCache) -> Reach:
        return cache.max_size

    def window(self, cache: RotatingKVCache) -> int:
        return cache.max_size

    def num_lacking(self, cache: RotatingKVCache, num_tokens: int, inputs_lack: int) -> int:
        return num_tokens - cache.offset

    def newest(self, cache: RotatingKVCache) -> list[mx.array]:
        return [array[..., -1:, :] for array in last_tokens(cache)] if cache.offset else []

    def state(self, cache: RotatingKVCache) -> tuple[mx.array, ...]:
        return tuple(map(mx.contiguous, last_tokens(cache)))

    def set_state(self, cache: RotatingKVCache, state: tuple[mx.array, ...], num_tokens: int) -> None:
        cache.keys, cache.values = map(mx.contiguous, state)  # its own array objects, which it writes into
        cache.offset, cache._idx = num_tokens, state[0].shape[2]


def ring_slots(window: int) -> int:
    """Return the slots of a whole ring."""
    return window + RING_MARGIN


def ring_bytes(windows: Sequence[tuple[int, int]]) -> tuple[list[int], int, list[int]]:
    """Return what the rings of several layers take, whose windows may differ.

    Args:
        windows: Tokens of each layer's window, and bytes of one of its slots.

    Returns:
        Bytes per slot of each of the largest rings, their slots, and the bytes of each smaller ring, once it is full.
    """
    largest = max((window for window, _ in windows), default=0)
    smaller = [ring_slots(window) * num_bytes for window, num_bytes in windows if window < largest]
    return (
        [num_bytes for window, num_bytes in windows if window == largest],
        ring_slots(largest) if largest else 0,
        smaller,
    )


def slot_bytes(arrays: Sequence[Any]) -> int:
    """Return the bytes of one slot of arrays [1, heads, slots, head_dim or words]."""
    return sum(array.shape[1] * array.shape[3] * array.dtype.size for array in arrays)


def last_tokens(cache: RotatingKVCache) -> tuple[mx.array, mx.array]:
    """Return keys and values [1, heads, n, head_dim] of a row's last tokens, at most a window, the oldest first."""
    keys, values = cache.keys, cache.values
    assert keys is not None and values is not None and cache.keep == 0
    end = cache._idx  # one past the newest token's slot; what follows is older, or unused
    if end < cache.offset and end < keys.shape[2]:
        keys, values = (mx.concatenate([a[..., end:, :], a[..., :end, :]], axis=2) for a in (keys, values))
    else:
        keys, values = keys[..., :end, :], values[..., :end, :]
    num_tokens = min(cache.offset, cache.max_size, keys.shape[2])
    return keys[..., -num_tokens:, :], values[..., -num_tokens:, :]


def _padded(slots: mx.array, num_slots: int) -> mx.array:
    missing = num_slots - slots.shape[2]
    return mx.pad(slots, [(0, 0), (0, 0), (0, missing), (0, 0)]) if missing > 0 else slots
