"""Who runs in the next step: the queue, the rows, and one token budget per step. Pure; touches no array."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from engine.config import EngineConfig
from engine.core.batch import NO_TOKEN, PrefillOutput, RowOutput, SchedulerOutput
from engine.core.client_shares import ClientShares
from engine.core.memory.budget import MemoryBudget
from engine.core.memory.costs import MemoryCosts
from engine.core.memory.victims import Preemption
from engine.core.request import Request, RequestState
from engine.core.request_queue import Group, RequestQueue
from engine.core.stats import Stats
from engine.protocol import FinishReason, QueuedRequest, TokenChunk

MIN_PREFILL_TOKENS = 16
"""A chunk is never smaller, however much else there is to do."""

MIN_MEASURED_TOKENS = 64
PREFILL_EMA_WEIGHT = 0.2

MAX_SHOWN = 32
"""Of the queue."""

MAX_PASSING = 8
"""Of the queue: those behind the first that are looked at in a step, whether there is room for them."""

RETRY_S = 1.0

Chunks = dict[str, TokenChunk]
"""Row id -> what the row got."""


class Spare(Protocol):
    """Memory that no answer needs, see core/memory/evictable.py."""

    @property
    def free_bytes(self) -> int: ...
    def free(self, num_bytes: int) -> bool: ...


class Nothing:
    """Nothing is spare."""

    free_bytes = 0

    def free(self, num_bytes: int) -> bool:
        return False


class Scheduler:
    """One prompt is prefilled at a time, in chunks between the decode steps. `clock` gives monotonic seconds.

    budget: the books of the memory; default: one where nothing costs anything. spare: what leaves when a row needs it.
    """

    def __init__(
        self,
        config: EngineConfig,
        stats: Stats,
        clock: Callable[[], float] = time.monotonic,
        budget: MemoryBudget | None = None,
        spare: Spare | None = None,
    ):
        self._config = config
        self._stats = stats
        self._clock = clock
        self._spare = spare or Nothing()
        limits = config.memory.reserve_tokens, config.prefill_chunk_tokens_busy
        self.budget = budget or MemoryBudget(MemoryCosts(), 0, *limits)
        self._shares = ClientShares()
        self._queue = RequestQueue(config.scheduler, self._shares, clock)
        self._rows: dict[str, list[Request]] = {}  # request id -> its rows that have not ended
        self._prefill: Group | None = None
        self._running: dict[str, Request] = {}  # by row id, in the order in which they joined
        self._preemption = Preemption(config, self.budget, self._shares, self._running)
        self._gone: list[str] = []  # rows that have ended, and are still in the runner
        self._drop: list[str] = []  # rows that have lost their place
        self._ended: Chunks = {}  # rows that have ended outside of a step
        self._prefill_s_per_token: float | None = None

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their rows, and rows that were preempted."""
        return len(self._queue)

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
        return bool(self._queue or self._running or self._gone or self._drop or self._prefill)

    def queue(self) -> tuple[QueuedRequest, ...]:
        """The first of those that wait, in the order in which they would be let in now."""
        budget = self.budget
        return tuple(
            QueuedRequest(
                group.rows[0].spec.request_id,
                position,
                len(group.rows),
                budget.alone(budget.need(group.rows)),
                self._queue.waited_s(group),
                self._queue.expected_wait_s(position),
                group.has_begun,
            )
            for position, group in enumerate(self._queue.order()[:MAX_SHOWN], 1)
        )

    def expected_wait_s(self) -> float | None:
        """Of a request that came now."""
        return self._queue.expected_wait_s(len(self._queue) + 1) if self._queue else 0.0

    def add(self, rows: Sequence[Request]) -> None:
        """One request: a row for each choice, at most max_running of them."""
        assert 1 <= len(rows) <= self._config.max_running
        spec = rows[0].spec
        self._rows[spec.request_id] = list(rows)
        self._shares.opened(spec.client, len(rows))
        self._queue.push(rows)

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
        self._stats.num_preempted += 1
        self._put_back([row])

    def gone(self) -> list[str]:
        """Rows that have ended. Their memory is free when the runner has dropped them: then tell `dropped`."""
        gone, self._gone = self._gone, []
        return gone

    def dropped(self, row_ids: Sequence[str]) -> None:
        for row_id in row_ids:
            self.budget.release(row_id)

    def schedule(self, num_draft_tokens: int = 0) -> SchedulerOutput:
        """num_draft_tokens: what each decoding row verifies in this step beside its own token."""
        gone = self.gone()  # since the caller has asked: a step may have failed
        self.dropped(gone)
        self.budget.shrink_step()
        self._expire()
        if self._extend():
            self._admit()
        drop, self._drop = self._drop, []
        prefill = self._prefill
        return SchedulerOutput(
            drop=[*gone, *drop],
            decode=bool(self._running),
            prefill=tuple(prefill.rows) if prefill is not None else (),
            max_prefill_tokens=self._prefill_budget(num_draft_tokens),
        )

    def take_ended(self) -> Chunks:
        """Of rows that have ended outside of a step: they waited for too long, or there was no memory for them."""
        ended, self._ended = self._ended, {}
        return ended

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
        num_new = min(output.num_tokens, max(0, rows[0].num_prefilled - rows[0].num_charged))
        self._shares.charge(rows[0].spec.client, num_prompt_tokens=num_new)
        if output.first is None:
            return {}
        self.budget.joined()
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
        return self._fail(list(self._running.values()), error, RETRY_S)

    def fail_prefill(self, rows: Sequence[Request], error: str, retry_after_s: float | None = None) -> Chunks:
        """retry_after_s: see TokenChunk."""
        return self._fail(list(rows), error, retry_after_s)

    def _expire(self) -> None:
        for group in self._queue.expired():
            limit_s = self._config.scheduler.queue_timeout_s
            error = (
                f"waited {self._queue.waited_s(group):.0f} s for a place, the limit is {limit_s:g} s (queue_timeout_s)"
            )
            for row in list(group.rows):
                self._stats.num_expired += 1
                self._remove(row)
                chunk = TokenChunk((), FinishReason.EXPIRED, error, row.index)
                self._ended[row.id] = replace(chunk, retry_after_s=self.expected_wait_s() or RETRY_S)

    def _extend(self) -> bool:
        """Rows that have used up what they had reserved get more, the oldest first, the youngest make room. False if
        the prompt in progress had to: nobody is let in before the runner has dropped it."""
        keeps = True
        for row in list(self._running.values()):
            while row.id in self._running and self.budget.is_used_up(row) and not self._has_grown(row):
                if self._prefill is not None:
                    self._give_up_prefill()
                    keeps = False
                elif len(self._running) > 1:
                    self.preempt(list(self._running.values())[-1])
                else:
                    self._ended |= self._out_of_memory([row], self.budget.extend(row))
        return keeps

    def _has_grown(self, row: Request) -> bool:
        missing = self.budget.extend(row)
        return not missing or (self._spare.free(missing) and not self.budget.extend(row))

    def _give_up_prefill(self) -> None:
        """The prompt in progress waits again; what it has left in the prefix cache stays."""
        assert self._prefill is not None
        rows, arrived_s = list(self._prefill.rows), self._prefill.arrived_s
        self._stats.num_preempted += len(rows)
        self._put_back(rows, None if rows[0].output_token_ids else arrived_s)

    def _put_back(self, rows: Sequence[Request], arrived_s: float | None = None) -> None:
        """Rows whose memory is somebody else's from now on: they are dropped before anything else is done."""
        for row in rows:
            has_run = row.state is RequestState.RUNNING
            row.num_charged = max(row.num_charged, row.num_prompt_tokens if has_run else row.num_prefilled)
            self._leave(row)
            self.budget.release(row.id)
            row.state, row.num_prefilled = RequestState.WAITING, 0
        self._drop += [self._gone.pop() for _ in rows]
        self._queue.put_back(rows, arrived_s)

    def _out_of_memory(self, rows: list[Request], missing: int) -> Chunks:
        """Of a request that has the engine to itself: what was let in should have fit."""
        return self._fail(rows, f"{missing} bytes of memory are missing, of {self.budget.limit_bytes} in all", RETRY_S)

    def _admit(self) -> None:
        """Lets the next request in when all its rows have room, or when it may take somebody's place."""
        if self._prefill is not None or not self._queue:
            return
        head = self._queue.first()
        if self._has_reserved(head):
            self._let_in(head)
        elif not self._running:
            self._ended |= self._out_of_memory(list(head.rows), self.budget.missing(head.rows))
        elif (urgent := self._displace_for(head)) is not None:
            self._let_in(urgent)
        else:
            self._let_one_pass(head)

    def _let_in(self, group: Group) -> None:
        """Of which the rows are reserved."""
        self._queue.let_in(group)
        group.keeps_place |= self._queue.waited_s(group) >= self._config.scheduler.ageing_s
        for row in group.rows:
            row.state = RequestState.PREFILL
        self._prefill = group

    def _has_reserved(self, group: Group) -> bool:
        """Snapshots leave for it where that suffices."""
        if not self._preemption.has_rows(group):
            return False
        missing = self.budget.reserve(group.rows)
        return not missing or (self._spare.free(missing) and not self.budget.reserve(group.rows))

    def _displace_for(self, head: Group) -> Group | None:
        """Policy `priority`: the most urgent request takes the places of less urgent rows. Else the first one, when it
        has waited for ageing_s, those of clients that hold more than their share. Returns who may go in now."""
        limits, now, spare = self._config.scheduler, self._clock(), self._spare.free_bytes
        group, victims = head, list[Request]()
        if limits.policy == "priority":
            group = self._queue.most_urgent
            victims = self._preemption.for_urgent(group, now, spare)
        elif limits.fairness != "off" and self._queue.waited_s(head) >= limits.ageing_s:
            victims = self._preemption.for_share(head, now, spare)
        for row in victims:
            self.preempt(row)
        return group if victims and self._has_reserved(group) else None

    def _let_one_pass(self, head: Group) -> None:
        """While the memory of the first one in the queue is not free, others that need less may pass it for ageing_s.
        Nobody passes who would take the rows that it waits for."""
        if not self._preemption.has_rows(head):
            return
        now = self._clock()
        head.blocked_s = now if head.blocked_s is None else head.blocked_s
        if now - head.blocked_s >= self._config.scheduler.ageing_s:
            return
        for group in self._queue.order()[1 : 1 + MAX_PASSING]:
            if self._preemption.has_rows(group) and not self.budget.reserve(group.rows):
                return self._let_in(group)

    def _prefill_budget(self, num_draft_tokens: int) -> int:
        """Decoding rows come first; what they leave of the step's tokens is for the chunk, within the stall, and
        within the memory for its intermediate results."""
        budget, limits = self._config.prefill_chunk_tokens, self._config.scheduler
        if self._running:
            left = budget - len(self._running) * (num_draft_tokens + 1)
            budget = min(self._config.prefill_chunk_tokens_busy, left)
            if self._prefill_s_per_token:
                budget = min(budget, int(limits.max_stall_s / self._prefill_s_per_token))
            budget = max(MIN_PREFILL_TOKENS, budget)
        if self._prefill is None:
            return budget
        row = self._prefill.rows[0]
        return self.budget.max_chunk(row.num_prompt_tokens, min(budget, row.num_prompt_tokens - row.num_prefilled))

    def _take(self, row: Request, output: RowOutput) -> TokenChunk:
        if output.error is not None:
            return self._fail([row], output.error)[row.id]
        if row.spec.pooling is not None:
            return self._finish_embedding(row, output)
        before = len(row.output_token_ids)
        reason = None
        for token_id in output.token_ids:
            reason = FinishReason.ERROR if token_id == NO_TOKEN else row.append(token_id)
            if reason is not None:
                break
        new = tuple(row.output_token_ids[before:])
        num_accepted = min(output.num_accepted, len(new))
        self._stats.num_output_tokens += len(new)
        self._shares.charge(row.spec.client, num_output_tokens=len(new))
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

    def _finish_embedding(self, row: Request, output: RowOutput) -> TokenChunk:
        if output.embedding is None:
            return self._fail([row], "the model gave no finite hidden states")[row.id]
        self._stats.num_finished += 1
        self._remove(row)
        return TokenChunk((), FinishReason.STOP, index=row.index, embedding=output.embedding)

    def _fail(self, rows: list[Request], error: str, retry_after_s: float | None = None) -> Chunks:
        self._stats.num_failed += len(rows)
        for row in rows:
            self._remove(row)
        chunk = TokenChunk((), FinishReason.ERROR, error, retry_after_s=retry_after_s)
        return {
            row.id: replace(chunk, index=row.index, num_cached=row.num_cached, num_skipped=row.num_skipped)
            for row in rows
        }

    def _remove(self, row: Request) -> None:
        self._leave(row)
        row.state = RequestState.FINISHED
        self._shares.closed(row.spec.client)
        rows = self._rows[row.spec.request_id]
        rows.remove(row)
        if not rows:
            del self._rows[row.spec.request_id]

    def _leave(self, row: Request) -> None:
        """Out of wherever the row is; the runner must drop what it holds for it."""
        if row.state is RequestState.WAITING:
            self._queue.remove(row)
            return
        self._gone.append(row.id)
        if row.state is RequestState.RUNNING:
            del self._running[row.id]
            return
        assert self._prefill is not None
        self._prefill.rows.remove(row)
        if not self._prefill.rows:
            self._prefill = None
