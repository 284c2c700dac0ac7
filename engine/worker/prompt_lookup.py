"""Prompt lookup: drafts the tokens that followed an earlier occurrence of a row's newest tokens.

Answers that repeat parts of their prompt, such as edited code, tool arguments and quotations, are drafted without any
model (Saxena 2023, "Prompt Lookup Decoding"; Yang et al. 2023, arXiv 2304.04487). The search runs on the host, so a
step with these drafts waits for the tokens of the step before it.
"""

from collections.abc import Sequence

import numpy as np

from engine.worker.drafter import DraftingModel
from engine.worker.proposer import RowDrafts, Target, TextProposer

LENGTHS = (2, 4)
"""Draft tokens per row that `auto` chooses from."""
SHORT_LENGTHS = (2, 3)
"""The same for targets with a model that drafts, so that rows reserve no more memory than for its drafts, and for
recurrent ones that keep a state per verified token."""
MIN_MATCH, MAX_MATCH = 3, 16
"""Fewest equal tokens that count as a match, and the most that are compared. The longest match is used, and among
equally long ones the last."""
MAX_CANDIDATES = 1024
"""Most occurrences of the newest token that are compared, the last ones, so that a step takes a bounded time."""


class PromptLookup(TextProposer):
    """Implements Proposer."""

    name = "prompt_lookup"

    def lengths(self, target: Target, model: DraftingModel | None) -> Sequence[int]:
        return SHORT_LENGTHS if model is not None or target.keeps_states else LENGTHS

    def row_drafts(self, token_ids: np.ndarray) -> RowDrafts:
        return TokenHistory(token_ids)


class TokenHistory:
    """All tokens of a row, of its prompt and its answer. Implements RowDrafts.

    Args:
        token_ids: int32, the tokens so far.
    """

    def __init__(self, token_ids: np.ndarray):
        self._tokens = np.array(token_ids, np.int32)
        self._num_tokens = len(token_ids)
        self._next: int | None = None  # index of the token after the match
        self._is_searched = False

    def append(self, token_ids: tuple[int, ...]) -> None:
        """Append new tokens."""
        end = self._num_tokens + len(token_ids)
        if end > len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty(end, np.int32)])
        self._tokens[self._num_tokens : end] = token_ids
        self._num_tokens, self._is_searched = end, False

    @property
    def has_drafts(self) -> bool:
        """Whether the newest tokens occurred before."""
        if not self._is_searched:
            self._next, self._is_searched = self._search(), True
        return self._next is not None

    def drafts(self, num_tokens: int) -> list[int]:
        """Return the next `num_tokens` tokens after the match; where it reaches the end, the text between repeats.

        Without a match the newest token is repeated.
        """
        start = self._next if self.has_drafts and self._next is not None else self._num_tokens - 1
        period = self._num_tokens - start
        return self._tokens[start + np.arange(num_tokens) % period].tolist()

    def _search(self) -> int | None:
        """Return the index after the longest match of the newest tokens, None if it is shorter than MIN_MATCH."""
        tokens, last = self._tokens[: self._num_tokens], self._num_tokens - 1
        if last < MIN_MATCH:
            return None
        ends = np.flatnonzero(tokens[:last] == tokens[last])[-MAX_CANDIDATES:]
        for length in range(1, min(MAX_MATCH, last)):
            longer = ends[ends >= length]
            longer = longer[tokens[longer - length] == tokens[last - length]]
            if not len(longer):
                return int(ends[-1]) + 1 if length >= MIN_MATCH else None
            ends = longer
        return int(ends[-1]) + 1
