"""Where a prompt's prefill takes snapshots. Pure."""

import math
from collections.abc import Iterable

from engine.core.cost_model import CostModel
from engine.core.prefix_cache.prompt_key import PromptKey
from engine.protocol import Boundary

KIND_ORDER = ("system", "turn", "prompt")

LEAST_TOKENS, MOST_LEAST_TOKENS = 16, 256
"""Range of `least_tokens`. The upper end: a conversation of a few turns is cached on any device, however fast it is."""


def least_tokens(snapshot_s: float, costs: CostModel) -> int:
    """Return the fewest tokens that are worth a snapshot: computing them takes as long as taking and restoring it.

    Args:
        snapshot_s: Seconds of taking a snapshot and restoring it.
        costs: Predicts the seconds of computing tokens.
    """
    if not snapshot_s:
        return LEAST_TOKENS
    token_s = (costs.chunk_s(MOST_LEAST_TOKENS, 0) - costs.chunk_s(1, 0)) / (MOST_LEAST_TOKENS - 1)
    if snapshot_s >= token_s * MOST_LEAST_TOKENS:
        return MOST_LEAST_TOKENS
    return max(LEAST_TOKENS, math.ceil(snapshot_s / token_s))


def choose_boundaries(
    wanted: Iterable[Boundary], key: PromptKey, min_tokens: int, start: int = 0, is_pinned: bool = False
) -> list[Boundary]:
    """Choose the boundaries to snapshot: at least `min_tokens` apart, and never within an image.

    The end of the prompt is skipped if it is less than `min_tokens` after the end of its turn: templates may render the
    tokens between them differently in the next prompt.

    Args:
        wanted: Boundaries to choose from, in any order.
        key: The prompt, which continues after each chosen boundary.
        min_tokens: Fewest tokens between a snapshot and the one before it.
        start: Tokens of the prompt that have a snapshot already.
        is_pinned: Whether system boundaries are chosen however close they are to the one before.

    Returns:
        The chosen boundaries after `start`, ascending.
    """
    ascending = sorted(wanted, key=lambda one: (one.num_tokens, KIND_ORDER.index(one.kind)))
    turn = max((one.num_tokens for one in ascending if one.kind == "turn"), default=0)
    chosen, last = list[Boundary](), start
    for one in ascending:
        before = max(last, turn) if one.kind == "prompt" else last
        is_forced = is_pinned and one.kind == "system" and one.num_tokens > last
        far_enough = one.num_tokens - before >= min_tokens or is_forced
        if far_enough and one.num_tokens < len(key) and key.can_split_at(one.num_tokens):
            chosen.append(one)
            last = one.num_tokens
    return chosen
