"""Caches of rows: make a batch of one, join rows, keep some of them, all or nothing, and how many bytes they take."""

import copy
from typing import Any

import mlx.core as mx

RowCache = list[Any]
"""Per layer the library's cache for one row: KVCache (attention) or ArraysCache (recurrent state)."""

BatchCache = list[Any]
"""Per layer the library's cache for all rows: BatchKVCache, left-padded and rectangular, or ArraysCache."""


def to_batch(row: RowCache) -> BatchCache:
    """A batch of this one row. Raises TypeError for a layer that cannot be batched."""
    for i, layer in enumerate(row):
        if not hasattr(type(layer), "merge"):
            raise TypeError(f"layer {i}: {type(layer).__name__} cannot be batched")
    return [type(layer).merge([layer]) for layer in row]


def joined(batch: BatchCache, other: BatchCache) -> BatchCache:
    """The rows of `batch`, then those of `other`; recurrent layers join as attention layers do.

    The arguments stay as they are, so that an error half way leaves the running rows whole.
    """
    result = copy.deepcopy(batch)  # shares the arrays
    for layer, new in zip(result, other, strict=True):
        layer.extend(new)
    return result


def kept(batch: BatchCache, rows: list[int]) -> BatchCache:
    """These rows of `batch`, in this order; `batch` stays as it is."""
    result = copy.deepcopy(batch)
    indices = mx.array(rows, mx.int32)
    for layer in result:
        layer.filter(indices)
    return result


def num_bytes(cache: list[Any]) -> int:
    return sum(layer.nbytes for layer in cache)
