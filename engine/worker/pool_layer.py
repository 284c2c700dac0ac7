"""Attention layers that pool the context: every `ratio` tokens become one entry, which later tokens see.

They are keys and values, or keys of an index by which a query chooses among entries (DeepSeek V4) or tokens
(GLM-5-Next). A pool has two caches. `PoolInputs` is a window over the last tokens' values and gates, of which the next
entries are made; where windows overlap, an entry reads the window before it as well. `PooledCache` has one slot per
entry.

In a decode group every forward computes the entry of each window that its tokens may complete. The entry of a window
that is not complete is seen by no token and computed again, so rejected drafts leave nothing to be undone.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import KVCache, PoolingCache, RotatingKVCache

from engine.worker.batch_layer import BatchLayer
from engine.worker.burst_layer import BurstLayer
from engine.worker.kv_layer import KVKind
from engine.worker.window_layer import BatchWindowLayer, BurstWindow, WindowKind, ring_slots

OVERLAPPING_RATIO = 4
"""Tokens per entry of the pools whose windows overlap (mlx_vlm 0.7.10, models/deepseek_v4/language.py)."""

Windows = tuple[mx.array, mx.array, int | mx.array, Any]
"""Values and gates [B, n * ratio, dim] of n windows, the first one's number (int or int32 [B]), and how many windows
are complete: an int for one row, one per prompt in a burst, None in a decode group."""


def pool_caches(ratio: int) -> tuple["PoolInputs", "PooledCache"]:
    """Return a row's empty caches of a pool."""
    num_windows = 2 if ratio == OVERLAPPING_RATIO else 1
    return PoolInputs(max_size=num_windows * ratio), PooledCache(ratio)


class PoolInputs(RotatingKVCache):
    """One row's last values and gates, [1, 1, n <= max_size, dim], the oldest first."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append values and gates [1, 1, L, dim]; return them behind those that were there."""
        if self.keys is not None:
            keys, values = (
                mx.concatenate([old, new], axis=2) for old, new in ((self.keys, keys), (self.values, values))
            )
        self.offset += keys.shape[2] - (0 if self.keys is None else self.keys.shape[2])
        self.keys, self.values = (mx.contiguous(one[..., -self.max_size :, :]) for one in (keys, values))
        self._idx = self.keys.shape[2]
        return keys, values

    def update_windows(self, kv: mx.array, gate: mx.array, ratio: int, num_before: int) -> Windows:
        """Append values and gates [1, L, dim]; return the windows that are complete, behind `num_before` earlier ones.

        Windows before the first token are zeros.
        """
        first = self.offset // ratio
        num_complete = (self.offset + kv.shape[1]) // ratio - first
        kv, gate = (one[:, 0] for one in self.update_and_fetch(kv[:, None], gate[:, None]))
        start = (first - num_before) * ratio - (self.offset - kv.shape[1])
        end = start + (num_before + num_complete) * ratio
        padding = [(0, 0), (max(-start, 0), 0), (0, 0)]
        kv, gate = (mx.pad(one[:, max(start, 0) : end], padding) for one in (kv, gate))
        return kv, gate, first, num_complete


class BatchPoolInputs(BatchWindowLayer):
    """The last values and gates of all rows, as a ring."""

    row_class = PoolInputs

    def update_windows(self, kv: mx.array, gate: mx.array, ratio: int, num_before: int) -> Windows:
        """Write values and gates [B, L, dim] at the cursor; return all windows that may be complete."""
        length = kv.shape[1]
        fetched = self.update_and_fetch(kv[:, None], gate[:, None])
        first, positions = window_positions(self.cursor.start, length, ratio, num_before)
        kv, gate = at_slots(fetched, positions % ring_slots(self.window))
        return kv, gate, first, None


class PooledCache(KVCache):
    """One row's entries [1, 1, slots, dim] as keys, with values of no dimensions.

    Args:
        ratio: Tokens per entry.
    """

    def __init__(self, ratio: int):
        super().__init__()
        self.ratio = ratio
        self.step = pool_slots(1, ratio)

    def write(self, entries: mx.array, num_complete: int) -> mx.array:
        """Append the first `num_complete` of the entries [1, n, dim]; return all."""
        entries = entries[:, None, :num_complete]
        return self.update_and_fetch(entries, mx.zeros((*entries.shape[:3], 0), entries.dtype))[0][:, 0]


