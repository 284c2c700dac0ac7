"""Attention in both directions among the tokens of an image, in the chunks of one row's prompt.

The library's language models mask the tokens of an image causally. Families that were trained otherwise name the layers
in `VisionFamily.both_ways`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.models.cache import KVCache, RotatingKVCache

from engine.processing.vision_family import LayerKind
from engine.worker.kv_cache import SequenceCache

CACHES: dict[LayerKind, type] = {"full": KVCache, "window": RotatingKVCache}
"""Class of a row's cache by the kind of its layer."""


@contextmanager
def both_ways(cache: SequenceCache, places: np.ndarray, length: int, kinds: frozenset[LayerKind]) -> Iterator[None]:
    """Let image tokens that follow one another see each other in the layers of these kinds.

    The library's modules ask the caches for their masks, so each cache has another one meanwhile. A window hides no
    token after another one, so only what lies before is limited by it, as in transformers.

    Args:
        cache: The caches of a row.
        places: int [n], where the image tokens are in the chunk, ascending; no run of them begins before it or goes on
            after it.
        length: Tokens of the chunk.
        kinds: The layers.
    """
    run = np.full(length, -1)
    run[places] = np.cumsum(np.diff(places, prepend=-1) > 1)
    later = mx.array(np.triu((run[:, None] == run) & (run >= 0), 1))  # the mask of the cache has the earlier ones
    chosen = [layer for layer in cache if isinstance(layer, tuple(CACHES[kind] for kind in kinds))]
    for layer in chosen:
        layer.make_mask = partial(_mask, type(layer), layer, later)
    try:
        yield
    finally:
        for layer in chosen:
            del layer.make_mask


def _mask(
    kind: Any, layer: Any, later: mx.array, num_new: int, window_size: int | None = None, return_array: bool = False
) -> mx.array | None:
    """Return the mask of the cache's class, bool [num_new, keys], which ends with the chunk's own tokens."""
    if num_new == 1:
        return kind.make_mask(layer, num_new, window_size=window_size, return_array=return_array)
    mask = kind.make_mask(layer, num_new, window_size=window_size, return_array=True)
    own = mask[..., -num_new:] | later
    return mx.concatenate([mask[..., :-num_new], own], axis=-1)
