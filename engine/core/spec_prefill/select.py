"""Selects the tokens to keep by importance. Pure and deterministic: ties are broken by position."""

import math

import numpy as np

CHUNK_TOKENS = 32
"""Tokens are kept in chunks of this size, because isolated tokens lose their context."""


def select(importance: np.ndarray, keep: float) -> np.ndarray:
    """Return the tokens of the chunks with the highest mean importance.

    At least ceil(keep * num_tokens) tokens are kept, in as few chunks as possible, but at least ceil(keep * chunks)
    chunks. The first and the last chunk are always kept: one is the attention sink, the other holds the question.

    Args:
        importance: float [num_tokens]; values that are not finite count as 0.
        keep: Share of the tokens to keep.

    Returns:
        int64, ascending indices.
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
    """Round up, ignoring floating-point errors: 0.1 * 30 becomes 3."""
    return math.ceil(value - 1e-9)
