"""Who runs in the next step: the queue, the rows, and one token budget per step. Pure; touches no array."""

import time
from bisect import insort_left, insort_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from engine.config import EngineConfig
from engine.core.batch import NO_TOKEN, PrefillOutput, RowOutput, SchedulerOutput
from engine.core.request import Request, RequestState
from engine.core.stats import Stats
from engine.protocol import FinishReason, TokenChunk

MIN_PREFILL_TOKENS = 16
"""A chunk is never smaller, however much else there is to do."""

MIN_MEASURED_TOKENS = 64
PREFILL_EMA_WEIGHT = 0.2

Chunks = dict[str, TokenChunk]
"""Row id -> what the row got."""


@dataclass(slots=True, eq=False)
class Group:
    """Rows that share a prompt, on their way into the batch.

    rank: place in the queue, smallest first, in seconds. Waiting would lower all ranks alike, so ageing needs no
    clock: whoever comes later has a larger rank from the start. keeps_place: has waited enough to be left in peace,
    for ageing_s of decoding, when it runs. Without that two requests could take one another's place for ever.
    """

    rows: list[Request]
    arrived_s: float
    rank: float
    keeps_place: bool = False

    @property
    def priority(self) -> int:
        return self.rows[0].spec.priority


class Scheduler:
    """One prompt is prefilled at a time, in chunks between the decode steps. `clock` gives monotonic seconds."""

    def __init__(self, config: EngineConfig, stats: Stats, clock: Callable[[], float] = time.monotonic):
        self._config = config
        self._stats = stats
        self._clock = clock
        self._rows: dict[str, list[Request]] = {}  # request id -> its rows that have not ended
        self._waiting: list[Group] = []  # by rank
        self._prefill: Group | None = None
        self._running: dict[str, Request] = {}  # by row id, in the order in which they joined
        self._drop: list[str] = []
        self._prefill_s_per_token: float | None = None

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their rows, and rows that were preempted."""
        return len(self._waiting)

    @property
    def num_decoding(self) -> int:
        return len(self._running)

    @property
    def num_running(self) -> int:
        """Rows that hold device memory: decoding, or in prefill."""
        prefill = self._prefill
        return len(self._running) + (len(prefill.rows) if prefill is not None else 0)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._drop or self._prefill)

    def add(self, rows: Sequence[Request]) -> None:
        """One request: a row for each choice, at most max_running of them."""
        assert 1 <= len(rows) <= self._config.max_running
        self._rows[rows[0].spec.request_id] = list(rows)
        now = self._clock()
        insort_right(self._waiting, Group(list(rows), now, self._rank(rows[0], now)), key=_rank_of)

    def abort(self, request_id: str) -> None:
        """Forgets all rows of the request, wherever they are; they are freed before the next step. Unknown ids are
        ignored."""
        for row in list(self._rows.get(request_id, ())):
            self._stats.num_aborted += 1
            self._remove(row)

    def preempt(self, row: Request) -> None:
        """Takes a running row's place away: it waits at the head of its priority, and is prefilled again, with what it
        has given out already, to go on where it was."""
        assert row.state is RequestState.RUNNING
        self._leave(row)
        row.state, row.num_prefilled = RequestState.WAITING, 0
        self._stats.num_preempted += 1
        now = self._clock()
        peers = [group.rank for group in self._waiting if group.priority == row.spec.priority]
        rank = min([self._rank(row, now), *peers])
        insort_left(self._waiting, Group([row], now, rank, keeps_place=True), key=_rank_of)

    def schedule(self, num_draft_tokens: int = 0) -> SchedulerOutput:
        """num_draft_tokens: what each decoding row verifies in this step beside its own token."""
        self._admit()
        drop, self._drop = self._drop, []
        return SchedulerOutput(
            drop=drop,
            decode=bool(self._running),
            prefill=tuple(self._prefill.rows) if self._prefill is not None else (),
            max_prefill_tokens=self._prefill_budget(num_draft_tokens),
        )

    def update_decode(self, outputs: Mapping[str, RowOutput]) -> Chunks:
        """What the rows got; outputs of rows that have left meanwhile are nobody's."""
        self._stats.max_rows_in_a_step = max(self._stats.max_rows_in_a_step, len(outputs))
        return {
            row_id: self._take(row, outputs[row_id]) for row_id, row in list(self._running.items()) if row_id in outputs
        }

    def update_prefill(self, rows: Sequence[Request], output: PrefillOutput) -> Chunks:
        for row in rows:
            row.num_prefilled += output.num_tokens
        self._stats.num_prompt_tokens += output.num_tokens
        if output.first is None:
            return {}
        first = [output.first[row.id] for row in rows]
        group = self._prefill
        assert group is not None and all(row.num_prefilled == row.num_prompt_tokens for row in rows)
        self._prefill = None
        for row in rows:
            if row.num_skipped and not row.output_token_ids:
                self._stats.num_sparse += 1
                self._stats.num_skipped_tokens += row.num_skipped
            row.state = RequestState.RUNNING
            row.keep_until_s = self._clock() + self._config.scheduler.ageing_s if group.keeps_place else 0.0
            self._running[row.id] = row
        return {row.id: self._take(row, token) for row, token in zip(rows, first, strict=True)}

    def record_prefill(self, num_tokens: int, seconds: float) -> None:
        """How long so many prompt tokens of one step took. A few say nothing: a forward takes its time in any case."""
        if num_tokens < MIN_MEASURED_TOKENS and self._prefill_s_per_token is not None:
            return
        per_token, before = seconds / num_tokens, self._prefill_s_per_token
        weight = 1.0 if before is None else PREFILL_EMA_WEIGHT
        self._prefill_s_per_token = weight * per_token + (1 - weight) * (before or 0.0)

    def fail_rows(self, error: str) -> Chunks:
        """Ends every row of the decode batch: a failed step may have touched any of them."""
        return self._fail(list(self._running.values()), error)

    def fail_prefill(self, rows: Sequence[Request], error: str) -> Chunks:
        return self._fail(list(rows), error)

    def _rank(self, row: Request, now: float) -> float:
        policy, ageing_s = self._config.scheduler.policy, self._config.scheduler.ageing_s
        if policy == "shortest_first":
            return now + ageing_s * row.num_prompt_tokens / 1000
        if policy == "priority":
            return now + ageing_s * row.spec.priority
        return now

    def _admit(self) -> None:
        """Lets the next request in when all its rows have room, or when it may take somebody's place."""
        if self._prefill is not None or not self._waiting:
            return
        group = self._waiting[0]
        if self._num_missing(group) > 0:
            group = self._make_room()
        if group is None:
            return
        self._waiting.remove(group)
        group.keeps_place |= self._clock() - group.arrived_s >= self._config.scheduler.ageing_s
        for row in group.rows:
            row.state = RequestState.PREFILL
        self._prefill = group

    def _num_missing(self, group: Group) -> int:
        """Rows that would have to leave for this group to have room."""
        return len(self._running) + len(group.rows) - self._config.max_running

    def _make_room(self) -> Group | None:
        """Preempts as many less urgent rows as the most urgent request needs, if there are so many: the least urgent
        first, of those the latest."""
        if self._config.scheduler.policy != "priority":
            return None
        group, now = min(self._waiting, key=lambda group: group.priority), self._clock()
        weaker = [r for r in self._running.values() if r.spec.priority > group.priority and r.keep_until_s <= now]
        num_missing = self._num_missing(group)
        if not 0 < num_missing <= len(weaker):
            return None
        for row in sorted(reversed(weaker), key=lambda row: -row.spec.priority)[:num_missing]:
            self.preempt(row)
        return group

    def _prefill_budget(self, num_draft_tokens: int) -> int:
        """Decoding rows come first; what they leave of the step's tokens is for the chunk, within the stall."""
        whole, limits = self._config.prefill_chunk_tokens, self._config.scheduler
        if not self._running:
            return whole
        budget = min(self._config.prefill_chunk_tokens_busy, whole - len(self._running) * (num_draft_tokens + 1))
        if self._prefill_s_per_token:
            budget = min(budget, int(limits.max_stall_s / self._prefill_s_per_token))
        return max(MIN_PREFILL_TOKENS, budget)

    def _take(self, row: Request, output: RowOutput) -> TokenChunk:
        if output.error is not None:
            return self._fail([row], output.error)[row.id]
        before = len(row.output_token_ids)
        reason = None
        for token_id in output.token_ids:
            reason = FinishReason.ERROR if token_id == NO_TOKEN else row.append(token_id)
            if reason is not None:
                break
        new = tuple(row.output_token_ids[before:])
        num_accepted = min(output.num_accepted, len(new))
        self._stats.num_output_tokens += len(new)
        self._stats.num_drafted += output.num_drafted
        self._stats.num_accepted += num_accepted
        error = "the model gave no finite logits" if reason is FinishReason.ERROR else None
        if reason is not None:
            self._stats.num_failed += error is not None
            self._stats.num_finished += error is None
            self._remove(row)
        logprobs = output.logprobs[: len(new)]
        figures = output.num_drafted, num_accepted, row.num_cached, row.num_skipped
        return TokenChunk(new, reason, error, row.index, logprobs, *figures)

    def _fail(self, rows: list[Request], error: str) -> Chunks:
        self._stats.num_failed += len(rows)
        for row in rows:
            self._remove(row)
        chunk = TokenChunk((), FinishReason.ERROR, error)
        return {
            row.id: replace(chunk, index=row.index, num_cached=row.num_cached, num_skipped=row.num_skipped)
            for row in rows
        }

    def _remove(self, row: Request) -> None:
        self._leave(row)
        row.state = RequestState.FINISHED
        rows = self._rows[row.spec.request_id]
        rows.remove(row)
        if not rows:
            del self._rows[row.spec.request_id]

    def _leave(self, row: Request) -> None:
        """Out of wherever the row is; the runner must drop what it holds for it."""
        if row.state is RequestState.WAITING:
            group = next(group for group in self._waiting if row in group.rows)
            group.rows.remove(row)
            if not group.rows:
                self._waiting.remove(group)
            return
        self._drop.append(row.id)
        if row.state is RequestState.RUNNING:
            del self._running[row.id]
            return
        assert self._prefill is not None
        self._prefill.rows.remove(row)
        if not self._prefill.rows:
            self._prefill = None


def _rank_of(group: Group) -> float:
    return group.rank
