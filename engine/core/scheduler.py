"""The life cycle of rows: queued, admitted, prefilling, decoding, preempted, finished. Pure; touches no array."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from engine import retry_after
from engine.core.admission import Admission
from engine.core.preemption import Preemption, Victim
from engine.core.prefill_scheduler import PrefillScheduler
from engine.core.prompt import Prompt
from engine.core.prompt_queue import PromptQueue
from engine.core.request_figures import RequestFigures
from engine.core.row import Row, RowState, by_prompt
from engine.core.runner import NO_TOKEN, PLAIN, Drafts, PrefillOutput, RowOutput
from engine.core.scheduler_context import SchedulerContext
from engine.core.scheduler_output import PreemptedRows, Published, ReleasedRows
from engine.core.timeline_recorder import TimelineRecorder
from engine.core.virtual_token_counter import VirtualTokenCounter
from engine.protocol import FinishReason, TokenChunk
from engine.status import EngineCounters
from engine.timeline import PreemptionReason, Queued


class Scheduler:
    """Decides which rows run. Admission and the choice among prompts in progress have classes of their own.

    Prompts are prefilled in chunks between the decode steps; several may be in progress.

    Args:
        context: Configuration, clock, cost model, memory budget, evictable memory and prefix lookup.
        stats: Counters to update.

    Attributes:
        budget: The memory budget.
        queue: The queued prompts.
        prefills: The prompts in progress; chooses which of them advance in a step.
        figures: Histograms and counters over the rows that have ended.
    """

    def __init__(self, context: SchedulerContext, stats: EngineCounters):
        self._config = context.config
        self._clock = context.clock
        self._evictable = context.evictable
        self.budget = context.budget
        self._stats = stats
        self.figures = RequestFigures()
        self._shares = VirtualTokenCounter()
        self.queue = PromptQueue(context.config.scheduler, self._shares, context.clock)
        self._rows: dict[str, list[Row]] = {}  # request id -> its unfinished rows
        self._running: dict[str, Row] = {}  # row id -> decoding row, in the order of joining
        self.prefills = PrefillScheduler(context, self._running)
        self._admission = Admission(context, self.queue, self._running, self.prefills)
        self._preemption = Preemption(context, self.queue, self._running, self.prefills, self._shares)
        self._released = ReleasedRows()

    @property
    def num_waiting(self) -> int:
        """Queued prompts, those of preempted rows included."""
        return len(self.queue)

    @property
    def decoding(self) -> list[Row]:
        """The rows of the decode batch."""
        return list(self._running.values())

    @property
    def num_decoding(self) -> int:
        return len(self._running)

    @property
    def num_running(self) -> int:
        """Rows with reserved device memory: decoding or prefilling."""
        return len(self._running) + self.prefills.num_rows

    @property
    def has_work(self) -> bool:
        return bool(self.queue or self._running or self._released.row_ids or self.prefills.in_progress)

    def expected_wait_s(self) -> float | None:
        """Predict the queueing time of a request that arrives now; None if unknown."""
        return self.queue.expected_wait_s(len(self.queue) + 1) if self.queue else 0.0

    def add(self, rows: Sequence[Row], arrived_s: float | None = None) -> None:
        """Queue a request; answers that another engine began come before all prompts of the same priority.

        The prompt of such a request is charged to its client once, and the tokens of the other engine are not charged:
        that engine has charged them as output.

        Args:
            rows: One row per open choice, at most `max_running`.
            arrived_s: When the request arrived, on the scheduler's clock; None for now.
        """
        assert 1 <= len(rows) <= self._config.max_running
        spec, now, phase = rows[0].spec, self._clock(), self._queued()
        for row in rows:
            row.record = TimelineRecorder(now if arrived_s is None else arrived_s, row.matcher is not None)
            row.record.queued(now, replace(phase))
        self._rows[spec.request_id] = list(rows)
        self._shares.opened(spec.client, len(rows))
        if not spec.progress:
            self.queue.push(rows)
            return
        first, *others = by_prompt(rows)
        for sharing in others:
            for row in sharing:
                row.num_charged = row.num_input_tokens
        for sharing in reversed([first, *others]):  # each is queued before the ones after it
            self.queue.requeue(sharing)

    def abort(self, request_id: str) -> None:
        """Remove all rows of a request, in whatever state they are. Unknown ids are ignored."""
        for row in list(self._rows.get(request_id, ())):
            self._stats.num_aborted += 1
            self._remove(row, FinishReason.ABORT)
            self._released.aborted[row.id] = _last_chunk(row, FinishReason.ABORT)

    def suspend_all(self) -> None:
        """Return all decoding rows and prompts in progress to the queue, with their snapshots kept as by `preempt`."""
        for victim in (*self.prefills.in_progress, *self._running.values()):
            self._requeue(victim)

    def move_queued(self) -> Published:
        """End all queued rows, so that another engine continues them; return their last chunks."""
        rows = [row for prompt in self.queue.order() for row in prompt.rows]
        self._stats.num_moved += len(rows)
        for row in rows:
            self._remove(row, FinishReason.MOVED)
        return {row.id: _last_chunk(row, FinishReason.MOVED) for row in rows}

    def preempt(self, victim: Victim, reason: PreemptionReason) -> None:
        """Preempt a decoding row or a prompt in progress: requeue its rows at the head of their priority class.

        Their state is snapshotted where possible. Once they are admitted again, only tokens of prompt and answer
        without a stored state are computed again. Their memory is released now, so the runner must drop them before the
        next forward.
        """
        self._stats.num_preempted += len(self._requeue(victim, reason))

    def readmit(self, prompt: Prompt) -> None:
        """Return a prompt in progress that has not begun to the queue, as its memory was taken by others meanwhile.

        No further prompt advances in this step, before the runner has dropped it. From now on the prompt's reservation
        covers all of its tokens: what it cannot take over, it could not take over again.
        """
        self.prefills.step.close()
        for row in self._requeue(prompt):
            row.may_take_over = False

    def _requeue(self, victim: Victim, reason: PreemptionReason | None = None) -> list[Row]:
        """Return a victim's rows to the queue, and return them. reason: None if they are not preempted for others."""
        now, phase = self._clock(), self._queued()
        if isinstance(victim, Prompt):
            rows, arrived_s = list(victim.rows), victim.arrived_s
            victim.row.num_restarts += victim.has_started and not victim.row.num_cached
            released = PreemptedRows(rows, victim, was_decoding=False)
            self.prefills.in_progress.remove(victim)
        else:
            rows, arrived_s, released = [victim], None, PreemptedRows([victim], victim.prompt, was_decoding=True)
            del self._running[victim.id]
        self._released.preempted.append(released)
        for row in rows:
            row.record.queued(now, replace(phase, preempted_by=reason))
            num_computed = row.num_tokens if released.was_decoding else row.prompt.num_prefilled
            row.num_charged = max(row.num_charged, num_computed)
            row.state = RowState.WAITING
            self.budget.release(row.id)
        self.queue.requeue(rows, None if rows[0].output_token_ids else arrived_s)
        return rows

    def take_released(self) -> ReleasedRows:
        """Return the rows released since the last call; they must be dropped before `schedule`."""
        released, self._released = self._released, ReleasedRows()
        return released

    def schedule(self, drafts: Drafts = PLAIN) -> ReleasedRows:
        """Decide the first half of a step: expiry, reservations and admission. All running rows decode then.

        Chunks of prompts follow one by one, see `next_prompt`.

        Args:
            drafts: The drafts that each decoding row verifies in this step.

        Returns:
            Rows that must be dropped before the decode step.
        """
        self._expire()
        self.prefills.begin_step(drafts)
        if self._extend_rows():
            self._admit(may_preempt=True)
        return self.take_released()

    def next_prompt(self) -> Prompt | None:
        """Return the next prompt to advance in this step; None if the step has no time or prompt left."""
        if self.prefills.step.is_over:
            return None
        if self.prefills.step.has_started:
            self._admit(may_preempt=False)
        return self.prefills.choose()

    def update_decode(self, outputs: Mapping[str, RowOutput]) -> Published:
        """Give the rows their new tokens. Outputs of rows that are no longer running are discarded."""
        self._stats.max_rows_in_a_step = max(self._stats.max_rows_in_a_step, len(outputs))
        now = self._clock()
        return {
            row_id: self._take(row, outputs[row_id], now)
            for row_id, row in list(self._running.items())
            if row_id in outputs
        }

    def update_preempted(self, outputs: Mapping[str, RowOutput], rows: Sequence[Row]) -> Published:
        """Give preempted rows the tokens of the step in flight; some rows may finish with them."""
        now = self._clock()
        chunks = {row.id: self._take(row, outputs[row.id], now) for row in rows if row.id in outputs}
        for row in rows:  # generated tokens are charged as output, not again as prompt
            row.num_charged = max(row.num_charged, row.num_tokens)
        return chunks

    def update_prefill(self, prompt: Prompt, output: PrefillOutput) -> Published:
        """Account for a chunk of a prompt; after its last chunk its rows join the decode batch."""
        prompt.num_prefilled += output.num_tokens
        self._stats.num_prompt_tokens += output.num_tokens
        own = min(prompt.num_prefilled, prompt.row.num_input_tokens)  # generated tokens are charged as output
        num_new = min(output.num_tokens, max(0, own - prompt.row.num_charged))
        self._shares.charge(prompt.client, num_prompt_tokens=num_new)
        if output.first is None:
            return {}
        assert not prompt.num_left
        first = [(row, output.first[row.id]) for row in prompt.rows]
        now = self._clock()
        if not prompt.row.num_generated:
            self.figures.prompt_done(prompt.row)
        self._join(prompt, now)
        return {row.id: self._take(row, token, now, is_step=False) for row, token in first}

    def _join(self, prompt: Prompt, now: float) -> None:
        self.budget.release_prefill(prompt.row)
        self.prefills.in_progress.remove(prompt)
        for row in prompt.rows:
            row.record.joined(now, self.prefills.total_s)
            if row.num_skipped and not row.num_generated:
                self._stats.num_sparse += 1
                self._stats.num_skipped_tokens += row.num_skipped
            row.state, row.joined_s = RowState.RUNNING, now
            row.keep_until_s = now + self._config.scheduler.ageing_s if prompt.is_protected else 0.0
            self._running[row.id] = row
        self.prefills.step.limit(self._config.scheduler.max_stall_s)  # rows decode now

    def fail_rows(self, error: str) -> Published:
        """Fail every decoding row after the runner was reset: a failed step may have touched any of them."""
        return self._fail(list(self._running.values()), error, retry_after.STEP_FAILED_S)

    def fail_prefill(self, prompt: Prompt, error: str, retry_after_s: float | None = None) -> Published:
        """Fail the rows of a prompt in progress. retry_after_s: see TokenChunk."""
        return self._fail(list(prompt.rows), error, retry_after_s)

    def _expire(self) -> None:
        for prompt in self.queue.expired():
            limit_s = self._config.scheduler.queue_timeout_s
            waited_s = self.queue.waited_s(prompt)
            error = f"waited {waited_s:.0f} s in the queue; the limit is {limit_s:g} s (queue_timeout_s)"
            for row in list(prompt.rows):
                self._stats.num_expired += 1
                self._remove(row, FinishReason.EXPIRED)
                retry_after_s = self.expected_wait_s() or retry_after.STEP_FAILED_S
                self._released.failed[row.id] = _last_chunk(row, FinishReason.EXPIRED, error, retry_after_s)

    def _extend_rows(self) -> bool:
        """Extend the reservations of rows that have used theirs up, the oldest row first, preempting others if needed.

        Returns:
            False if a prompt in progress was preempted, or the only row has failed: no prompt is admitted before the
            runner has dropped it.
        """
        keeps = True
        for row in list(self._running.values()):
            while row.id in self._running and self.budget.needs_more_slots(row):
                missing = self.budget.extend(row)
                if not missing or (self._evictable.evict(missing) and not self.budget.extend(row)):
                    break
                if len(self._running) == 1 and not self.prefills.in_progress:
                    self._released.failed |= self._fail_out_of_memory([row], self.budget.extend(row))
                    keeps = False
                else:
                    victim = self._preemption.choose_for_growth()
                    keeps &= not isinstance(victim, Prompt)
                    if isinstance(victim, Row):
                        victim.num_growth_preemptions += 1
                    self.preempt(victim, "growth")
        return keeps

    def _fail_out_of_memory(self, rows: list[Row], missing: int) -> Published:
        """Fail the only prompt in the engine: its memory was checked on arrival and should have sufficed."""
        limit = self.budget.needs.limit_bytes
        error = f"the request needs {missing} more bytes of memory; the budget is {limit} bytes"
        return self._fail(rows, error, retry_after.STEP_FAILED_S)

    def _admit(self, may_preempt: bool) -> None:
        """Admit queued prompts while the prompts in progress leave time in the step, or if they are shorter.

        Args:
            may_preempt: Whether the step has not begun, so that rows may be preempted for an urgent prompt.
        """
        admission = self._admission
        while (prompt := admission.next_queued()) is not None:
            if not admission.reserve(prompt):
                if may_preempt and admission.is_idle:
                    missing = self.budget.shortfall_bytes(prompt.rows)
                    self._released.failed |= self._fail_out_of_memory(list(prompt.rows), missing)
                    return
                prompt = self._preempt_or_backfill(prompt) if may_preempt else None
            if prompt is None:
                return
            self.queue.remove_admitted(prompt)
            prompt.is_protected |= self.queue.waited_s(prompt) >= self._config.scheduler.ageing_s
            now = self._clock()
            for row in prompt.rows:
                row.state = RowState.PREFILL
                row.record.admitted(now)
            self.prefills.add(prompt)
            if any(one.has_begun for one in self._released.preempted):
                return  # preempted rows must be dropped before they can be admitted again

    def _preempt_or_backfill(self, head: Prompt) -> Prompt | None:
        """Return a prompt with reserved memory when the head does not fit: after preemption, or one that backfills."""
        prompt, victims = self._preemption.choose_victims(head)
        for victim in victims:
            self.preempt(victim, "priority" if self._config.scheduler.policy == "priority" else "fairness")
        if victims and self._admission.reserve(prompt, may_wait=False):
            return prompt
        return None if victims else self._admission.choose_backfill(head)

    def _take(self, row: Row, output: RowOutput, now: float, is_step: bool = True) -> TokenChunk:
        """Apply the output of a decode step, or of a prefill, to its row; return the chunk to publish at `now`."""
        if output.error is not None:
            return self._fail([row], output.error)[row.id]
        if row.spec.pooling is not None and output.embedding is None:
            return self._fail([row], "the hidden states contain NaN or inf")[row.id]
        if output.embedding is not None:
            self._stats.num_finished += 1
            self._remove(row, FinishReason.STOP)
            return _last_chunk(row, FinishReason.STOP, embedding=output.embedding)
        num_before, reason = len(row.output_token_ids), None
        for token_id in output.token_ids:
            reason = FinishReason.ERROR if token_id == NO_TOKEN else row.append(token_id)
            if reason is not None:
                break
        new = tuple(row.output_token_ids[num_before:])
        num_accepted = min(output.num_accepted, len(new))
        if is_step:
            row.record.stepped(len(new), output.num_drafted, num_accepted, self.prefills.total_s)
        if new and (before_s := row.record.token(now)) is not None:
            self.figures.between_tokens_s.observe(now - before_s)
        self._stats.num_output_tokens += len(new)
        self._shares.charge(row.spec.client, num_output_tokens=len(new))
        self._stats.num_drafted += output.num_drafted
        self._stats.num_accepted += num_accepted
        error = "the highest logit is not finite" if reason is FinishReason.ERROR else None
        if reason is not None:
            self._stats.num_failed += error is not None
            self._stats.num_finished += error is None
            self._remove(row, reason)
            if error is None:
                self._released.completed.append(row)
        return TokenChunk(
            token_ids=new,
            finish_reason=reason,
            error=error,
            index=row.index,
            logprobs=output.logprobs[: len(new)],
            prompt_logprobs=output.prompt_logprobs,
            num_drafted=output.num_drafted,
            num_accepted=num_accepted,
            num_cached=row.num_cached,
            num_skipped=row.num_skipped,
            timeline=row.timeline,
        )

    def _fail(self, rows: list[Row], error: str, retry_after_s: float | None = None) -> Published:
        self._stats.num_failed += len(rows)
        for row in rows:
            self._remove(row, FinishReason.ERROR)
        return {row.id: _last_chunk(row, FinishReason.ERROR, error, retry_after_s) for row in rows}

    def _queued(self) -> Queued:
        """Return the phase that a row in the queue begins now, with what is known of its wait."""
        return Queued(
            num_ahead=len(self.queue),
            num_decoding=len(self._running),
            num_prompt_tokens=sum(prompt.end - prompt.start for prompt in self.prefills.in_progress),
            expected_s=self.expected_wait_s(),
        )

    def _remove(self, row: Row, reason: FinishReason) -> None:
        self.figures.ended(row, row.end_timeline(self._clock(), reason))
        if row.state is RowState.WAITING:
            self.queue.remove(row)
        else:
            if row.state is RowState.RUNNING:
                del self._running[row.id]
            else:
                self.prefills.remove(row)
            self._released.finished.append(row)
        row.state = RowState.FINISHED
        self._shares.closed(row.spec.client)
        rows = self._rows[row.spec.request_id]
        rows.remove(row)
        if not rows:
            del self._rows[row.spec.request_id]


def _last_chunk(
    row: Row,
    reason: FinishReason,
    error: str | None = None,
    retry_after_s: float | None = None,
    embedding: bytes | None = None,
) -> TokenChunk:
    """Return the last chunk of a row that has ended without further tokens; see TokenChunk."""
    return TokenChunk(
        token_ids=(),
        finish_reason=reason,
        error=error,
        index=row.index,
        num_cached=row.num_cached,
        num_skipped=row.num_skipped,
        retry_after_s=retry_after_s,
        embedding=embedding,
        timeline=row.timeline,
    )
