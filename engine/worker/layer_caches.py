"""Which caches a row has for the layers of a model, and how the library's modules take them.

A model tells its state by the classes of its empty caches. Most are those of rows; the others are replaced by caches
of the kinds that rows can share (`kv_cache.BatchCache`).
"""

from collections.abc import Callable, Iterator
from typing import Any

from mlx_vlm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, PoolingCache, RotatingKVCache
from mlx_vlm.models.hy_v4.cache import HyV4KVCache
from mlx_vlm.models.minimax_m3_vl.language import MiniMaxM3KVCache
from mlx_vlm.models.qwen4_exp.language import QSAKVCache

from engine.worker.chunk_layer import ChunkedCache
from engine.worker.indexed_cache import IndexedCache
from engine.worker.pool_layer import PoolingLayer, pool_caches

SERVED: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    KVCache: lambda layer: (layer,),
    RotatingKVCache: lambda layer: (layer,),
    ArraysCache: lambda layer: (layer,),
    ChunkedKVCache: lambda layer: (ChunkedCache(layer.chunk_size),),
    HyV4KVCache: lambda layer: (KVCache(),),  # it differs in how it grows
    MiniMaxM3KVCache: lambda layer: (KVCache(), KVCache()),
    QSAKVCache: lambda layer: (KVCache(), KVCache()),
    PoolingCache: lambda layer: pool_caches(layer.ratio),
}
"""The library's class of a layer's empty cache -> the row's caches. Exact types: subclasses store their state
differently."""

INDEXED: tuple[type, ...] = (MiniMaxM3KVCache, QSAKVCache)
"""Classes that a row keeps as two caches, see IndexedCache."""


def single_caches(layer: Any) -> tuple[Any, ...]:
    """Return the caches of one layer of the library."""
    return tuple(layer.caches) if isinstance(layer, CacheList) else (layer,)


def row_caches(layers: list[Any]) -> list[Any]:
    """Return a row's caches in the place of the library's empty ones, one after the other."""
    return [own for layer in layers for one in single_caches(layer) for own in SERVED[type(one)](one)]


def as_taken(layers: list[Any], caches: Iterator[Any]) -> list[Any]:
    """Return a row's caches, or the layers of a decode group, as the model's layers take them.

    Args:
        layers: The library's caches, for their classes.
        caches: What takes the places of `row_caches`.
    """
    return [_as_taken(layer, caches) for layer in layers]


def _as_taken(layer: Any, caches: Iterator[Any]) -> Any:
    if isinstance(layer, CacheList):
        return CacheList(*as_taken(list(layer.caches), caches))
    if type(layer) in INDEXED:
        return IndexedCache(next(caches), next(caches))
    if type(layer) is PoolingCache:
        return PoolingLayer(next(caches), next(caches), layer.ratio)
    return next(caches)
