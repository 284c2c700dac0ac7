"""The life cycle of rows: queued, admitted, prefilling, decoding, preempted, finished. Pure; touches no array."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from engine import retry_after
from engine.config import EngineConfig
from engine.core.admission import Admission
from engine.core.batch import NO_TOKEN, PrefillOutput, RowOutput, SchedulerOutput
from engine.core.cost_model import CostModel
from engine.core.memory.budget import MemoryBudget
from engine.core.memory.costs import MemoryCosts
from engine.core.memory.evictable import Evictable, NothingEvictable
from engine.core.memory.victims import Preemption, Victim
from engine.core.prefill import Prefill
from engine.core.prefill_scheduler import NoPrefixes, PrefillScheduler, Prefixes
from engine.core.request import Request, RequestState
from engine.core.request_queue import QueueEntry, RequestQueue
from engine.core.stats import Stats
from engine.core.virtual_token_counter import VirtualTokenCounter
from engine.protocol import FinishReason, QueuedRequest, TokenChunk

MAX_SHOWN = 32
"""How many queued requests the status page lists."""

Chunks = dict[str, TokenChunk]
"""Row id -> the row's new tokens."""


class Scheduler:
    """Decides which rows run. Admission and the choice among prompts in progress have classes of their own.

    Prompts are prefilled in chunks between the decode steps; several may be in progress.

    Args:
        config: The engine's configuration.
        stats: Counters to update.
        clock: Returns monotonic seconds.
        budget: The memory budget; by default every request costs 0 bytes.
        evictable: Cached memory that may be evicted when a row needs it.
        costs: Predicts seconds; `prefills` records measurements in it.
        prefixes: Looks up cached prefixes of prompts; by default nothing is cached.
        has_bursts: Whether several prompts can be computed in one forward.

    Attributes:
        prefills: The prompts in progress; chooses which of them advance in a step.
    """

    def __init__(
        self,
        config: EngineConfig,
        stats: Stats,
        clock: Callable[[], float] = time.monotonic,
        budget: MemoryBudget | None = None,
        evictable: Evictable | None = None,
        costs: CostModel | None = None,
        prefixes: Prefixes | None = None,
        has_bursts: bool = False,
    ):
        costs, prefixes = costs or CostModel(), prefixes or NoPrefixes()
        self._config = config
        self._stats = stats
        self._clock = clock
        self._evictable = evictable or NothingEvictable()
        self.budget = budget or MemoryBudget(MemoryCosts(), 0, config.memory.reserve_tokens)
        self._shares = VirtualTokenCounter()
        self._queue = RequestQueue(config.scheduler, self._shares, clock)
        self._rows: dict[str, list[Request]] = {}  # request id -> its unfinished rows
        self._running: dict[str, Request] = {}  # row id -> decoding row, in the order of joining
        self.prefills = PrefillScheduler(
            config, costs, self.budget, self._running, self._evictable, prefixes, has_bursts
        )
        self._preemption = Preemption(config, self.budget, self._shares, self._running, costs)
        self._admission = Admission(
            config,
            clock,
            costs,
            self.budget,
            self._queue,
            self._running,
            self.prefills,
            self._evictable,
            prefixes,
            self._preemption,
        )
        self._finished: list[str] = []  # finished rows that the runner has not dropped yet
        self._drop: list[str] = []  # preempted rows, dropped at the beginning of the next step
        self._expired: Chunks = {}  # final chunks of rows that expired or ran out of memory
        self._completed: list[Request] = []  # rows with complete answers that the runner has not dropped yet
        self._preempted: list[tuple[list[Request], int]] = []  # see take_preempted

    @property
    def num_waiting(self) -> int:
        """Queued requests, preempted rows included."""
        return len(self._queue)

    @property
    def num_decoding(self) -> int:
        return len(self._running)

    @property
    def num_running(self) -> int:
        """Rows with reserved device memory: decoding or prefilling."""
        return len(self._running) + self.prefills.num_rows

    @property
    def has_work(self) -> bool:
        return bool(self._queue or self._running or self._finished or self._drop or self.prefills.in_progress)

    def queue(self) -> tuple[QueuedRequest, ...]:
        """Return the first MAX_SHOWN queued requests in the order in which they would be admitted now."""
        budget = self.budget
        return tuple(
            QueuedRequest(
                entry.rows[0].spec.request_id,
                position,
                len(entry.rows),
                budget.min_bytes(budget.need(entry.rows)),
                self._queue.waited_s(entry),
                self._queue.expected_wait_s(position),
                entry.has_output,
            )
            for position, entry in enumerate(self._queue.order()[:MAX_SHOWN], 1)
        )

    def expected_wait_s(self) -> float | None:
        """Predict the queueing time of a request that arrives now; None if unknown."""
        return self._queue.expected_wait_s(len(self._queue) + 1) if self._queue else 0.0

    def add(self, rows: Sequence[Request]) -> None:
        """Queue a request, given as one row per choice, at most `max_running` of them."""
        assert 1 <= len(rows) <= self._config.max_running
        spec = rows[0].spec
        self._rows[spec.request_id] = list(rows)
        self._shares.opened(spec.client, len(rows))
        self._queue.push(rows)

    def abort(self, request_id: str) -> None:
        """Remove all rows of a request, in whatever state they are. Unknown ids are ignored."""
        for row in list(self._rows.get(request_id, ())):
            self._stats.num_aborted += 1
            self._remove(row)

    def preempt(self, row: Request) -> None:
        """Preempt a decoding row: requeue it at the head of its priority class.

        Its state is snapshotted where possible. Once it is admitted again, only tokens of its prompt and answer without
        a stored state are computed again, and decoding continues after them.
        """
        assert row.state is RequestState.RUNNING
        self._stats.num_preempted += 1
        self._requeue([row])

    def take_finished(self) -> list[str]:
        """Return the rows that have finished since the last call; the runner must drop them before it computes."""
        gone, self._finished = self._finished, []
        self._release(gone)
        return gone

    def schedule(self, num_draft_tokens: int = 0) -> SchedulerOutput:
        """Decide the first half of a step: expiry, reservations, admission and merges of decode groups.

        Args:
            num_draft_tokens: Draft tokens that each decoding row verifies in this step.
        """
        gone = self.take_finished()  # rows that a failed step has finished since the caller's own call
        self.budget.end_chunk()
        self._expire()
        self.prefills.begin_step(num_draft_tokens)
        merge = None
        if self._extend_rows():
            self._admit(may_preempt=True)
            merge = self._admission.merge_of_groups()
        drop, self._drop = self._drop, []
        return SchedulerOutput([*gone, *drop], bool(self._running), [] if merge is None else [merge])

    def next_prompt(self) -> Sequence[Request]:
        """Return the rows of the next prompt to advance in this step; empty if the step has no time or prompt left."""
        if self.prefills.is_step_over:
            return ()
        if self.prefills.has_started_step:
            self._admit(may_preempt=False)
        prefill = self.prefills.choose()
        return () if prefill is None else tuple(prefill.rows)

    def take_completed(self) -> list[Request]:
        """Return the rows whose answers are complete since the last call. The runner still has them."""
        completed, self._completed = self._completed, []
        return completed

    def take_preempted(self) -> list[tuple[list[Request], int]]:
        """Return the rows preempted since the last call; the runner still has them.

        Returns:
            A prompt in progress as all of its rows with the number of computed tokens; a decoding row alone, with 0.
        """
        displaced, self._preempted = self._preempted, []
        return displaced

    def take_expired(self) -> Chunks:
        """Return the final chunks of rows that expired in the queue or ran out of memory since the last call."""
        ended, self._expired = self._expired, {}
        return ended

    def update_decode(self, outputs: Mapping[str, RowOutput]) -> Chunks:
        """Give the rows their new tokens. Outputs of rows that are no longer running are discarded."""
        self._stats.max_rows_in_a_step = max(self._stats.max_rows_in_a_step, len(outputs))
        return {
            row_id: self._take(row, outputs[row_id]) for row_id, row in list(self._running.items()) if row_id in outputs
        }

    def update_preempted(self, outputs: Mapping[str, RowOutput], rows: Sequence[Request]) -> Chunks:
        """Give preempted rows the tokens of the step in flight; some rows may finish with them."""
        chunks = {row.id: self._take(row, outputs[row.id]) for row in rows if row.id in outputs}
        for row in rows:  # generated tokens are charged as output, not again as prompt
            row.num_charged = max(row.num_charged, row.num_prompt_tokens)
        return chunks

    def update_prefill(self, rows: Sequence[Request], output: PrefillOutput) -> Chunks:
        """Account for a chunk of the prompt that these rows share; after its last chunk they join the decode batch."""
        for row in rows:
            row.num_prefilled += output.num_tokens
        self._stats.num_prompt_tokens += output.num_tokens
        num_new = min(output.num_tokens, max(0, rows[0].num_prefilled - rows[0].num_charged))
        self._shares.charge(rows[0].spec.client, num_prompt_tokens=num_new)
        if output.first is None:
            return {}
        assert all(row.num_prefilled == row.num_prompt_tokens for row in rows)
        first = [output.first[row.id] for row in rows]
        self._join(rows)
        return {row.id: self._take(row, token) for row, token in zip(rows, first, strict=True)}

    def _join(self, rows: Sequence[Request]) -> None:
        self.budget.release_prefill(rows[0])
        keeps_place, now = self.prefills.complete(rows[0]).is_protected, self._clock()
        for row in rows:
            if row.num_skipped and not row.output_token_ids:
                self._stats.num_sparse += 1
                self._stats.num_skipped_tokens += row.num_skipped
            row.state, row.joined_s = RequestState.RUNNING, now
            row.keep_until_s = now + self._config.scheduler.ageing_s if keeps_place else 0.0
            self._running[row.id] = row
        self.prefills.limit_step()

    def fail_rows(self, error: str) -> Chunks:
        """Fail every decoding row after the runner was reset: a failed step may have touched any of them."""
        failed = self._fail(list(self._running.values()), error, retry_after.STEP_FAILED_S)
        self._release(list(failed))
        return failed

    def fail_prefill(self, rows: Sequence[Request], error: str, retry_after_s: float | None = None) -> Chunks:
        """Fail the rows of a prompt in progress. retry_after_s: see TokenChunk."""
        return self._fail(list(rows), error, retry_after_s)

    def _expire(self) -> None:
        for entry in self._queue.expired():
            limit_s = self._config.scheduler.queue_timeout_s
            error = (
                f"waited {self._queue.waited_s(entry):.0f} s in the queue; the limit is {limit_s:g} s (queue_timeout_s)"
            )
            for row in list(entry.rows):
                self._stats.num_expired += 1
                self._remove(row)
                chunk = TokenChunk((), FinishReason.EXPIRED, error, row.index)
                self._expired[row.id] = replace(
                    chunk, retry_after_s=self.expected_wait_s() or retry_after.STEP_FAILED_S
                )

    def _extend_rows(self) -> bool:
        """Extend the reservations of rows that have used theirs up, the oldest row first, preempting others if needed.

        Returns:
            False if a prompt in progress was preempted: none is admitted before the runner has dropped it.
        """
        keeps = True
        for row in list(self._running.values()):
            while row.id in self._running and self.budget.needs_more_slots(row) and not self._extend_row(row):
                if len(self._running) == 1 and not self.prefills.in_progress:
                    self._expired |= self._fail_out_of_memory([row], self.budget.extend(row))
                else:
                    victim = self._preemption.choose_for_growth(self.prefills.in_progress)
                    keeps &= not isinstance(victim, Prefill)
                    if isinstance(victim, Request):
                        victim.num_growth_preemptions += 1
                    self._preempt(victim)
        return keeps

    def _preempt(self, victim: Victim) -> None:
        if isinstance(victim, Prefill):
            self._preempt_prefill(victim)
        else:
            self.preempt(victim)

    def _extend_row(self, row: Request) -> bool:
        missing = self.budget.extend(row)
        return not missing or (self._evictable.evict(missing) and not self.budget.extend(row))

    def _preempt_prefill(self, prefill: Prefill) -> None:
        """Preempt a prompt in progress: requeue it and keep the snapshots that it has stored."""
        rows, arrived_s = list(prefill.rows), prefill.entry.arrived_s
        rows[0].num_restarts += rows[0].num_prefilled > 0 and not rows[0].num_cached
        self._stats.num_preempted += len(rows)
        self._requeue(rows, None if rows[0].output_token_ids else arrived_s)

    def _requeue(self, rows: Sequence[Request], arrived_s: float | None = None) -> None:
        """Requeue preempted rows. Their memory is released now, so the runner must drop them first in the next step."""
        is_decoding, num_computed = rows[0].state is RequestState.RUNNING, rows[0].num_prefilled
        if is_decoding or num_computed:
            self._preempted.append((list(rows), 0 if is_decoding else num_computed))
        for row in rows:
            has_run = row.state is RequestState.RUNNING
            row.num_charged = max(row.num_charged, row.num_prompt_tokens if has_run else row.num_prefilled)
            self._remove_running(row)
            row.state, row.num_prefilled = RequestState.WAITING, 0
        row_ids = [self._finished.pop() for _ in rows]
        self._release(row_ids)
        self._drop += row_ids
        self._queue.requeue(rows, arrived_s)

    def _release(self, row_ids: Sequence[str]) -> None:
        for row_id in row_ids:
            self.budget.release(row_id)

    def _fail_out_of_memory(self, rows: list[Request], missing: int) -> Chunks:
        """Fail the only request in the engine: its memory was checked on arrival and should have sufficed."""
        limit = self.budget.limit_bytes
        error = f"the request needs {missing} more bytes of memory; the budget is {limit} bytes"
        return self._fail(rows, error, retry_after.STEP_FAILED_S)

    def _admit(self, may_preempt: bool) -> None:
        """Admit queued requests while the prompts in progress leave time in the step, or if their prompts are shorter.

        Args:
            may_preempt: Whether the step has not begun, so that rows may be preempted for an urgent request.
        """
        admission = self._admission
        while (entry := admission.next_entry()) is not None:
            if not admission.reserve(entry):
                if may_preempt and admission.is_idle:
                    self._expired |= self._fail_out_of_memory(list(entry.rows), self.budget.shortfall_bytes(entry.rows))
                    return
                entry = self._preempt_or_backfill(entry) if may_preempt else None
            if entry is None:
                return
            self._start_prefill(entry)
            if self._preempted:  # preempted rows cannot be admitted again before the runner has dropped them
                return

    def _preempt_or_backfill(self, head: QueueEntry) -> QueueEntry | None:
        """Return a request with reserved memory when the head does not fit: after preemption, or one that backfills."""
        entry, victims = self._admission.choose_victims(head)
        for victim in victims:
            self._preempt(victim)
        if victims and self._admission.reserve(entry, may_wait=False):
            return entry
        return None if victims else self._admission.choose_backfill(head)

    def _start_prefill(self, entry: QueueEntry) -> None:
        """Admit a request whose memory is reserved, and begin its prefill."""
        self._queue.remove_admitted(entry)
        entry.is_protected |= self._queue.waited_s(entry) >= self._config.scheduler.ageing_s
        for row in entry.rows:
            row.state = RequestState.PREFILL
        self.prefills.add(entry)

    def _take(self, row: Request, output: RowOutput) -> TokenChunk:
        """Apply a step's output to its row and return the chunk to publish."""
        if output.error is not None:
            return self._fail([row], output.error)[row.id]
        if row.spec.pooling is not None:
            return self._finish_embedding(row, output)
        new, reason = _appended(row, output.token_ids)
        num_accepted = min(output.num_accepted, len(new))
        self._stats.num_output_tokens += len(new)
        self._shares.charge(row.spec.client, num_output_tokens=len(new))
        self._stats.num_drafted += output.num_drafted
        self._stats.num_accepted += num_accepted
        error = "the highest logit is not finite" if reason is FinishReason.ERROR else None
        if reason is not None:
            self._finish(row, is_failed=error is not None)
        return TokenChunk(
            token_ids=new,
            finish_reason=reason,
            error=error,
            index=row.index,
            logprobs=output.logprobs[: len(new)],
            num_drafted=output.num_drafted,
            num_accepted=num_accepted,
            num_cached=row.num_cached,
            num_skipped=row.num_skipped,
        )

    def _finish(self, row: Request, is_failed: bool) -> None:
        self._stats.num_failed += is_failed
        self._stats.num_finished += not is_failed
        self._remove(row)
        if not is_failed:
            self._completed.append(row)

    def _finish_embedding(self, row: Request, output: RowOutput) -> TokenChunk:
        if output.embedding is None:
            return self._fail([row], "the hidden states contain NaN or inf")[row.id]
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
        self._remove_running(row)
        row.state = RequestState.FINISHED
        self._shares.closed(row.spec.client)
        rows = self._rows[row.spec.request_id]
        rows.remove(row)
        if not rows:
            del self._rows[row.spec.request_id]

    def _remove_running(self, row: Request) -> None:
        """Remove a row from the queue, the prompts in progress or the decode batch."""
        if row.state is RequestState.WAITING:
            self._queue.remove(row)
            return
        self._finished.append(row.id)
        if row.state is RequestState.RUNNING:
            del self._running[row.id]
        else:
            self.prefills.remove(row)


def _appended(row: Request, token_ids: Sequence[int]) -> tuple[tuple[int, ...], FinishReason | None]:
    """Append tokens to a row until it finishes; return those that were kept, and the finish reason."""
    num_before, reason = len(row.output_token_ids), None
    for token_id in token_ids:
        reason = FinishReason.ERROR if token_id == NO_TOKEN else row.append(token_id)
        if reason is not None:
            break
    return tuple(row.output_token_ids[num_before:]), reason
