"""PromptLogprobs: collects the logprobs of a prompt's own tokens, chunk by chunk."""

import mlx.core as mx

from engine.protocol import TokenLogprobs
from engine.worker.logprobs import ranked

LOGPROBS_CHUNK_TOKENS = 64
"""Most tokens of a chunk, as the logits of all of them are in memory at once, three times in float32."""


class PromptLogprobs:
    """The logprobs of a prompt in progress, of its tokens from the second one on.

    Args:
        num_top: Alternatives per token.
    """

    def __init__(self, num_top: int):
        self._num_top = num_top
        self._found: list[TokenLogprobs] = []

    def add(self, logits: mx.array, successors: mx.array) -> None:
        """Add the next tokens.

        Args:
            logits: [1, L, vocab] at L positions, of which there may be none.
            successors: int32 [1, L], the tokens behind these positions.
        """
        if not successors.shape[1]:
            return
        logprobs = ranked(logits, successors, [0], [self._num_top])
        mx.eval(logprobs.arrays)
        self._found += logprobs.read([successors.shape[1]])[0]

    def entries(self) -> tuple[TokenLogprobs, ...]:
        return tuple(self._found)
