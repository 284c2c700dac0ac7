"""Which caches a row has for the layers of a model, and how the library's modules take them.

A model tells its state by the classes of its empty caches. Most are those of rows; the others are replaced by caches
of the kinds that rows can share (`kv_cache.BatchCache`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_vlm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, PoolingCache, RotatingKVCache
from mlx_vlm.models.hy_v4.cache import HyV4KVCache
from mlx_vlm.models.minimax_m3_vl.language import MiniMaxM3KVCache
from mlx_vlm.models.qwen4_exp.language import QSAKVCache

from engine.processing.reference_config import RECURRENT, Reach, pooled_reach
from engine.worker.chunk_layer import ChunkedCache
from engine.worker.indexed_cache import IndexedCache
from engine.worker.pool_layer import PoolingLayer, pool_caches


@dataclass(frozen=True)
class LibraryCache:
    """One of the library's classes of empty caches."""

    of_row: Callable[[Any], tuple[Any, ...]] = lambda cache: (cache,)
    """Returns a row's caches in its place."""
    reach: Callable[[Any], Reach] = lambda cache: None
    """Returns the tokens that the layer attends to."""
    is_indexed: bool = False
    """Whether a row keeps it as two caches, see IndexedCache."""


SERVED: dict[type, LibraryCache] = {
    KVCache: LibraryCache(),
    RotatingKVCache: LibraryCache(reach=lambda cache: cache.max_size),
    ArraysCache: LibraryCache(reach=lambda cache: RECURRENT),
    ChunkedKVCache: LibraryCache(lambda cache: (ChunkedCache(cache.chunk_size),), lambda cache: cache.chunk_size),
    HyV4KVCache: LibraryCache(lambda cache: (KVCache(),)),  # it differs in how it grows
    MiniMaxM3KVCache: LibraryCache(lambda cache: (KVCache(), KVCache()), is_indexed=True),
    QSAKVCache: LibraryCache(lambda cache: (KVCache(), KVCache()), is_indexed=True),
    PoolingCache: LibraryCache(lambda cache: pool_caches(cache.ratio)),
}
"""The library's classes whose caches are served. Exact types: subclasses store their state differently."""


def is_combined(layer: Any) -> bool:
    """Return whether a layer of the library takes several caches."""
    return isinstance(layer, CacheList)


def single_caches(layer: Any) -> tuple[Any, ...]:
    """Return the caches of one layer of the library."""
    return tuple(layer.caches) if is_combined(layer) else (layer,)


def unserved_reason(layers: Sequence[Any]) -> str | None:
    """Return why a model with these empty caches of the library cannot be served, None if it can."""
    for i, layer in enumerate(layers):
        for cache in single_caches(layer):
            if type(cache) not in SERVED:
                served = ", ".join(kind.__name__ for kind in SERVED)
                kind = type(cache).__name__
                return (
                    f"layer {i} keeps its state in a {kind}, which rows cannot share; models with {served} are served"
                )
            if type(cache) is RotatingKVCache and cache.keep:
                return f"layer {i} has a window that keeps its first {cache.keep} tokens; other windows are served"
    return None


def reach_of(layer: Any) -> Reach:
    """Return the tokens that a layer of the library attends to, by its empty cache; see `unserved_reason` first."""
    parts = single_caches(layer)
    reaches = [SERVED[type(part)].reach(part) for part in parts]
    if (window := next((reach for reach in reaches if isinstance(reach, int)), None)) is not None:
        ratio = next((part.ratio for part in parts if type(part) is PoolingCache), None)
        return window if ratio is None else pooled_reach(window, ratio)
    return RECURRENT if all(reach == RECURRENT for reach in reaches) else None


def row_caches(layers: list[Any]) -> list[Any]:
    """Return a row's caches in the place of the library's empty ones, one after the other."""
    return [own for layer in layers for one in single_caches(layer) for own in SERVED[type(one)].of_row(one)]


def as_taken(layers: list[Any], caches: Iterator[Any]) -> list[Any]:
    """Return a row's caches, or the layers of a decode group, as the model's layers take them.

    Args:
        layers: The library's caches, for their classes.
        caches: What takes the places of `row_caches`.
    """
    return [_as_taken(layer, caches) for layer in layers]


def _as_taken(layer: Any, caches: Iterator[Any]) -> Any:
    if is_combined(layer):
        return CacheList(*as_taken(list(layer.caches), caches))
    if SERVED[type(layer)].is_indexed:
        return IndexedCache(next(caches), next(caches))
    if type(layer) is PoolingCache:
        return PoolingLayer(next(caches), next(caches), layer.ratio)
    return next(caches)
