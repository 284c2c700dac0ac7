"""Who runs in the next step: the queue, the rows, and one token budget per step. Pure; touches no array."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from engine.config import EngineConfig
from engine.core.batch import NO_TOKEN, ImageLeft, PrefillOutput, PromptChunk, RowOutput, SchedulerOutput
from engine.core.burst import Span, burst_s, may_burst, num_together
from engine.core.client_shares import ClientShares
from engine.core.cost_model import CostModel
from engine.core.memory.budget import MemoryBudget
from engine.core.memory.costs import MemoryCosts
from engine.core.memory.victims import Preemption
from engine.core.prefill import (
    FIXED_PARTS,
    MAX_IDLE_STEP_S,
    MIN_IDLE_STEP_S,
    Prefill,
    PrefillOrder,
    StepBudget,
)
from engine.core.request import Request, RequestState
from engine.core.request_queue import USUAL_ANSWER, Group, RequestQueue
from engine.core.stats import Stats
from engine.protocol import FinishReason, QueuedRequest, TokenChunk

MIN_PREFILL_TOKENS = 16
"""A step computes at least so many prompt tokens, however much else there is to do."""

FIRST_PREFILL_TOKENS = 64
"""Size of the first chunk, before the pace of prefill is known."""

TIMEOUT_PART = 0.25
"""Part of step_timeout_s that the smallest chunk may be predicted to take; beyond it a chunk has fewer tokens."""

SHORT_PART = 0.25
"""A queued prompt is admitted beside those in progress if it takes at most this part of the shortest one's time."""

MAX_SHOWN = 32
"""Of the queue."""

MAX_PASSING = 8
"""How many queued requests behind the head are considered per step when the head does not fit in memory."""

PATIENCE = 10.0
"""A request waits for so many times the seconds of its prompt before valuable snapshots are evicted for it."""

MIN_WEIGH_S, WEIGH_GROWTH = 0.02, 1.1
"""Evicting is weighed again when a request has waited for so many seconds, and so many times as long as the last time:
to order all snapshots takes milliseconds on the device thread."""

MAX_SHORT = 32
"""How many queued requests are considered per step as shorter than the prompts in progress."""

RETRY_S = 1.0

Chunks = dict[str, TokenChunk]
"""Row id -> what the row got."""


class Spare(Protocol):
    """Memory that no answer needs, see core/memory/evictable.py."""

    @property
    def free_bytes(self) -> int: ...
    def free(self, num_bytes: int) -> bool: ...
    def price(self, num_bytes: int) -> float: ...


class Nothing:
    """Nothing is spare."""

    free_bytes = 0

    def free(self, num_bytes: int) -> bool:
        return False

    def price(self, num_bytes: int) -> float:
        return float("inf")


class Prefixes(Protocol):
    """Answers which prefix of a prompt is cached, see core/prefix_cache/reuse.py."""

    def num_cached(self, row: Request) -> int:
        """Return how many tokens of a row's prompt the cache would serve."""
        ...

    def source_of(self, row: Request) -> Request | None:
        """Return the first row of the prompt in progress that will soon leave a longer prefix of this row's prompt in
        the cache than there is now, None without one."""
        ...

    def promise(self, rows: Sequence[Request]) -> bool:
        """Count what a request will take over from the cache as the request's; False if that is nothing."""
        ...

    def cancel(self, rows: Sequence[Request]) -> None:
        """Take back what was promised: the request is not admitted."""
        ...


class NoPrefixes:
    """Nothing is cached."""

    def num_cached(self, row: Request) -> int:
        return 0

    def source_of(self, row: Request) -> Request | None:
        return None

    def promise(self, rows: Sequence[Request]) -> bool:
        return False

    def cancel(self, rows: Sequence[Request]) -> None:
        """Nothing was promised."""


