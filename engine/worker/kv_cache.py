"""Caches of rows: make a batch of one, join rows, keep some of them, and how many bytes they take."""

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


def join(batch: BatchCache, other: BatchCache) -> None:
    """Appends the rows of `other` to `batch`, in place. Recurrent layers join as attention layers do."""
    assert len(batch) == len(other), (len(batch), len(other))
    for layer, new in zip(batch, other, strict=True):
        layer.extend(new)


def keep(batch: BatchCache, rows: list[int]) -> None:
    """Keeps these rows, in this order, in place."""
    indices = mx.array(rows, mx.int32)
    for layer in batch:
        layer.filter(indices)


def num_bytes(cache: list[Any]) -> int:
    return sum(layer.nbytes for layer in cache)
