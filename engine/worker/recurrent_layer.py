"""Recurrent layers: of one row, in a burst, and in a decode group, which can return to the state after any token."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import ArraysCache

from engine.processing.reference_config import RECURRENT, Reach
from engine.worker.batch_layer import BatchLayer
from engine.worker.burst_layer import BurstLayer
from engine.worker.delta_rule import Factors
from engine.worker.layer_kind import LayerKind


class NotRewindable(Exception):
    """A recurrent layer that writes its state directly cannot return to an earlier token."""


_Library: Any = ArraysCache  # some families write their states only into instances of it


class BatchRecurrentLayer(BatchLayer, _Library):
    """One recurrent layer of all rows, with slots such as (convolution window, state) [B, ...].

    While `recording`, it keeps what `commit` needs to return to the state after any token of the forward: all states
    or, with `is_factored` and in Mamba-2 layers, the factors of their change; the state itself is then updated by
    `commit`.
    """

    lengths = left_padding = None  # no row is padded
    start_speculation = trim = None  # `recording` and `commit` stand for the library's transactions
    is_factored = False  # for all layers of the delta rule in the process: see patches/gated_delta_rows.py

    def __init__(self, slots: Sequence[mx.array]):
        self.slots = list(slots)
        self.recording = False
        self._windows: dict[int, tuple[mx.array, int]] = {}
        self._states: dict[int, mx.array] = {}
        self._factors: dict[int, Factors] = {}

    @classmethod
    def of(cls, cache: ArraysCache, cursor: Any) -> "BatchRecurrentLayer":
        """Return a layer with one row, whose cache this is."""
        slots: list[Any] = cache.cache
        assert all(slot is not None for slot in slots)
        return cls(slots)

    def __getitem__(self, index: int) -> mx.array:
        return self.slots[index]

    def __setitem__(self, index: int, value: mx.array) -> None:
        """Replace a slot. Raises NotRewindable while recording: earlier states would be lost."""
        if self.recording:
            raise NotRewindable
        self.slots[index] = value

    def make_mask(self, num_new: int) -> None:
        """Return no mask: all new tokens are a row's own."""

    def advance(self, num_new: int) -> None:
        """Do nothing: no row is padded."""

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
            windows = next(recorded)
            if self.is_factored:
                self._windows = {0: (windows, self.slots[0].shape[1])}
                self._factors = {1: Factors(next(recorded), next(recorded), next(recorded))}
            else:
                self.record(windows, next(recorded))

    def update_window(self, index: int, source: mx.array, width: int, *, lengths: None = None) -> None:
        """Store the windows. source [B, width + L, ...]: the window after t tokens is source[:, t : t + width]."""
        self.slots[index] = mx.contiguous(source[:, source.shape[1] - width :])
        if self.recording:
            self._windows[index] = (source, width)

    def update_recurrent(self, index: int, length: int, update: Callable[..., Any]) -> tuple[mx.array, mx.array]:
        """Update the state of a forward of `length` tokens.

        Args:
            index: Slot of the state.
            length: New tokens.
            update: update(state, n) -> output, last state, and with n given the states [B, n, ...] after the first n
                tokens.
        """
        keep_all = self.recording and length > 1
        output, state, *before = update(self.slots[index], length - 1 if keep_all else None)
        self.slots[index] = state
        if keep_all:
            self._states[index] = mx.concatenate([before[0], state[:, None]], axis=1)
        return output, state

    def record(self, windows: mx.array, states: mx.array) -> None:
        """Keep what `commit` chooses from, for slots (convolution window, state).

        Args:
            windows: [B, width + L, ...]: the window after t tokens is windows[:, t : t + width].
            states: [B, L, ...] after each token.
        """
        self._windows = {0: (windows, self.slots[0].shape[1])}
        self._states = {1: states}

    def record_factors(self, index: int, factors: Factors) -> None:
        self._factors[index] = factors

    def commit(self, num_kept: mx.array) -> None:
        """Return to the state after `num_kept` int32 [B] >= 1 tokens of the recorded forward."""
        for index, (source, width) in self._windows.items():
            at = num_kept[:, None] + mx.arange(width)
            at = at.reshape(*at.shape, *[1] * (source.ndim - 2))
            self.slots[index] = mx.take_along_axis(source, at, axis=1)
        for index, states in self._states.items():
            batch, length = states.shape[:2]
            at = mx.arange(batch) * length + num_kept - 1
            self.slots[index] = mx.take(states.reshape(batch * length, *states.shape[2:]), at, axis=0)
        for index, factors in self._factors.items():
            self.slots[index] = factors.state_after(self.slots[index], num_kept)
        self._windows, self._states, self._factors, self.recording = {}, {}, {}, False

    def reserve(self, num_slots: int) -> bool:
        """Return False: a state has no slots."""
        return False

    def with_arrays(self, arrays: Iterator[mx.array], cursor: Any) -> "BatchRecurrentLayer":
        return BatchRecurrentLayer([next(arrays) for _ in self.slots])

    def row(self, index: int, num_tokens: int) -> ArraysCache:
        """Return one row's cache, as lazy slices."""
        cache = ArraysCache(len(self.slots))
        cache.cache = [mx.contiguous(slot[index : index + 1]) for slot in self.slots]
        return cache

    def append(self, rows: Sequence[Any]) -> "BatchRecurrentLayer":
        others = [row.cache for row in rows]
        return BatchRecurrentLayer([stacked(slots) for slots in zip(self.slots, *others, strict=True)])

    def select(self, rows: mx.array, num_slots: int) -> "BatchRecurrentLayer":
        return BatchRecurrentLayer([slot[rows] for slot in self.slots])


