"""Importance of tokens → which are kept. Pure and deterministic: equal scores are ordered by place."""

import math

import numpy as np

CHUNK_TOKENS = 32
"""Chosen together: what stands alone cannot be read."""


def select(importance: np.ndarray, keep: float) -> np.ndarray:
    """int64, ascending: the tokens of the chunks whose mean importance (float [num_tokens]) is best.

    At least ceil(keep * num_tokens) tokens, in as few chunks as that takes, but no fewer than ceil(keep * chunks).
    First and last chunk are always among them: one holds what attention sinks into, the other what is asked. What is
    not finite counts as 0.
    """
    num_tokens = len(importance)
    if num_tokens == 0:
        return np.empty(0, np.int64)
    starts = np.arange(0, num_tokens, CHUNK_TOKENS)
    sizes = np.minimum(starts + CHUNK_TOKENS, num_tokens) - starts
    finite = np.where(np.isfinite(importance), importance, 0).astype(np.float64)
    scores = np.add.reduceat(finite, starts) / sizes
    scores[[0, -1]] = math.inf
    best_first = np.lexsort((np.arange(len(starts)), -scores))
    enough_chunks = max(_ceil(keep * len(starts)), min(2, len(starts)))
    kept_tokens = np.cumsum(sizes[best_first])
    enough_tokens = int(np.searchsorted(kept_tokens, _ceil(keep * num_tokens))) + 1
    chosen = best_first[: max(enough_chunks, enough_tokens)]
    is_chosen = np.zeros(len(starts), bool)
    is_chosen[chosen] = True
    return np.flatnonzero(np.repeat(is_chosen, sizes))


def _ceil(value: float) -> int:
    """0.1 * 30 is 3, whatever binary fractions say."""
    return math.ceil(value - 1e-9)
