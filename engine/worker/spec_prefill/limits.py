"""The limits of a draft model, known without the device."""

from dataclasses import dataclass

from engine.core.spec_prefill.plan import ScoreRequest
from engine.errors import InvalidRequest
from engine.worker.kv_layer import SLOTS_STEP, rounded


@dataclass(frozen=True)
class Limits:
    """The limits of the prompts that a draft model can score. Usable from any thread."""

    vocab_size: int  # Vocabulary of the draft.
    max_context_tokens: int  # Context of the draft.
    lookahead: int  # Answer tokens, which need slots as prompt tokens do.
    bytes_per_token: int  # Bytes per token of a prompt's cache.
    state_bytes: int  # Recurrent states of a prompt's cache.
    budget: int  # Bytes of all prompts' caches and all snapshots.

    def num_bytes(self, num_prompt_tokens: int) -> int:
        """Return the bytes of a prompt's cache once it has been scored."""
        return self.state_bytes + rounded(num_prompt_tokens + self.lookahead) * self.bytes_per_token

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens of the longest prompt that context and budget allow."""
        slots = (self.budget - self.state_bytes) // self.bytes_per_token // SLOTS_STEP * SLOTS_STEP
        return max(0, min(self.max_context_tokens, slots) - self.lookahead)

    def check(self, request: ScoreRequest) -> None:
        """Check a prompt of at least one token.

        Raises:
            InvalidRequest: This draft could never score it.
        """
        num_tokens, room = len(request.token_ids), self.max_context_tokens - self.lookahead
        if num_tokens > room:
            raise InvalidRequest(
                f"the prompt has {num_tokens} tokens; the limit is {room}, the draft's context of "
                f"{self.max_context_tokens} less {self.lookahead} (lookahead)",
                "messages",
            )
        for token_id in (int(request.token_ids.min()), int(request.token_ids.max())):
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequest(
                    f"token id {token_id} is not between 0 and {self.vocab_size - 1} (the draft's vocabulary)",
                    "messages",
                )
        if (need := self.num_bytes(num_tokens)) > self.budget:
            raise InvalidRequest(
                f"scoring {num_tokens} tokens takes {need} bytes; the limit is {self.budget} (memory_share)", "messages"
            )
