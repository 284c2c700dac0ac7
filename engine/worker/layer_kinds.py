"""KINDS: every kind of layer, by the exact classes of its caches, and what else is told by the class of a cache."""

from typing import Any

from mlx_vlm.models.cache import CacheList

from engine.worker.batch_layer import BatchLayer
from engine.worker.burst_layer import BurstLayer
from engine.worker.chunk_layer import ChunkKind
from engine.worker.indexed_cache import IndexedKind
from engine.worker.kv_layer import KVKind, QuantizedKVKind, ReplacedKVKind
from engine.worker.layer_kind import LayerKind
from engine.worker.pool_layer import PoolInputsKind, PoolKind
from engine.worker.recurrent_layer import RecurrentKind
from engine.worker.window_layer import WindowKind


def by_class(*kinds: LayerKind) -> dict[type, LayerKind]:
    """Return the kinds by each class of their caches: the library's empty ones, and those of rows."""
    return {one: kind for kind in kinds for one in (*kind.library, *kind.rows)}


KINDS: dict[type, LayerKind] = by_class(
    KVKind(),
    WindowKind(),
    RecurrentKind(),
    ChunkKind(),
    ReplacedKVKind(),
    IndexedKind(),
    PoolKind(),
    PoolInputsKind(),
    QuantizedKVKind(),
)
"""Class of an empty cache of the library, or of a row's cache -> its kind."""


def is_served(cache: Any) -> bool:
    """Return whether an empty cache of the library has a kind."""
    return type(cache) in KINDS


def kind_of(cache: Any) -> LayerKind:
    """Return the kind of a row's cache, or of an empty one of the library. Raises KeyError for one of no kind."""
    return KINDS[type(cache)]


def is_recurrent(cache: Any) -> bool:
    """Return whether a row's cache has a state for all tokens."""
    return kind_of(cache).is_recurrent


def appends(layer: Any) -> bool:
    """Return whether a row's cache, or a layer of a decode group, keeps keys and values in slots that never change."""
    return layer.appends if in_group(layer) else kind_of(layer).batch.appends


def in_group(cache: Any) -> bool:
    """Return whether a layer of the model is given the layer of a decode group."""
    return isinstance(cache, BatchLayer)


def in_burst(cache: Any) -> bool:
    """Return whether a layer of the model is given the layer of a burst."""
    return isinstance(cache, BurstLayer)


def keeps_all(cache: Any) -> bool:
    """Return whether this is the cache of one row with the keys and values of all tokens, in a slot for each."""
    kind = KINDS.get(type(cache))
    if kind is None or type(cache) not in kind.rows or isinstance(kind, PoolKind):  # a slot may be of one token there
        return False
    return kind.batch.appends


def is_replaced(cache: Any) -> bool:
    """Return whether this is a cache of the library in whose place rows have others."""
    kind = KINDS.get(type(cache))
    return kind is not None and type(cache) not in kind.rows


def is_combined(layer: Any) -> bool:
    """Return whether a layer of the library takes several caches."""
    return isinstance(layer, CacheList)