class BatchPoolLayer(BatchLayer):
    """The entries of all rows.

    Args:
        keys: [B, 1, slots, dim].
        values: [B, 1, slots, 0].
        ratio: Tokens per entry.
        cursor: Where the rows write, in tokens; see Cursor.
    """

    appends = True

    def __init__(self, keys: mx.array, values: mx.array, ratio: int, cursor: Any):
        self.keys, self.values = keys, values
        self.ratio = ratio
        self.cursor = cursor

    @classmethod
    def of(cls, cache: PooledCache, cursor: Any) -> "BatchPoolLayer":
        """Return a layer with one row, whose cache this is."""
        keys, values = cache.keys, cache.values
        assert keys is not None and values is not None
        return cls(keys, values, cache.ratio, cursor)

    @property
    def num_slots(self) -> int:
        return self.keys.shape[2] * self.ratio

    @property
    def state(self) -> list[mx.array]:
        return [self.keys, self.values]

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes

    def load(self, arrays: Iterator[mx.array], recorded: Iterator[mx.array]) -> None:
        self.keys, self.values = next(arrays), next(arrays)

    def write(self, entries: mx.array, num_complete: None) -> mx.array:
        """Write entries [B, n, dim] from each row's window at the cursor on; return those of the whole extent."""
        extent = self.cursor.extent
        self.reserve(extent)
        index = (self.cursor.start // self.ratio)[:, None] + mx.arange(entries.shape[1])
        entries = entries[:, None]
        index = mx.broadcast_to(index[:, None, :, None], entries.shape)
        self.keys = mx.put_along_axis(self.keys, index, entries, axis=2)
        return self.keys[:, 0, : extent // self.ratio]

    def reserve(self, num_slots: int) -> bool:
        """Allocate slots for the entries of `num_slots` tokens per row; return whether there are more now."""
        if (wanted := pool_slots(num_slots, self.ratio)) <= self.keys.shape[2]:
            return False
        self.keys, self.values = (_padded(array, wanted) for array in self.state)
        return True

    def row(self, index: int, num_tokens: int) -> PooledCache:
        """Return one row's cache with the entries of `num_tokens` tokens, as lazy slices."""
        cache = PooledCache(self.ratio)
        cache.keys, cache.values = self.keys[index : index + 1], self.values[index : index + 1]
        cache.offset = num_tokens // self.ratio
        return cache

    def append(self, rows: Sequence[Any]) -> "BatchPoolLayer":
        layers = [self.state, *(row.state[:2] for row in rows)]
        num_slots = max(keys.shape[2] for keys, _ in layers)
        return self._with(
            *(mx.concatenate([_padded(array, num_slots) for array in parts]) for parts in zip(*layers, strict=True))
        )

    def select(self, rows: mx.array, num_slots: int) -> "BatchPoolLayer":
        slots = min(pool_slots(num_slots, self.ratio), self.keys.shape[2])
        return self._with(self.keys[rows, :, :slots], self.values[rows, :, :slots])

    def with_arrays(self, arrays: Iterator[mx.array], cursor: Any) -> "BatchPoolLayer":
        return BatchPoolLayer(next(arrays), next(arrays), self.ratio, cursor)

    def _with(self, keys: mx.array, values: mx.array) -> "BatchPoolLayer":
        return BatchPoolLayer(keys, values, self.ratio, self.cursor)


class PoolingLayer:
    """Both caches, as the library's module takes its PoolingCache. It keeps no state and serves one forward.

    Args:
        inputs: PoolInputs, or what takes their place in a decode group or a burst.
        pooled: PooledCache, likewise.
        ratio: Tokens per entry.
    """

    def __init__(self, inputs: Any, pooled: Any, ratio: int):
        self._inputs = inputs
        self._pooled = pooled
        self._ratio = ratio
        self._num_complete: Any = None
        self._num_seen = 0
        self.before: tuple[mx.array, mx.array] | None = None
        """Values and gates [B, ratio, dim] of the window before those of the last call of `accumulate_windows`, if
        windows overlap; the gates of a window before the first token are -inf."""

    def accumulate_windows(self, kv: mx.array, gate: mx.array, offset: Any) -> tuple[mx.array, mx.array, Any]:
        """Append values and gates [B, L, dim]; return those of n windows, [B, n * ratio, dim], and their position.

        In a decode group some of the windows may not be complete.
        """
        num_before = int(self._ratio == OVERLAPPING_RATIO)
        kv, gate, first, self._num_complete = self._inputs.update_windows(kv, gate, self._ratio, num_before)
        if num_before:
            (kv_before, kv), (gate_before, gate) = (mx.split(one, [self._ratio], axis=1) for one in (kv, gate))
            is_first = mx.array(first).reshape(-1, 1, 1) == 0
            self.before = kv_before, mx.where(is_first, mx.array(-mx.inf, gate.dtype), gate_before)
        return kv, gate, first * self._ratio

    def update_and_fetch(self, entries: mx.array) -> mx.array:
        """Store the entries [B, n, dim] of these windows; return the entries of all windows, [B, slots, dim]."""
        entries = self._pooled.write(entries, self._num_complete)
        self._num_seen = entries.shape[1]
        return entries

    def make_mask(self, num_new: int, offset: int | mx.array) -> mx.array:
        """Return which entries each new token sees: bool [B or 1, num_new, slots].

        Args:
            num_new: New tokens, which have been written.
            offset: Each row's tokens before them, an int or int32 [B].
        """
        ends = mx.array(offset).reshape(-1, 1, 1) + mx.arange(1, num_new + 1)[:, None]
        return mx.arange(self._num_seen) < ends // self._ratio


class BurstPoolInputs(BurstWindow):
    """The values and gates of all prompts from which a pool makes its next entries."""

    def update_windows(self, kv: mx.array, gate: mx.array, ratio: int, num_before: int) -> Windows:
        """Append values and gates [B, L, dim]; return all windows that may be complete."""
        fetched = self.update_and_fetch(kv[:, None], gate[:, None])
        first, positions = window_positions(self.starts, kv.shape[1], ratio, num_before)
        slots = positions - (self.starts - mx.array(self._num_before, mx.int32))[:, None]
        pairs = zip(self._starts, self._lengths, strict=True)
        kv, gate = at_slots(fetched, slots)
        return kv, gate, first, [(start + new) // ratio - start // ratio for start, new in pairs]


class BurstPool(BurstLayer):
    """The entries of all prompts' pools: each appends its own, and attention sees them padded."""

    def write(self, entries: mx.array, num_complete: Sequence[int]) -> mx.array:
        """Append each prompt's first entries of [B, n, dim]; return all, [B, slots, dim]."""
        rows = [
            cache.write(mx.contiguous(entries[i : i + 1]), count)
            for i, (cache, count) in enumerate(zip(self._caches, num_complete, strict=True))
        ]
        longest = max(row.shape[1] for row in rows)
        return mx.concatenate([mx.pad(row, [(0, 0), (0, longest - row.shape[1]), (0, 0)]) for row in rows])


class PoolInputsKind(WindowKind):
    """The tokens of which a pool makes its next entries."""

    library = ()
    rows = (PoolInputs,)
    batch = BatchPoolInputs
    burst = BurstPoolInputs


class PoolKind(KVKind):
    """Entries that stand for several tokens each, behind the tokens of which the next are made."""

    library = (PoolingCache,)
    rows = (PooledCache,)
    batch = BatchPoolLayer
    burst = BurstPool

    def row_caches(self, cache: PoolingCache) -> tuple[PoolInputs, PooledCache]:
        return pool_caches(cache.ratio)

    def as_taken(self, cache: PoolingCache, caches: Iterator[Any]) -> PoolingLayer:
        return PoolingLayer(next(caches), next(caches), cache.ratio)

    def tokens_per_slot(self, cache: PoolingCache | PooledCache) -> int:
        return cache.ratio

    def num_slots(self, cache: Any, num_tokens: int) -> int:
        return pool_slots(num_tokens, cache.ratio)

    def num_lacking(self, cache: Any, num_tokens: int, inputs_lack: int) -> int:
        return inputs_lack


def window_positions(starts: mx.array, num_new: int, ratio: int, num_before: int) -> tuple[mx.array, mx.array]:
    """Return the first window that new tokens may complete, int32 [B], and the positions of its and the next tokens.

    Args:
        starts: int32 [B], each row's tokens before the new ones.
        num_new: New tokens per row, of which some may be padding.
        ratio: Tokens of a window.
        num_before: Windows before the first to return as well.

    Returns:
        The window's number, and positions int32 [B, (num_before + n) * ratio], where n windows may be completed.
    """
    first, num_windows = starts // ratio, -(-num_new // ratio)
    return first, ((first - num_before) * ratio)[:, None] + mx.arange((num_before + num_windows) * ratio)


def at_slots(arrays: Sequence[mx.array], slots: mx.array) -> list[mx.array]:
    """Return the values at slots int32 [B, n] of arrays [B, 1, num_slots, dim], as [B, n, dim].

    Slots outside of the arrays, of tokens that are not there, give any of the values.
    """
    slots = mx.clip(slots, 0, arrays[0].shape[2] - 1)[..., None]
    return [mx.take_along_axis(a[:, 0], mx.broadcast_to(slots, (*slots.shape[:2], a.shape[3])), axis=1) for a in arrays]


def pool_slots(num_tokens: int, ratio: int) -> int:
    """Return the slots that are allocated for the entries of tokens, as many as for full steps of keys and values."""
    return -(-(-(-num_tokens // KVCache.step) * KVCache.step) // ratio)


def _padded(slots: mx.array, num_slots: int) -> mx.array:
    missing = num_slots - slots.shape[2]
    return mx.pad(slots, [(0, 0), (0, 0), (0, missing), (0, 0)]) if missing > 0 else slots