class BurstStates(BurstLayer, _Library):
    """One recurrent layer of all prompts, with slots (convolution window, state), as the library's ArraysCache."""

    left_padding = None

    @property
    def lengths(self) -> mx.array | None:
        return self._forward.own

    @property
    def rows(self) -> list[tuple[ArraysCache, int]]:
        """The prompts' caches, with the number of each prompt's own tokens."""
        return list(zip(self._caches, self._forward.lengths, strict=True))

    def __getitem__(self, index: int) -> mx.array | None:
        """Return a slot of all prompts [B, ...]; None if no prompt has begun."""
        states = [cache.cache[index] for cache in self._caches]
        like = next((state for state in states if state is not None), None)
        if like is None:
            return None
        return stacked([mx.zeros_like(like) if state is None else state for state in states])

    def __setitem__(self, index: int, value: mx.array) -> None:
        """Store a slot of all prompts; the family has selected the rows' own values."""
        for i, cache in enumerate(self._caches):
            cache.cache[index] = mx.contiguous(value[i : i + 1])
        mx.async_eval([cache.cache[index] for cache in self._caches])  # free the batched state before the next layer

    def make_mask(self, num_new: int) -> mx.array | None:
        """Return which tokens are a prompt's own, bool [B, num_new]; None if all are."""
        return None if self.lengths is None else mx.arange(num_new) < self.lengths[:, None]

    def advance(self, num_new: int) -> None:
        """Do nothing: the layer serves one forward."""

    def update_window(self, index: int, source: mx.array, width: int, *, lengths: mx.array | None = None) -> None:
        """Store the windows. source [B, width + L, channels]: the window after n tokens is source[:, n : n + width]."""
        for i, (cache, length) in enumerate(self.rows):
            cache.cache[index] = mx.contiguous(source[i : i + 1, length : length + width])

    def update_recurrent(self, index: int, length: int, update: Callable[..., Any]) -> tuple[mx.array, mx.array]:
        output, state = update(self[index], None)[:2]
        self[index] = state
        return output, state


class RecurrentKind(LayerKind):
    """A state for all tokens."""

    library = rows = (ArraysCache,)
    batch = BatchRecurrentLayer
    burst = BurstStates
    is_recurrent = True

    def reach(self, cache: ArraysCache) -> Reach:
        return RECURRENT

    def state(self, cache: Any) -> tuple[mx.array, ...]:
        return tuple(cache.cache)

    def set_state(self, cache: ArraysCache, state: tuple[mx.array, ...], num_tokens: int) -> None:
        cache.cache = list(state)


def stacked(slots: Sequence[mx.array]) -> mx.array:
    """Concatenate slots [B, n, ...] of several rows; windows that are not full get zeros before their first token."""
    longest = max(slot.shape[1] for slot in slots)
    padding = [(longest - slot.shape[1], 0) for slot in slots]
    return mx.concatenate(
        [
            mx.pad(slot, [(0, 0), before, *[(0, 0)] * (slot.ndim - 2)]) if before[0] else slot
            for slot, before in zip(slots, padding, strict=True)
        ]
    )