class Scheduler:
    """Decides which rows run and which prompts advance.

    Prompts are prefilled in chunks between the decode steps; several may be in progress. Args:
        clock: gives monotonic seconds.
        budget: the memory budget; by default one in which nothing costs anything.
        spare: what may be evicted when a row needs memory.
        costs: predicts seconds; updated by `record_prefill`.
        prefixes: what the prefix cache has for the prompts; by default nothing.
        has_bursts: whether several prompts can be computed in one forward.
    """

    def __init__(
        self,
        config: EngineConfig,
        stats: Stats,
        clock: Callable[[], float] = time.monotonic,
        budget: MemoryBudget | None = None,
        spare: Spare | None = None,
        costs: CostModel | None = None,
        prefixes: Prefixes | None = None,
        has_bursts: bool = False,
    ):
        self._config = config
        self._stats = stats
        self._clock = clock
        self._spare = spare or Nothing()
        self.budget = budget or MemoryBudget(MemoryCosts(), 0, config.memory.reserve_tokens)
        self.costs = costs or CostModel()
        self._prefixes = prefixes or NoPrefixes()
        self._has_bursts = has_bursts
        self._shares = ClientShares()
        self._queue = RequestQueue(config.scheduler, self._shares, clock)
        self._rows: dict[str, list[Request]] = {}  # request id -> its rows that have not ended
        self._prefills: list[Prefill] = []  # in the order in which they were admitted
        self._order = PrefillOrder(self.costs)
        self._step = StepBudget()
        self._running: dict[str, Request] = {}  # by row id, in the order in which they joined
        self._preemption = Preemption(config, self.budget, self._shares, self._running, self._recompute_s)
        self._gone: list[str] = []  # rows that have ended, and are still in the runner
        self._drop: list[str] = []  # rows that have lost their place
        self._ended: Chunks = {}  # rows that have ended outside of a step
        self._completed: list[Request] = []  # rows whose answers are complete, and are still in the runner

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their rows, and rows that were preempted."""
        return len(self._queue)

    @property
    def num_decoding(self) -> int:
        return len(self._running)

    @property
    def num_prefills(self) -> int:
        """Prompts in progress."""
        return len(self._prefills)

    @property
    def num_running(self) -> int:
        """Rows that hold device memory: decoding, or in prefill."""
        return len(self._running) + self._num_in_prefill

    @property
    def _num_in_prefill(self) -> int:
        return sum(len(prefill.rows) for prefill in self._prefills)

    @property
    def has_work(self) -> bool:
        return bool(self._queue or self._running or self._gone or self._drop or self._prefills)

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
        self.budget.end_chunk()
        self._expire()
        self._step = self._step_budget(num_draft_tokens)
        for prefill in self._prefills:
            prefill.is_waiting = False
        if self._extend():
            self._admit(may_preempt=True)
        drop, self._drop = self._drop, []
        return SchedulerOutput(drop=[*gone, *drop], decode=bool(self._running))

    def next_prompt(self) -> Sequence[Request]:
        """Rows of the prompt that advances next in this step; none when the step has no time or prompts left."""
        step = self._step
        if step.num_tokens <= 0 or (step.num_chunks and step.seconds <= 0):
            return ()
        if step.num_chunks:
            self._admit(may_preempt=False)
        prefill = self._choose_prefill()
        return () if prefill is None else tuple(prefill.rows)

    def chunk_tokens(self, rows: Sequence[Request]) -> int:
        """How many tokens the next chunk of this prompt may have; 0 when the step ends before it.

        The memory for the chunk's intermediate results stays reserved until the next call.
        """
        row, step = rows[0], self._step
        left = row.num_prompt_tokens - row.num_prefilled
        wanted = min(step.num_tokens, left, self._tokens_in_time(row.num_prefilled))
        if wanted < left and wanted < MIN_PREFILL_TOKENS and step.num_chunks:
            step.close()
            return 0
        self.budget.end_chunk()
        wanted = max(wanted, 1)
        num_tokens = self.budget.max_chunk(row, wanted)
        return num_tokens if num_tokens == wanted else self._enlarged_chunk(row, num_tokens, wanted)

    def image_blocks(self, image: ImageLeft) -> int:
        """How many blocks of the vision tower the next piece of an image passes; 0 when the step ends before it."""
        step, block_s = self._step, self.costs.image_s(image.num_patches, 1 / image.depth)
        num_blocks = int(step.seconds / block_s)
        if not num_blocks and step.num_chunks:
            step.close()
            return 0
        return min(max(num_blocks, 1), image.num_blocks)

    def _enlarged_chunk(self, row: Request, num_tokens: int, wanted: int) -> int:
        """Evict snapshots so that the chunks of this prompt may be larger, if that saves more time than it costs."""
        missing = self.budget.chunk_shortfall_bytes(row, wanted)
        start, end = row.num_prefilled, row.num_prompt_tokens
        saved_s = self.costs.prompt_s(start, end, num_tokens) - self.costs.prompt_s(start, end, wanted)
        if missing and self._spare.price(missing) < saved_s and self._spare.free(missing):
            return self.budget.max_chunk(row, wanted)
        return num_tokens

    def companions(self, first: PromptChunk) -> list[Sequence[Request]]:
        """Rows of other prompts that may be computed in one forward with this chunk, the shortest first.

        How many is predicted: those that have not begun may begin behind a snapshot that is evicted meanwhile.
        """
        chosen = self._prefill_of(first.row)
        if not self._may_burst(chosen):
            return []
        others = [one for one in self._ready() if one is not chosen and self._may_burst(one)]
        for one in others:
            if not one.has_begun:  # the cache may have more of it by now
                one.num_expected = self._prefixes.num_cached(one.rows[0])
        others.sort(key=lambda one: one.end - one.start)
        spans = [(mine := _span(first)), *(_expected_span(one, mine.num_left) for one in others)]
        num = num_together(spans, self.costs, self._step.num_tokens, self._step.seconds)
        return [tuple(one.rows) for one in others[: num - 1]]

    def burst(self, first: PromptChunk, others: Sequence[PromptChunk]) -> Sequence[PromptChunk]:
        """Choose which of these chunks are computed in one forward: `first`, and others as long as that saves time.

        The memory for the intermediate results stays reserved until the next chunk is chosen.
        """
        chunks = [first, *sorted(others, key=lambda chunk: chunk.num_tokens)]
        spans = [_span(chunk) for chunk in chunks]
        num = num_together(spans, self.costs, self._step.num_tokens, self._step.seconds)
        while num > 1 and not self._has_reserved_burst(chunks[:num], spans[:num]):
            num -= 1
        return chunks[:num]

    def _has_reserved_burst(self, chunks: Sequence[PromptChunk], spans: Sequence[Span]) -> bool:
        """Reserve memory for the forward, evicting snapshots where that costs less time than the forward saves."""
        rows, longest = [chunk.row for chunk in chunks], max(span.num_tokens for span in spans)
        end = longest + max(span.start for span in spans)
        missing = self.budget.reserve_burst(rows, longest, end)
        one_by_one_s = sum(self.costs.chunk_s(span.num_tokens, span.start) for span in spans)
        if not missing or self._spare.price(missing) > one_by_one_s - burst_s(spans, self.costs):
            return not missing
        return self._spare.free(missing) and not self.budget.reserve_burst(rows, longest, end)

    def _may_burst(self, prefill: Prefill) -> bool:
        """Whether the prompt may share a forward: it waits neither for the disk nor for the prefix of another one."""
        if not self._has_bursts or prefill.is_alone or not may_burst(prefill.rows):
            return False
        return prefill.has_begun or self._prefixes.source_of(prefill.rows[0]) is None

    def compute_alone(self, rows: Sequence[Request]) -> None:
        """Begin the prompts of these rows anew, one after the other: a forward that they shared has failed."""
        for row in rows:
            row.num_charged, row.num_prefilled = max(row.num_charged, row.num_prefilled), 0
            self._prefill_of(row).is_alone = True

    def wait_for_disk(self, rows: Sequence[Request]) -> None:
        """Choose other prompts in this step: this one's snapshot is still being read from disk."""
        for prefill in self._prefills:
            prefill.is_waiting |= rows[0] in prefill.rows

    def _choose_prefill(self) -> Prefill | None:
        """The next prompt to advance: of the most urgent ones the shortest, or the one that leaves its prefix."""
        if not (ready := self._ready()):
            return None
        chosen = self._order.choose(ready, self._full_step_s)
        if not chosen.has_begun and (source := self._prefixes.source_of(chosen.rows[0])) is not None:
            first = next((prefill for prefill in self._prefills if source in prefill.rows), chosen)
            is_soon = self._order.images_s(first) <= self._order.remaining_s(chosen)
            return first if is_soon else chosen
        return chosen

    def _ready(self) -> list[Prefill]:
        """Prompts in progress, in the order of their admission, that may advance now: the most urgent ones."""
        ready = [prefill for prefill in self._prefills if not prefill.is_waiting]
        if self._config.scheduler.policy == "priority":
            ready = [one for one in ready if not any(other.entry.is_before(one.entry) for other in ready)]
        return ready

    def take_completed(self) -> list[Request]:
        """Rows whose answers have come to their end since the last call. The runner still has them."""
        completed, self._completed = self._completed, []
        return completed

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
        self.budget.release_prefill(rows[0])
        first = [output.first[row.id] for row in rows]
        prefill = self._prefill_of(rows[0])
        assert all(row.num_prefilled == row.num_prompt_tokens for row in rows)
        self._prefills.remove(prefill)
        for row in rows:
            if row.num_skipped and not row.output_token_ids:
                self._stats.num_sparse += 1
                self._stats.num_skipped_tokens += row.num_skipped
            row.state, row.joined_s = RequestState.RUNNING, self._clock()
            keeps_place = prefill.entry.keeps_place
            row.keep_until_s = row.joined_s + self._config.scheduler.ageing_s if keeps_place else 0.0
            self._running[row.id] = row
        self._step.seconds = min(self._step.seconds, self._config.scheduler.max_stall_s)
        return {row.id: self._take(row, token) for row, token in zip(rows, first, strict=True)}

    def record_prefill(self, chunks: Sequence[PromptChunk], seconds: float, device_s: float) -> None:
        """Account for chunks that one forward has computed; each ended at its row's num_prefilled.

        Args:
            seconds: how long they took.
            device_s: the same without what the device had to do before them.
        """
        longest = max(chunk.num_tokens for chunk in chunks)
        start = max(chunk.row.num_prefilled - chunk.num_tokens for chunk in chunks)
        self._stats.num_bursts += len(chunks) > 1
        self._step.use(sum(chunk.num_tokens for chunk in chunks), seconds)
        self.costs.record_chunk(longest, start, device_s, len(chunks))
        rows = {chunk.row.id for chunk in chunks}
        for prefill in self._prefills:
            if prefill.rows[0].id in rows:
                self._order.record(prefill, seconds / len(chunks))

    def record_image(
        self, rows: Sequence[Request], image: ImageLeft, num_blocks: int, seconds: float, device_s: float
    ) -> None:
        """Account for a piece of an image of this prompt; see `record_prefill`."""
        prefill = self._prefill_of(rows[0])
        prefill.encoded_s += device_s
        self._step.use(0, seconds)
        self._order.record(prefill, seconds)
        self.costs.record_image(image.num_patches, num_blocks / image.depth, device_s)

    def end_prefill(self) -> None:
        """Compute no further chunk in this step."""
        self._step.close()

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
        """Reserve more memory for rows that have used up theirs, the oldest first; others lose their places for it.

        Returns False if a prompt in progress was one of these: none is admitted before the runner has dropped it.
        """
        keeps = True
        for row in list(self._running.values()):
            while row.id in self._running and self.budget.needs_more_slots(row) and not self._has_grown(row):
                if len(self._running) == 1 and not self._prefills:
                    self._ended |= self._out_of_memory([row], self.budget.extend(row))
                elif isinstance(victim := self._cheapest(), Prefill):
                    self._give_up_prefill(victim)
                    keeps = False
                else:
                    victim.num_outgrown += 1
                    self.preempt(victim)
        return keeps

    def _cheapest(self) -> Request | Prefill:
        """The row or the prompt in progress that is least urgent, and of these the one computed again soonest."""

        def price(one: Request | Prefill) -> tuple[int, float]:
            row = one.rows[0] if isinstance(one, Prefill) else one
            return -self._priority(row), self._recompute_s(row)

        return min([*reversed(self._prefills), *reversed(self._running.values())], key=price)

    def _priority(self, row: Request) -> int:
        return row.spec.priority if self._config.scheduler.policy == "priority" else 0

    def _recompute_s(self, row: Request) -> float:
        """Predict how long it would take to compute again what has been computed of the row."""
        end = row.num_prefilled if row.state is RequestState.PREFILL else row.num_prompt_tokens
        return self.costs.prompt_s(min(row.num_cached, end), end)

    def _has_grown(self, row: Request) -> bool:
        missing = self.budget.extend(row)
        return not missing or (self._spare.free(missing) and not self.budget.extend(row))

    def _give_up_prefill(self, prefill: Prefill) -> None:
        """Put a prompt in progress back into the queue; the snapshots that it has left stay."""
        rows, arrived_s = list(prefill.rows), prefill.entry.arrived_s
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

    def _admit(self, may_preempt: bool) -> None:
        """Admit queued requests while the prompts in progress leave time, or if they are shorter than those.

        may_preempt: the step has not begun, so that rows may be dropped for an urgent request.
        """
        while self._queue:
            entry = self._next_entry()
            if entry is None:
                return
            self._preemption.num_in_prefill = self._num_in_prefill
            if self._has_reserved(entry):
                self._let_in(entry)
            elif not may_preempt:
                return
            elif not self._running and not self._prefills:
                self._ended |= self._out_of_memory(list(entry.rows), self.budget.missing(entry.rows))
                return
            elif (urgent := self._displace_for(entry)) is not None:
                self._let_in(urgent)
            elif (passing := self._entry_that_passes(entry)) is not None:
                self._let_in(passing)
            else:
                return

    def _next_entry(self) -> Group | None:
        """The head of the queue if the prompts in progress leave time in this step, else one that is much shorter."""
        if not self._prefills:
            return self._queue.first()
        if self._prefill_s() < self._step.seconds:
            return self._queue.first()
        remaining = [self._order.remaining_s(prefill) for prefill in self._prefills]
        order, policy = self._queue.order()[:MAX_SHORT], self._config.scheduler.policy
        if policy == "priority" and all(order[0].is_before(prefill.entry) for prefill in self._prefills):
            return order[0]
        limit_s = SHORT_PART * min(remaining)
        return next((entry for entry in order if self._entry_s(entry, limit_s) <= limit_s), None)

    def _prefill_s(self) -> float:
        """Predict the seconds of prefill until all prompts in progress are complete."""
        num_forwards_saved = max(0, sum(map(self._may_burst, self._prefills)) - 1)
        seconds = sum(self._order.remaining_s(prefill) for prefill in self._prefills)
        return seconds - num_forwards_saved * self.costs.chunk_s(1, 0)

    def _entry_s(self, entry: Group, limit_s: float) -> float:
        """Predict the prefill time of a queued request; the prefix cache is asked if it decides about the limit."""
        row = entry.rows[0]
        seconds = self.costs.prompt_s(0, row.num_prompt_tokens)
        if seconds <= limit_s:
            return seconds
        return self.costs.prompt_s(min(self._prefixes.num_cached(row), row.num_prompt_tokens), row.num_prompt_tokens)

    def _let_in(self, group: Group) -> None:
        """Of which the rows are reserved."""
        self._queue.let_in(group)
        group.keeps_place |= self._queue.waited_s(group) >= self._config.scheduler.ageing_s
        for row in group.rows:
            row.state = RequestState.PREFILL
        self._prefills.append(Prefill(group, self._prefixes.num_cached(group.rows[0])))

    def _has_reserved(self, group: Group, may_wait: bool = True) -> bool:
        """Reserve memory for a request's rows, evicting snapshots where that suffices.

        may_wait: not yet, if they are worth more time than the request has waited.
        """
        if not self._preemption.has_rows(group):
            return False
        if self.budget.missing(group.rows) or self.budget.group_shortfall_bytes(group.rows):
            self._prefixes.promise(group.rows)
        self._make_room_in_group(group)
        missing = self.budget.reserve(group.rows)
        if not missing:
            return True
        may_evict = not may_wait or self._may_evict(group, missing)
        if may_evict and self._spare.free(missing) and not self.budget.reserve(group.rows):
            return True
        self._prefixes.cancel(group.rows)
        return False

    def _may_evict(self, group: Group, num_bytes: int) -> bool:
        """Whether a request has waited for as long as what would be evicted for it takes to compute again.

        It waits no longer than a few times what its own prompt takes, and not at all when nothing else runs.
        """
        if not self._running and not self._prefills:
            return True
        waited_s = self._queue.waited_s(group)
        if waited_s >= PATIENCE * self._entry_s(group, 0.0):
            return True
        if waited_s < group.weigh_again_s:
            return False
        group.weigh_again_s = MIN_WEIGH_S + WEIGH_GROWTH * waited_s
        return self._spare.price(num_bytes) <= waited_s

    def _make_room_in_group(self, group: Group) -> None:
        """Evict snapshots so that the rows decode among others, if that saves more time than it costs.

        In a group of their own they would read all weights once more in each step.
        """
        missing, token_s = self.budget.group_shortfall_bytes(group.rows), self.costs.token_s(1)
        if missing and token_s is not None and self._spare.price(missing) < token_s * USUAL_ANSWER:
            self._spare.free(missing)

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
        return group if victims and self._has_reserved(group, may_wait=False) else None

    def _entry_that_passes(self, head: Group) -> Group | None:
        """A request that fits where the head does not: any for ageing_s, then those that end before the head can begin.

        EASY backfilling (Lifka 1995): the start of the head is never put off by a request that passes it. None passes
        that would take the rows that the head waits for.
        """
        if not self._preemption.has_rows(head):
            return None
        now = self._clock()
        head.blocked_s = now if head.blocked_s is None else head.blocked_s
        is_aged = now - head.blocked_s >= self._config.scheduler.ageing_s
        room_s = self._seconds_until_room(head) if is_aged else float("inf")
        for entry in self._queue.order()[: 1 + MAX_PASSING]:
            if entry is head or (is_aged and self._seconds_to_end(entry) > room_s):
                continue
            if self._has_reserved(entry):
                return entry
        return None

    def _seconds_until_room(self, head: Group) -> float:
        """Predict when enough running rows will have ended, at their full length, for the head to fit."""
        token_s = self.costs.token_s(len(self._running))
        if token_s is None:
            return 0.0
        leaving: list[str] = []
        for row in sorted(self._running.values(), key=_num_tokens_left):
            leaving.append(row.id)
            if self.budget.missing(head.rows, leaving) <= self._spare.free_bytes:
                return token_s * _num_tokens_left(row)
        return 0.0

    def _seconds_to_end(self, entry: Group) -> float:
        """Predict how long a request would take from its admission to its last token."""
        row, token_s = entry.rows[0], self.costs.token_s(len(self._running) + len(entry.rows))
        if token_s is None:
            return float("inf")
        return self._entry_s(entry, 0.0) + token_s * _num_tokens_left(row)

    def _step_budget(self, num_draft_tokens: int) -> StepBudget:
        """What prefill may use of this step: decoding rows come first, and wait no longer than max_stall_s."""
        config = self._config
        if not self._running:
            return StepBudget(config.prefill_chunk_tokens, self._full_step_s)
        left = config.prefill_chunk_tokens - len(self._running) * (num_draft_tokens + 1)
        num_tokens = max(MIN_PREFILL_TOKENS, min(config.prefill_chunk_tokens_busy, left))
        return StepBudget(num_tokens, config.scheduler.max_stall_s)

    @property
    def _full_step_s(self) -> float:
        """Seconds of prefill in a step while no row decodes."""
        return min(max(FIXED_PARTS * self.costs.chunk_s(1, 0), MIN_IDLE_STEP_S), MAX_IDLE_STEP_S)

    def _tokens_in_time(self, start: int) -> int:
        """How many tokens behind `start` fit into the time that is left of the step."""
        if not self.costs.is_measured:
            return FIRST_PREFILL_TOKENS
        num_tokens = self.costs.max_tokens(self._step.seconds, start)
        if num_tokens >= MIN_PREFILL_TOKENS or self._step.num_chunks:
            return num_tokens
        longest_s = TIMEOUT_PART * self._config.step_timeout_s
        return max(num_tokens, min(MIN_PREFILL_TOKENS, self.costs.max_tokens(longest_s, start)))

    def _prefill_of(self, row: Request) -> Prefill:
        return next(prefill for prefill in self._prefills if row in prefill.rows)

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
            if error is None:
                self._completed.append(row)
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
        prefill = self._prefill_of(row)
        prefill.rows.remove(row)
        if not prefill.rows:
            self._prefills.remove(prefill)


def _span(chunk: PromptChunk) -> Span:
    row = chunk.row
    return Span(chunk.num_tokens, row.num_prefilled, row.num_prompt_tokens - row.num_prefilled - chunk.num_tokens)


def _expected_span(prefill: Prefill, num_left: int) -> Span:
    """Predict the span of a prompt that has not begun: a boundary is expected `num_left` tokens before its end."""
    num_tokens = prefill.end - prefill.start
    num_left = min(num_left, num_tokens - 1)
    return Span(num_tokens - num_left, prefill.start, num_left)


def _num_tokens_left(row: Request) -> int:
    """Tokens that the row may still give out."""
    return row.sampling.max_tokens - len(row.output_token_ids)
