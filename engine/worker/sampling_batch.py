"""From logits to tokens for the rows of a batch: logits processors, grammar masks, sampler, logprobs."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from engine.core.row import Row
from engine.worker.logprobs import Logprobs, logprobs_of
from engine.worker.processors import LogitsProcessors, apply_grammar_masks
from engine.worker.sampler import Sampler


@dataclass(slots=True, eq=False)
class Sampled:
    """The result of `SamplingBatch.sample`."""

    tokens: mx.array  # int32 [B, L]; NO_TOKEN where the best logit is not finite.
    logprobs: Logprobs | None  # None if no row asks for them.
    errors: dict[int, str]  # Why a grammar has failed, by the row's index; its tokens are not constrained.


class SamplingBatch:
    """A fixed set of rows with their sampling parameters on the device; rebuilt when rows join or are removed."""

    def __init__(self, rows: Sequence[Row], processors: LogitsProcessors, vocab_size: int):
        self._rows = rows
        self._processors = processors
        self._vocab_size = vocab_size
        self._sampler = Sampler([row.sampling for row in rows])
        self._has_matchers = any(row.matcher is not None for row in rows)

    @classmethod
    def of(cls, rows: Sequence[Row], vocab_size: int) -> "SamplingBatch":
        """Create a batch whose history is what the host knows: all of `output_token_ids`."""
        return cls(rows, LogitsProcessors.of(rows, vocab_size), vocab_size)

    def joined(self, other: "SamplingBatch") -> "SamplingBatch":
        return SamplingBatch([*self._rows, *other._rows], self._processors.joined(other._processors), self._vocab_size)

    def select(self, rows: list[int]) -> "SamplingBatch":
        return SamplingBatch([self._rows[i] for i in rows], self._processors.select(rows), self._vocab_size)

    def noise(self, positions: mx.array) -> mx.array | None:
        """Return the noise of output positions int32 [B, L]; see Sampler.noise."""
        return self._sampler.noise(positions, self._vocab_size)

    def draft(self, logits: mx.array, tokens: mx.array, positions: mx.array, noise: mx.array | None) -> mx.array:
        """Sample drafts, which no grammar constrains.

        Args:
            logits: [B, L, vocab].
            tokens: int32 [B, 1], the newest tokens; penalties do not count the drafts between them and a position.
            positions: int32 [B, L], output positions.
            noise: Noise of these positions.

        Returns:
            int32 [B, L]; token 0 where the best logit is not finite.
        """
        return mx.maximum(self._sampler(self._processors(logits, tokens, positions), noise), 0)

    def sample(
        self,
        logits: mx.array,
        tokens: mx.array,
        positions: mx.array,
        noise: mx.array | None,
        failed: Callable[[], Collection[int]] = tuple,
    ) -> Sampled:
        """Sample tokens. With grammars it launches the logits, and waits for `tokens`, whose drafts the masks follow.

        Args:
            logits: [B, L, vocab], as the model returned them.
            tokens: int32 [B, L], the tokens before each position; those after the first are drafts.
            positions: int32 [B, L], output positions.
            noise: Noise of these positions.
            failed: Called before grammar masks are computed, while the device computes the logits. Returns the indices
                of rows whose grammars have failed already.
        """
        shaped, errors = self._processors(logits, tokens, positions), {}
        if self._has_matchers:
            mx.async_eval(shaped)
            skipped = failed()
            shaped, errors = apply_grammar_masks(self._rows, shaped, np.array(tokens)[:, 1:].tolist(), skipped)
        sampled = self._sampler(shaped, noise)
        return Sampled(sampled, logprobs_of(self._rows, logits, sampled), errors)

    def commit(self, tokens: mx.array, num_kept: mx.array) -> None:
        """Count the first num_kept int32 [B] of the new tokens int32 [B, L]."""
        self._processors.commit(tokens, num_kept)

    @property
    def state(self) -> list[mx.array]:
        return self._processors.state
