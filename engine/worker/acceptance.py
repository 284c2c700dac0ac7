"""How many tokens of a verified step each row keeps: those after accepted drafts, up to the row's last token."""

from collections.abc import Sequence

import mlx.core as mx

from engine.core.row import Row
from engine.core.runner import NO_TOKEN


class Acceptance:
    """The limits of a fixed set of rows, on the device: max_tokens and stop tokens."""

    def __init__(self, rows: Sequence[Row]):
        self._max_tokens = mx.array([[row.sampling.max_tokens] for row in rows], mx.int32)
        self._stops = _padded([row.spec.stop_token_ids for row in rows])

    def count(self, tokens: mx.array, sampled: mx.array, positions: mx.array) -> tuple[mx.array, mx.array]:
        """Count accepted drafts and kept samples.

        Args:
            tokens: int32 [B, k + 1], the newest tokens, then the drafts.
            sampled: int32 [B, k + 1], the samples after each of them.
            positions: int32 [B, k + 1], output positions of the samples.

        Returns:
            Two arrays, int32 [B]. The first counts the accepted drafts, 0 to k: those before the first draft that
            differs from its sample. The second counts the samples that the row keeps, 1 to k + 1: those after accepted
            drafts, up to its last token. In a row that ends, more drafts may be accepted than samples are kept.
        """
        agrees = (tokens[:, 1:] == sampled[:, :-1]).astype(mx.int32)
        num_accepted = mx.sum(mx.cumprod(agrees, axis=1), axis=1)
        return num_accepted, mx.minimum(num_accepted + 1, self._most_kept(tokens, positions))

    def _most_kept(self, tokens: mx.array, positions: mx.array) -> mx.array:
        """Return how many samples each row may keep: those up to its last token.

        It is 1 for a row whose last token was sampled before and is processed now: that sample is discarded later.
        """
        goes_on = positions[:, 1:] < self._max_tokens
        if self._stops is not None:
            is_stop = mx.any(tokens[..., None] == self._stops[:, None], axis=-1)
            goes_on &= ~(is_stop[:, 1:] | is_stop[:, :1])
        return 1 + mx.sum(mx.cumprod(goes_on.astype(mx.int32), axis=1), axis=1)


def _padded(rows: Sequence[Sequence[int]]) -> mx.array | None:
    """Return int32 [B, S], padded with NO_TOKEN; None if all rows are empty."""
    most = max(map(len, rows))
    return mx.array([[*ids, *[NO_TOKEN] * (most - len(ids))] for ids in rows], mx.int32) if most else None
