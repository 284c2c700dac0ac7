"""What a draft can score, told without touching it."""

from dataclasses import dataclass

from engine.core.spec_prefill.plan import ScoreRequest
from engine.protocol import InvalidRequest
from engine.worker.kv_cache import rounded


@dataclass(frozen=True)
class Limits:
    """For any thread. bytes_per_token, state_bytes: of a prompt's cache. budget: bytes of all prompts' caches and of
    all snapshots. lookahead: tokens of the answer, which take room as those of the prompt do."""

    vocab_size: int
    max_context_tokens: int
    lookahead: int
    bytes_per_token: int
    state_bytes: int
    budget: int

    def num_bytes(self, num_prompt_tokens: int) -> int:
        """Of a prompt's cache when it has been scored."""
        return self.state_bytes + rounded(num_prompt_tokens + self.lookahead) * self.bytes_per_token

    def check(self, request: ScoreRequest) -> None:
        """Raises InvalidRequest for a prompt that this draft could never score; it has at least one token."""
        num_tokens, room = len(request.token_ids), self.max_context_tokens - self.lookahead
        if num_tokens > room:
            raise InvalidRequest(
                f"the prompt has {num_tokens} tokens; the draft's context of {self.max_context_tokens} holds {room} "
                f"and {self.lookahead} (lookahead) of the answer",
                "messages",
            )
        for token_id in (int(request.token_ids.min()), int(request.token_ids.max())):
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequest(
                    f"token id {token_id} is not within 0 and {self.vocab_size - 1}, the draft's vocabulary", "messages"
                )
        if (need := self.num_bytes(num_tokens)) > self.budget:
            raise InvalidRequest(
                f"scoring {num_tokens} tokens takes {need} bytes, the limit is {self.budget} (memory_share)", "messages"
            )
