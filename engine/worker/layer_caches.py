"""Which caches a row has for the layers of a model, and how the library's modules take them.

A model tells its state by the classes of its empty caches. Most are those of rows; the others are replaced by caches
of the kinds that rows can share (`layer_kinds.KINDS`).
"""

from collections.abc import Iterator, Sequence
from typing import Any

from mlx_vlm.models.cache import CacheList

from engine.processing.reference_config import RECURRENT, Reach, pooled_reach
from engine.worker.layer_kinds import KINDS, is_combined, is_served, keeps_all, kind_of
from engine.worker.quantized_kv import KVFormat


def single_caches(layer: Any) -> tuple[Any, ...]:
    """Return the caches of one layer of the library."""
    return tuple(layer.caches) if is_combined(layer) else (layer,)


def unserved_reason(layers: Sequence[Any]) -> str | None:
    """Return why a model with these empty caches of the library cannot be served, None if it can."""
    for i, layer in enumerate(layers):
        for cache in single_caches(layer):
            if not is_served(cache):
                served = ", ".join(one.__name__ for one, kind in KINDS.items() if one in kind.library)
                found = type(cache).__name__
                return (
                    f"layer {i} keeps its state in a {found}, which rows cannot share; models with {served} are served"
                )
            if (reason := kind_of(cache).unserved_reason(cache)) is not None:
                return f"layer {i} {reason}"
    return None


def reach_of(layer: Any) -> Reach:
    """Return the tokens that a layer of the library attends to, by its empty cache; see `unserved_reason` first."""
    parts = single_caches(layer)
    reaches = [kind_of(part).reach(part) for part in parts]
    if (window := next((reach for reach in reaches if isinstance(reach, int)), None)) is not None:
        ratio = next((ratio for part in parts if (ratio := kind_of(part).tokens_per_slot(part)) > 1), None)
        return window if ratio is None else pooled_reach(window, ratio)
    return RECURRENT if all(reach == RECURRENT for reach in reaches) else None


def row_caches(layers: list[Any]) -> list[Any]:
    """Return a row's caches in the place of the library's empty ones, one after the other."""
    return [own for layer in layers for one in single_caches(layer) for own in kind_of(one).row_caches(one)]


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
    return kind_of(layer).as_taken(layer, caches)


def kv_formats(cache: Sequence[Any], bits: int) -> list[KVFormat | None]:
    """Return the formats of all layers from a row's caches after any token, whose arrays need not be evaluated.

    Args:
        cache: The caches, as computed; layers of other kinds than KVKind have no format.
        bits: Of a quantized value.

    Raises:
        ValueError: A layer cannot be stored with these bits, or none stores keys and values of all tokens.
    """
    found = [_format(i, layer, bits) if keeps_all(layer) else None for i, layer in enumerate(cache)]
    if not any(found):
        raise ValueError("no layer stores keys and values of all tokens, so that it would have no effect")
    return found


def _format(i: int, layer: Any, bits: int) -> KVFormat:
    keys, values = layer.keys, layer.values
    assert keys is not None and values is not None
    try:
        return KVFormat.of(keys, values, bits)
    except ValueError as error:
        raise ValueError(f"layer {i} has keys or values of {error}") from error
