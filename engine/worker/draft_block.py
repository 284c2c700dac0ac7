"""Blocks of drafts: a head reads the newest token and masks in one forward, which gives all drafts of a step."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from engine.worker.heads.head import BlockHead


class DraftBlock:
    """Drafts blocks with a head.

    Args:
        head: The head.
        embed: Embeds tokens, int32 [B, L] -> [B, L, hidden].
    """

    def __init__(self, head: BlockHead, embed: Callable[[mx.array], mx.array]):
        self.size = head.block_size
        """Tokens of the longest block: the newest token, then the drafts."""
        self._head = head
        self._embed = embed

    def states(self, newest: mx.array, cache: list[Any], positions: mx.array) -> mx.array:
        """Return the hidden states [B, k, hidden] of the k drafts after the newest tokens.

        Args:
            newest: int32 [B, 1].
            cache: The head's cache, which has all positions before the newest tokens.
            positions: int32 [B, k + 1], of the newest tokens and the drafts; k is below `size`.
        """
        assert positions.shape[1] <= self.size
        masks = mx.full((len(newest), positions.shape[1] - 1), self._head.mask_token_id, mx.int32)
        embeds = self._embed(mx.concatenate([newest, masks], axis=1))
        return self._head.block_states(embeds, cache, positions)[:, 1:]
