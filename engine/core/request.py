"""One row while the engine works on it: one choice of a request."""

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

import numpy as np

from engine.core.prefix_cache.prompt_key import PromptKey
from engine.core.spec_prefill.plan import num_contiguous
from engine.protocol import EngineRequest, FinishReason, SamplingParams, choice_seed


class RequestState(Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    RUNNING = "running"
    FINISHED = "finished"


class Matcher(Protocol):
    """The state of one row's grammar. Raises ValueError when it cannot go on; the row fails, nothing else."""

    def masks(self, draft: tuple[int, ...] = ()) -> np.ndarray:
        """Which tokens may come next: now, after draft[0], after draft[1], ... up to the first draft token that is
        forbidden. uint32 [1 to len(draft) + 1, ceil(vocab_size / 32)], bit i of word j is token 32 * j + i. The state
        stays as it is."""
        ...

    def advance(self, token_ids: tuple[int, ...]) -> None:
        """Takes tokens that were sampled under its masks. What follows a stop token is ignored."""
        ...

    def fork(self) -> "Matcher":
        """An independent matcher in the same state."""
        ...


@dataclass(slots=True, eq=False)
class Request:
    """index: which choice of the request. id: of the row, different for each choice.

    num_prefilled: computed tokens of the prompt in the cache. num_charged: of prompt_token_ids, what its client has
    paid for: nobody pays twice for having been preempted. num_cached: those that came out of the prefix cache when
    the row began. matcher: of the row's grammar, if it has one.
    keep_until_s: a running row is not preempted before (the scheduler's clock). rectangle: the rows that it decodes
    with, see core/memory/budget.py.
    """

    spec: EngineRequest
    index: int = 0
    matcher: Matcher | None = None
    state: RequestState = RequestState.WAITING
    num_prefilled: int = 0
    num_charged: int = 0
    num_cached: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    keep_until_s: float = 0.0
    rectangle: int = 0
    num_outgrown: int = 0
    """How often it has lost its place because rows outgrew their reserve."""
    num_restarts: int = 0
    """How often its prompt was given up after it had begun with nothing from the prefix cache."""
    joined_s: float = 0.0
    """When it joined the decode batch, on the scheduler's clock."""
    prompt_key: PromptKey | None = None
    """Of prompt_token_ids, once the prefix cache has been asked about them."""
    cached_hint: tuple[tuple[int, ...], int] | None = None
    """State of the prefix cache when it was asked last, and how many tokens it would have served."""
    sampling: SamplingParams = field(init=False)

    def __post_init__(self) -> None:
        seed = choice_seed(self.spec.sampling.seed, self.index)
        self.sampling = self.spec.sampling if not self.index else replace(self.spec.sampling, seed=seed)

    @property
    def id(self) -> str:
        return f"{self.spec.request_id}/{self.index}"

    @property
    def prompt_token_ids(self) -> np.ndarray:
        """int32: the prompt, and what the row has given out before it was preempted."""
        if not self.output_token_ids:
            return self.spec.token_ids
        return np.concatenate([self.spec.token_ids, np.array(self.output_token_ids, np.int32)])

    @property
    def computed_index(self) -> np.ndarray | None:
        """int32: which of prompt_token_ids are computed; None for all."""
        if self.spec.sparse is None:
            return None
        num_input = len(self.spec.token_ids)
        given_out = np.arange(num_input, num_input + len(self.output_token_ids), dtype=np.int32)
        return np.concatenate([self.spec.sparse.positions, given_out])

    @property
    def num_input_tokens(self) -> int:
        """Of the request's own prompt, those that are computed."""
        return len(self.spec.token_ids) - self.num_skipped

    @property
    def num_prompt_tokens(self) -> int:
        """Of prompt_token_ids those that are computed, as long as the row has not joined."""
        return self.num_input_tokens + len(self.output_token_ids)

    @property
    def num_skipped(self) -> int:
        """Tokens of the prompt that its sparse plan leaves out."""
        return 0 if self.spec.sparse is None else len(self.spec.token_ids) - len(self.spec.sparse.positions)

    @property
    def num_dense_tokens(self) -> int:
        """Of the request's own prompt, those in front of the first one that is left out."""
        if self.spec.sparse is None:
            return len(self.spec.token_ids)
        return num_contiguous(self.spec.sparse.positions)

    def append(self, token_id: int) -> FinishReason | None:
        """Takes one sampled token; a stop token ends the row and is not kept."""
        if token_id in self.spec.stop_token_ids:
            return FinishReason.STOP
        self.output_token_ids.append(token_id)
        if len(self.output_token_ids) >= self.sampling.max_tokens:
            return FinishReason.LENGTH
        return None
