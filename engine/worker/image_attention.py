"""Attention in both directions among the tokens of an image or of a whole prompt, in the chunks of one row's prompt.

The library's language models mask these tokens causally. Families whose images were trained otherwise name the layers
in `VisionFamily.both_ways`; those whose prompts were, have `VisionFamily.whole_prompts`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, get_args

import mlx.core as mx
import numpy as np

from engine.processing.vision_family import AttentionKind
from engine.worker.kv_cache import SequenceCache
from engine.worker.layer_kinds import kind_of

EVERY_KIND: frozenset[AttentionKind] = frozenset(get_args(AttentionKind))


@contextmanager
def both_ways(
    cache: SequenceCache, run: np.ndarray, kinds: frozenset[AttentionKind], beyond_window: bool = False
) -> Iterator[None]:
    """Let the tokens of a run see each other in the layers of these kinds.

    The library's modules ask the caches for their masks, so each cache has another one meanwhile. A window hides no
    token after another one, so only what lies before is limited by it, as in transformers for Gemma 3 and 4.

    Args:
        cache: The caches of a row.
        run: int [length], the number of the run that each token of the chunk belongs to, -1 for none.
        kinds: The layers.
        beyond_window: Whether a window hides no token of the same run, as in transformers for PaliGemma 2.
    """
    same = (run[:, None] == run) & (run >= 0)
    same = mx.array(same if beyond_window else np.triu(same, 1))  # the mask of the cache has the earlier ones
    chosen = [layer for layer in cache if kind_of(layer).attention in kinds]
    for layer in chosen:
        layer.make_mask = partial(_mask, type(layer), layer, same)
    try:
        yield
    finally:
        for layer in chosen:
            del layer.make_mask


def image_runs(places: np.ndarray, length: int) -> np.ndarray:
    """Return the run of each token of a chunk, int [length]: image tokens that follow one another are one.

    Args:
        places: int [n], where the image tokens are in the chunk, ascending; no run of them begins before it or goes on
            after it.
        length: Tokens of the chunk.
    """
    run = np.full(length, -1)
    run[places] = np.cumsum(np.diff(places, prepend=-1) > 1)
    return run


def _mask(
    kind: Any, layer: Any, same: mx.array, num_new: int, window_size: int | None = None, return_array: bool = False
) -> mx.array | None:
    """Return the mask of the cache's class, bool [num_new, keys], which ends with the chunk's own tokens."""
    if num_new == 1:
        return kind.make_mask(layer, num_new, window_size=window_size, return_array=return_array)
    mask = kind.make_mask(layer, num_new, window_size=window_size, return_array=True)
    own = mask[..., -num_new:] | same
    return mx.concatenate([mask[..., :-num_new], own], axis=-1)
