"""Chunks of prompts whose image tokens see each other: none ends among the tokens of an image. Pure."""

import numpy as np

from engine.core.row import Row


def undivided(row: Row, num_tokens: int, image_token_id: int) -> int:
    """Return the size of a row's next chunk that divides no run of image tokens.

    Args:
        row: The row.
        num_tokens: Wanted size.
        image_token_id: See ModelRunner.

    Returns:
        `num_tokens` if they end outside of a run; else the tokens before that run; if there are none, the whole run.
    """
    spec, start = row.spec, row.num_prefilled
    ids = spec.token_ids if spec.sparse is None else spec.token_ids[spec.sparse.positions]
    end = start + num_tokens
    if end >= len(ids) or not (ids[end - 1] == ids[end] == image_token_id):
        return num_tokens
    others = np.flatnonzero(ids != image_token_id)
    behind = int(np.searchsorted(others, end))
    begin = int(others[behind - 1]) + 1 if behind else 0
    if begin > start:
        return begin - start
    return (int(others[behind]) if behind < len(others) else len(ids)) - start
