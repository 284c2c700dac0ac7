"""Logprobs of sampled tokens: the model's own, before any logits processing."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from engine.core.row import Row
from engine.protocol import TokenLogprobs
from engine.worker.ranking import best_first


@dataclass(slots=True, eq=False)
class Logprobs:
    """Logprobs of the R rows of a batch that ask for them."""

    rows: list[int]  # Indices of the rows.
    num_top: list[int]  # Alternatives that each row asks for.
    chosen: mx.array  # float32 [R, L].
    top_ids: mx.array  # int32 [R, L, largest num_top], best first.
    top: mx.array  # float32 [R, L, largest num_top].

    @property
    def arrays(self) -> list[mx.array]:
        return [self.chosen, self.top_ids, self.top]

    def read(self, num_tokens: Sequence[int]) -> dict[int, tuple[TokenLogprobs, ...]]:
        """Return the logprobs by row index, one entry per token. num_tokens: of every row of the batch."""
        chosen, ids, top = (np.array(array).tolist() for array in self.arrays)
        return {
            row: tuple(
                TokenLogprobs(chosen[i][j], tuple(zip(ids[i][j][:n], top[i][j][:n], strict=True)))
                for j in range(num_tokens[row])
            )
            for i, (row, n) in enumerate(zip(self.rows, self.num_top, strict=True))
        }


def logprobs_of(rows: Sequence[Row], logits: mx.array, tokens: mx.array) -> Logprobs | None:
    """Compute the logprobs of the rows that ask for them.

    Args:
        rows: The rows.
        logits: [B, L, vocab], as the model returned them.
        tokens: int32 [B, L], as sampled.

    Returns:
        None when no row asks.
    """
    asking = [(i, row.sampling.logprobs) for i, row in enumerate(rows) if row.sampling.logprobs is not None]
    if not asking:
        return None
    index = mx.array([i for i, _ in asking])
    return ranked(logits[index], tokens[index], [i for i, _ in asking], [n for _, n in asking])


def ranked(logits: mx.array, tokens: mx.array, rows: list[int], num_top: list[int]) -> Logprobs:
    """Compute the logprobs of tokens and of the best alternatives.

    Args:
        logits: [R, L, vocab], as the model returned them.
        tokens: int32 [R, L].
        rows: See Logprobs.
        num_top: See Logprobs.
    """
    mine = logits.astype(mx.float32)
    mine = mine - mx.logsumexp(mine, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(mine, mx.maximum(tokens, 0)[..., None], axis=-1)[..., 0]
    ids = best_first(mine, max(1, *num_top))
    top = mx.take_along_axis(mine, ids, axis=-1)
    return Logprobs(rows, num_top, chosen, ids.astype(mx.int32), top)
