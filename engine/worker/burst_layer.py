"""Layers of a burst, a forward over the chunks of several prompts: each appends to its own cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx

from engine.worker.cursor import Cursor
from engine.worker.quantized_kv import KVFormat


@dataclass(frozen=True)
class BurstForward:
    """The rows of a shared forward."""

    lengths: Sequence[int]
    """How many tokens of the forward are each prompt's own, at least 0."""
    as_offset: bool
    """See Cursor."""

    @cached_property
    def own(self) -> mx.array | None:
        """`lengths` as int32 [B]; None if no token is padding."""
        return mx.array(list(self.lengths), mx.int32) if min(self.lengths) < max(self.lengths) else None


class BurstLayer:
    """One layer of all prompts.

    Args:
        caches: The prompts' caches.
        forward: The forward.
    """

    def __init__(self, caches: Sequence[Any], forward: BurstForward):
        self._caches = caches
        self._forward = forward


class BurstAttention(BurstLayer):
    """One attention layer of all prompts: each appends to its own cache, and attention sees them padded.

    Args:
        caches: The prompts' caches.
        forward: The forward.
        kv_format: How keys and values are packed; None if they are stored as computed.
    """

    _window = 0  # tokens that a token sees, itself included; 0 for all

    def __init__(self, caches: Sequence[Any], forward: BurstForward, kv_format: KVFormat | None = None):
        super().__init__(caches, forward)
        self._lengths = forward.lengths
        self._as_offset = forward.as_offset
        self._starts = [cache.offset for cache in caches]
        self._before = [self._kept_before(cache) for cache in caches]
        self._num_before = [
            start if before is None else before[0].shape[2]
            for start, before in zip(self._starts, self._before, strict=True)
        ]
        self._format = kv_format

    def _kept_before(self, cache: Any) -> tuple[mx.array, mx.array] | None:
        """Return keys and values before the forward if writing replaces them; None if they stay in the cache."""
        return None

    @property
    def offset(self) -> int | mx.array:
        is_uniform = len(set(self._starts)) == 1
        return mx.array(self._starts, mx.int32) if self._as_offset and not is_uniform else max(self._starts)

    @property
    def starts(self) -> mx.array:
        """int32 [B], the tokens of each prompt before the forward."""
        return mx.array(self._starts, mx.int32)

    @property
    def keys(self) -> mx.array:
        """The first prompt's, to which some families add a dependency so that they are evaluated together."""
        return self._caches[0].keys

    @keys.setter
    def keys(self, keys: mx.array) -> None:
        self._caches[0].keys = keys

    @property
    def values(self) -> mx.array:
        return self._caches[0].values

    def make_mask(
        self, num_new: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        window = min((size for size in (window_size, self._window) if size), default=None)
        first, extent = max(self._num_before), max(self._num_before) + num_new
        uniform_start = first if len(set(self._num_before)) == 1 and not return_array else None
        if uniform_start is not None and window is not None and extent <= window:
            window = None
        return Cursor(mx.array(self._num_before, mx.int32), extent, uniform_start).mask(num_new, window)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append keys and values [B, heads, L, head_dim].

        Returns:
            Both with the preceding ones: [B, heads, extent, head_dim].
        """
        for i, (cache, length) in enumerate(zip(self._caches, self._lengths, strict=True)):
            if length:
                new = keys[i : i + 1, :, :length], values[i : i + 1, :, :length]
                cache.update_and_fetch(*map(mx.contiguous, new))
        if self._format is not None:
            keys, values = self._format.pack(keys, values)
        if any(self._num_before):  # the slots before are read after the write, which is in place then
            before = [
                (cache.keys, cache.values) if window is None else window
                for cache, window in zip(self._caches, self._before, strict=True)
            ]
            keys = self._behind([slots[0] for slots in before], keys)
            values = self._behind([slots[1] for slots in before], values)
        return (keys, values) if self._format is None else self._format.unpack(keys, values)

    def _behind(self, before: Sequence[Any], new: mx.array) -> mx.array:
        """Return each row's preceding slots followed by its new ones, padded at the end."""
        rows = []
        for i, (slots, num_before) in enumerate(zip(before, self._num_before, strict=True)):
            parts = [new[i : i + 1]]
            if num_before:
                parts.insert(0, slots[..., :num_before, :])
            if missing := max(self._num_before) - num_before:
                parts.append(mx.zeros((1, new.shape[1], missing, new.shape[3]), new.dtype))
            rows.append(mx.concatenate(parts, axis=2) if len(parts) > 1 else parts[0])
        return mx.concatenate(rows)
