"""Kinds of one row's caches, and how their state is read and set: keys and values, a window of them, or a state.

Snapshots, prompts and decode groups ask the kind. A further one is a class here, a layer of decode groups (`LAYERS` in
kv_cache.py), a layer of shared forwards (`LAYERS` in burst.py), and the library's classes that it serves (`SERVED` in
layer_caches.py).
"""

from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import ArraysCache, KVCache, RotatingKVCache

from engine.worker.batch_layer import BatchLayer
from engine.worker.kv_cache import rounded
from engine.worker.pool_layer import PooledCache, pool_slots
from engine.worker.quantized_kv import format_of
from engine.worker.window_layer import last_tokens


class RowKind:
    """Caches that have one complete state, which a snapshot copies."""

    appends = False
    """Whether keys and values lie in slots that never change, so that snapshots hold them in segments."""
    is_recurrent = False
    """Whether the state is one for all tokens."""

    def window(self, cache: Any) -> int:
        """Return how many tokens of the row a state has, at most; 0 if it is one for all tokens."""
        return 0

    def num_lacking(self, cache: Any, num_tokens: int, inputs_lack: int) -> int:
        """Return how many of a row's `num_tokens` tokens the cache lacks. A head's has read one pair less.

        Args:
            cache: The cache.
            num_tokens: Tokens of the row.
            inputs_lack: How many the cache before it lacks, from which a pool is made.
        """
        return 0

    def newest(self, cache: Any) -> list[mx.array]:
        """Return the arrays in which NaN or inf would show, wherever in the row it came from."""
        return list(self.state(cache))

    def state(self, cache: Any) -> tuple[mx.array, ...]:
        """Return the complete state, which may share the cache's arrays."""
        return tuple(cache.cache)

    def set_state(self, cache: Any, state: tuple[mx.array, ...], num_tokens: int) -> None:
        """Set the state of an empty cache. num_tokens: tokens that the state includes."""
        cache.cache = list(state)


class RecurrentKind(RowKind):
    """A state for all tokens."""

    is_recurrent = True


class WindowKind(RowKind):
    """Keys and values of the last tokens."""

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


class AppendingKind(RowKind):
    """Keys and values of all tokens, as computed or packed."""

    appends = True

    def tokens_per_slot(self, cache: Any) -> int:
        """Return how many tokens of the row share a slot."""
        return 1

    def num_slots(self, cache: Any, num_tokens: int) -> int:
        """Return the slots to allocate for tokens."""
        return rounded(num_tokens)

    def num_lacking(self, cache: KVCache, num_tokens: int, inputs_lack: int) -> int:
        return num_tokens - cache.offset

    def newest(self, cache: KVCache) -> list[mx.array]:
        if not cache.offset:
            return []
        slots: list[Any] = [cache.keys, cache.values]
        newest, kv_format = [array[..., cache.offset - 1 : cache.offset, :] for array in slots], format_of(cache)
        return newest if kv_format is None else list(kv_format.unpack(*newest))


class PoolKind(AppendingKind):
    """Entries that stand for several tokens each."""

    def tokens_per_slot(self, cache: PooledCache) -> int:
        return cache.ratio

    def num_slots(self, cache: PooledCache, num_tokens: int) -> int:
        return pool_slots(num_tokens, cache.ratio)

    def num_lacking(self, cache: KVCache, num_tokens: int, inputs_lack: int) -> int:
        return inputs_lack


KINDS: dict[type, RowKind] = {
    ArraysCache: RecurrentKind(),
    RotatingKVCache: WindowKind(),
    PooledCache: PoolKind(),
    KVCache: AppendingKind(),
}
"""Class of a row's cache -> its kind, which is also that of subclasses without one of their own."""


def kind_of(cache: Any) -> Any:
    """Return the kind of a row's cache. Raises KeyError for one of no kind."""
    return KINDS[next((one for one in type(cache).__mro__ if one in KINDS), type(cache))]


def is_recurrent(cache: Any) -> bool:
    """Return whether a row's cache has a state for all tokens."""
    return kind_of(cache).is_recurrent


def appends(layer: Any) -> bool:
    """Return whether a row's cache, or a layer of a decode group, keeps keys and values in slots that never change."""
    return layer.appends if isinstance(layer, BatchLayer) else kind_of(layer).appends
