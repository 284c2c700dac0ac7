"""One choice of a request while the engine works on it: a row."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Protocol

import numpy as np

from engine.core.prefix_cache.prompt_key import PromptKey
from engine.core.timeline_recorder import TimelineRecorder
from engine.protocol import EngineRequest, FinishReason, SamplingParams, choice_seed
from engine.timeline import RowTimeline

if TYPE_CHECKING:
    from engine.core.prompt import Prompt


class RowState(Enum):
    """The stage of a row in its life cycle; see scheduler.py."""

    WAITING = "waiting"
    PREFILL = "prefill"
    RUNNING = "running"
    FINISHED = "finished"


class Matcher(Protocol):
    """The state of one row's grammar. Methods raise ValueError when it cannot continue; only this row fails then."""

    def masks(self, draft: tuple[int, ...] = ()) -> np.ndarray:
        """Return the allowed tokens now, after draft[0], after draft[1], ..., up to the first forbidden draft token.

        The state does not change.

        Returns:
            uint32 [1 to len(draft) + 1, ceil(vocab_size / 32)]; bit i of word j stands for token 32 * j + i.
        """
        ...

    def advance(self, token_ids: tuple[int, ...]) -> None:
        """Consume tokens that were sampled under the masks. Tokens after a stop token are ignored."""
        ...

    def fork(self) -> "Matcher":
        """Return an independent matcher in the same state."""
        ...


@dataclass(slots=True, eq=False)
class Row:
    """One row: one choice of an EngineRequest, with its position in prefill and decode."""

    spec: EngineRequest
    """The request."""
    index: int = 0
    """Which choice of the request this is, from 0."""
    matcher: Matcher | None = None
    """The row's grammar, None without one."""
    prompt: "Prompt" = field(init=False, repr=False)
    """The prompt that it has computed, alone or with other rows, since it was queued last; unset before."""
    state: RowState = RowState.WAITING
    num_charged: int = 0
    """Tokens of prompt_token_ids that the client has been charged for; a preempted row is not charged twice."""
    num_cached: int = 0
    """Tokens that came from the prefix cache when the row began."""
    output_token_ids: list[int] = field(default_factory=list)
    """Generated tokens, without a stop token. They begin with those of the request's `progress`."""
    num_resumed: int = field(init=False)
    """Tokens of output_token_ids that another engine generated."""
    keep_until_s: float = 0.0
    """The running row is not preempted before this time, on the scheduler's clock."""
    decode_group: int = 0
    """Id of its decode group, see core/memory/grouping.py."""
    num_growth_preemptions: int = 0
    """How often it was preempted because a row outgrew its reservation."""
    may_take_over: bool = True
    """Whether its reservation may leave out keys and values that it will take over from the prefix cache."""
    num_restarts: int = 0
    """How often its prompt was preempted after it had begun without a cached prefix."""
    joined_s: float = 0.0
    """When it joined the decode batch, on the scheduler's clock."""
    prompt_key: PromptKey | None = None
    """Key of prompt_token_ids, once the prefix cache has been asked about them."""
    cached_hint: tuple[tuple[int, ...], int] | None = None
    """Version of the prefix cache at the last lookup, and how many tokens were cached then."""
    record: TimelineRecorder = field(default_factory=lambda: TimelineRecorder(0.0))
    """Its phases so far; the scheduler begins it."""
    timeline: RowTimeline | None = None
    """Its phases once it has ended."""
    sampling: SamplingParams = field(init=False)
    """Sampling parameters of the request, with this choice's own seed."""

    def __post_init__(self) -> None:
        seed = choice_seed(self.spec.sampling.seed, self.index)
        self.sampling = self.spec.sampling if not self.index else replace(self.spec.sampling, seed=seed)
        resumed = self.spec.progress[self.index].token_ids if self.spec.progress else ()
        self.num_resumed = len(resumed)
        self.output_token_ids += resumed

    @property
    def id(self) -> str:
        return f"{self.spec.request_id}/{self.index}"

    @property
    def prompt_token_ids(self) -> np.ndarray:
        """int32 [n]: the prompt, and the tokens generated before a preemption or by another engine."""
        if not self.output_token_ids:
            return self.spec.token_ids
        return np.concatenate([self.spec.token_ids, np.array(self.output_token_ids, np.int32)])

    @property
    def computed_positions(self) -> np.ndarray | None:
        """int32 [num_tokens]: positions in prompt_token_ids that are computed; None for all."""
        if self.spec.sparse is None:
            return None
        num_input = len(self.spec.token_ids)
        output_positions = np.arange(num_input, num_input + len(self.output_token_ids), dtype=np.int32)
        return np.concatenate([self.spec.sparse.positions, output_positions])

    @property
    def num_input_tokens(self) -> int:
        """Computed tokens of the request's own prompt."""
        return len(self.spec.token_ids) - self.num_skipped

    @property
    def num_tokens(self) -> int:
        """Computed tokens of the prompt, and the generated ones: for a running row, including its newest token."""
        return self.num_input_tokens + len(self.output_token_ids)

    @property
    def num_generated(self) -> int:
        """Tokens of the answer that this engine has generated."""
        return len(self.output_token_ids) - self.num_resumed

    @property
    def num_tokens_left(self) -> int:
        """Tokens of the answer that may still be generated."""
        return self.sampling.max_tokens - len(self.output_token_ids)

    @property
    def num_skipped(self) -> int:
        """Prompt tokens that the sparse plan skips."""
        return 0 if self.spec.sparse is None else len(self.spec.token_ids) - len(self.spec.sparse.positions)

    @property
    def num_dense_tokens(self) -> int:
        """Tokens of the request's own prompt before the first skipped one."""
        if self.spec.sparse is None:
            return len(self.spec.token_ids)
        return self.spec.sparse.num_contiguous

    def end_timeline(self, now: float, reason: FinishReason) -> RowTimeline:
        """Set `timeline`, and return it."""
        phases, seconds = self.record.end(now)
        self.timeline = RowTimeline(
            index=self.index,
            phases=phases,
            seconds=seconds,
            first_token_s=self.record.first_token_s,
            last_token_s=self.record.last_token_s,
            num_prompt_tokens=len(self.spec.token_ids),
            num_cached=self.num_cached,
            num_skipped=self.num_skipped,
            num_tokens=self.num_generated,
            num_resumed=self.num_resumed,
            finish_reason=reason.value,
            num_preemptions=self.record.num_preemptions,
            spent_s=self.spec.spent_s,
        )
        return self.timeline

    def append(self, token_id: int) -> FinishReason | None:
        """Append one sampled token and return the finish reason, if any.

        A stop token finishes the row and is not kept.
        """
        if token_id in self.spec.stop_token_ids:
            return FinishReason.STOP
        self.output_token_ids.append(token_id)
        if len(self.output_token_ids) >= self.sampling.max_tokens:
            return FinishReason.LENGTH
        return None


def by_prompt(rows: Sequence[Row]) -> list[list[Row]]:
    """Group the rows of a new request by what they prefill.

    Rows without output share the prompt. A row that continues an answer prefills its own tokens after the prompt, as a
    preempted row does; through the prefix cache the prompt is still computed once.
    """
    fresh = [row for row in rows if not row.output_token_ids]
    return [*([row] for row in rows if row.output_token_ids), *([fresh] if fresh else [])]


def named(rows: Iterable[Row]) -> dict[str, str]:
    """Return the `extra` of a log line about rows: the ids of their HTTP requests, or of those that have none."""
    return {"request_id": ", ".join(dict.fromkeys(row.spec.http_request_id or row.spec.request_id for row in rows))}
