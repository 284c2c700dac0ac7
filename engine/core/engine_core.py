"""The engine's step: schedule, execute, update, publish. Step failures are handled here and nowhere else."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence

from engine import retry_after
from engine.config import EngineConfig
from engine.core.core_figures import CoreFigures
from engine.core.cost_model import CostModel
from engine.core.memory.budget import make_memory_budget
from engine.core.memory.evictable import EvictableMemory
from engine.core.movable_snapshots import MovableSnapshots
from engine.core.prefill_executor import PrefillExecutor
from engine.core.prefix_cache.cache import PrefixCache
from engine.core.progress import WorkInProgress
from engine.core.prompt import Prompt
from engine.core.quoting.load import LoadRecorder
from engine.core.quoting.quoter import Quoter
from engine.core.row import Matcher, Row, RowState, named
from engine.core.runner import Drafts, ModelRunner
from engine.core.scheduler import Scheduler
from engine.core.scheduler_context import SchedulerContext
from engine.core.scheduler_output import PreemptedRows, Published, ReleasedRows
from engine.core.speculation import SpeculationController
from engine.errors import InvalidRequest
from engine.protocol import EngineRequest
from engine.snapshot_store.files import SnapshotFiles
from engine.snapshot_store.snapshot_client import SnapshotClient
from engine.status import EngineCounters

log = logging.getLogger("orchard.engine")

FIGURES_PERIOD_S = 0.25
DISK_CLOSE_S = 5.0  # on shutdown, for pending snapshot writes

Publish = Callable[[Published], None]


class EngineCore:
    """Runs the steps of one runner on the calling thread.

    Args:
        config: The engine's configuration.
        runner: Computes forward passes.
        publish: Receives the rows' new tokens as soon as there are any.
        clock: Returns monotonic seconds.
        files: Files of the prefix cache's disk tier; None without one.
        peers: Fetches cached prefixes from other nodes into these files; None without any.
        poll: Executes commands that have arrived meanwhile; called between two pieces of a step.

    Attributes:
        stats: Counters that only the device thread writes and any thread may read.
        failed_steps_in_a_row: The failed steps since the last one that succeeded; readable from any thread.
        figures: Figures for the status, refreshed every FIGURES_PERIOD_S; readable from any thread.
        progress: The work in progress; readable from any thread.
        quoter: Predicts the seconds of requests that may be placed here; used by one thread, which need not be this.
        movable: The snapshots that other nodes may take over, and those that have come from them.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        publish: Publish,
        clock: Callable[[], float] = time.monotonic,
        files: SnapshotFiles | None = None,
        peers: SnapshotClient | None = None,
        poll: Callable[["EngineCore"], None] = lambda core: None,
    ):
        self.stats = EngineCounters()
        self.failed_steps_in_a_row = 0
        self.progress = WorkInProgress(("decode", time.num_rows, time.drafts) for time in runner.step_times)
        self.runner = runner
        self.costs = CostModel(runner.drafts, runner.step_times, runner.chunk_times)
        self._speculation = SpeculationController(config.draft_modes, self.costs, runner.no_drafts)
        self.prefixes = PrefixCache(
            config.prefix_cache,
            runner,
            self.stats,
            self.costs,
            lambda: self.budget.free_bytes + self.prefixes.store.num_bytes,
            files,
            peers,
            clock,
        )
        self._evictable = EvictableMemory(self.prefixes.memory, runner)
        self.budget = make_memory_budget(config, runner, self._evictable)
        context = SchedulerContext(
            config=config,
            clock=clock,
            costs=self.costs,
            budget=self.budget,
            evictable=self._evictable,
            prefixes=self.prefixes,
            has_bursts=runner.no_bursts is None,
            whole_image_token=runner.image_token_id if runner.whole_images else None,
            whole_prompts=runner.whole_prompts is not None,
        )
        self.scheduler = Scheduler(context, self.stats)
        self._loads = LoadRecorder(clock, self.scheduler, self.prefixes, self.costs)
        is_caching = self.prefixes.off_reason is None
        self.movable = MovableSnapshots(self.prefixes, self._loads, runner.costs, self.costs)
        self.quoter = Quoter(config, clock, self.costs, self.budget.needs, self._loads, is_caching, peers is not None)
        self.figures = CoreFigures(
            runner, self.prefixes, self.budget, self._evictable, self.scheduler.queue, self._speculation
        )
        self._clock = clock
        self._figures_read_s = clock()
        self._decoded_s: float | None = None  # when the last decode step ended, unless something else came after it
        self._publish = publish
        self._poll = poll
        self._prefill = PrefillExecutor(
            runner,
            self.scheduler,
            self.prefixes,
            self.costs,
            self.stats,
            self.progress,
            config.scheduler.max_stall_s,
            clock,
            publish,
            self._prefill_failed,
            self._burst_failed,
        )

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add_request(
        self, spec: EngineRequest, matchers: Sequence[Matcher] = (), arrived_s: float | None = None
    ) -> None:
        """Queue a request.

        Args:
            spec: The request.
            matchers: One grammar matcher per open choice, after the tokens of its `progress`; empty without a grammar.
            arrived_s: When it arrived, on the engine's clock; None for now.
        """
        each = matchers or [None] * len(spec.open_choices)
        rows = [Row(spec, index, matcher) for index, matcher in zip(spec.open_choices, each, strict=True)]
        self.scheduler.add(rows, arrived_s)
        self._loads.request_arrived(rows[0])

    def abort(self, request_id: str) -> None:
        """Abort all choices of a request. Unknown ids are ignored."""
        self.scheduler.abort(request_id)

    def move_all(self) -> None:
        """End all rows with MOVED, so that other engines continue them; call it between two pieces of work.

        The tokens of a step in flight are published before: some rows may finish with them. States of prompts and rows
        are stored in the prefix cache, as after a preemption.
        """
        self._release(self.scheduler.take_released())
        self.scheduler.suspend_all()
        self._release(self.scheduler.take_released())
        self._publish(self.scheduler.move_queued())

    def step(self) -> None:
        """Decode once for all rows, then prefill chunks of prompts. Tokens are published as soon as they are known."""
        num_before = self.stats.num_prompt_tokens + self.stats.num_output_tokens
        self._release(self.scheduler.take_released())  # before their memory is reserved for others
        self.budget.observe(self.runner.active_bytes, self._settled_bytes)
        drafts = self._speculation.choose(self.scheduler.num_decoding)
        self._release(self.scheduler.schedule(drafts))
        in_flight_s = 0.0
        if self.scheduler.num_decoding:
            self._decode(drafts)
            in_flight_s = self.costs.step_s(self.scheduler.num_decoding, drafts) or 0.0
        while True:
            self._poll(self)
            self.progress.end()
            self._release(self.scheduler.take_released())
            if (prompt := self.scheduler.next_prompt()) is None:
                break
            self._decoded_s = None
            if self._prefill.advance(prompt, in_flight_s):
                if not self.scheduler.num_decoding:  # no decode step follows that would reset the counter
                    self.failed_steps_in_a_row = 0
                self._release(self.scheduler.take_released())
            in_flight_s = 0.0
        self.stats.num_steps += 1
        if num_tokens := self.stats.num_prompt_tokens + self.stats.num_output_tokens - num_before:
            self.scheduler.figures.step_tokens.observe(num_tokens)
        self._loads.publish()
        self._read_figures()

    def close(self) -> None:
        """Write pending snapshots to disk and release the runner's memory."""
        try:
            for prompt in (*self.scheduler.prefills.in_progress, *self.scheduler.take_released().prompts):
                self.prefixes.end(prompt)
            self.prefixes.close(DISK_CLOSE_S)
        finally:
            self.runner.close()

    def free_evictable(self) -> None:
        """Evict all evictable memory, because the machine is short of memory."""
        self._evictable.evict_all()

    def _settled_bytes(self) -> int:
        """Return the bytes in use when the device has finished, or those in use now if that fails.

        The rows of a step in flight that has failed learn of it where its tokens are read.
        """
        try:
            return self.runner.settled_bytes()
        except Exception:
            log.exception("waiting for the device failed")
            return self.runner.active_bytes

    def _read_figures(self) -> None:
        """Refresh the status figures: periodically while busy, and once before the thread sleeps."""
        now = self._clock()
        if self.has_work and now - self._figures_read_s < FIGURES_PERIOD_S:
            return
        self._figures_read_s = now
        self.prefixes.write_behind()
        self.figures.refresh()
        if not self.has_work:
            self.prefixes.check_integrity()

    def _release(self, released: ReleasedRows) -> None:
        """Snapshot preempted rows and complete answers, publish the errors of failed rows, and drop them all."""
        self._snapshot_preempted(released.preempted)
        for row in released.completed:
            self._loads.answer_complete(row, self.prefixes.take_answer(row))
            self._decoded_s = None  # the snapshot must not count as decode time
        if released.failed:
            self._publish(released.failed)
        for row in released.finished:
            self.budget.release(row.id)
        if rows := released.rows:
            self._drop(rows, released.prompts)
        if released.aborted:
            self._publish(released.aborted)

    def _snapshot_preempted(self, preempted: Sequence[PreemptedRows]) -> None:
        """Publish what the step in flight gives preempted rows, then snapshot their states."""
        if not any(one.has_begun for one in preempted):
            return
        self._decoded_s = None  # the following work must not count as decode time
        decoding = [one.rows[0] for one in preempted if one.was_decoding]
        if decoding:
            try:
                outputs = self.runner.pending([row.id for row in decoding])
            except Exception as error:
                rows = [*self.scheduler.decoding, *decoding]
                log.exception("decode step failed with %d rows", len(rows), extra=named(rows))
                self._publish(self._fail_rows(f"decode step failed: {type(error).__name__}"))
                return
            self._publish(self.scheduler.update_preempted(outputs, decoding))
            self._release(self.scheduler.take_released())  # some may have completed their answers
        for one in preempted:
            if not one.was_decoding:
                self.prefixes.take_prompt(one.prompt)
            elif one.rows[0].state is not RowState.FINISHED:
                self.prefixes.take_row(one.rows[0])

    def _drop(self, rows: Sequence[Row], prompts: Iterable[Prompt]) -> None:
        """Drop rows, which ends what their prompts still use of the prefix cache."""
        row_ids = [row.id for row in rows]
        for prompt in prompts:
            self.prefixes.end(prompt)
        with self.prefixes.dropping(row_ids) as lent:
            try:
                self.runner.drop(row_ids, lent)
            except Exception as error:
                log.exception("dropping %s failed", ", ".join(row_ids), extra=named([*rows, *self.scheduler.decoding]))
                self._publish(self._fail_rows(f"dropping other rows failed: {type(error).__name__}"))
                try:  # the decode batch has been reset, but prompts in progress may remain
                    self.runner.drop(row_ids)
                except Exception:
                    failed_again = "dropping %s failed again: their memory is not freed"
                    log.exception(failed_again, ", ".join(row_ids), extra=named(rows))

    def _fail_rows(self, error: str) -> Published:
        self.failed_steps_in_a_row += 1
        self._decoded_s = None
        self.runner.reset()
        failed = self.scheduler.fail_rows(error)
        for row_id in failed:
            self.budget.release(row_id)
        self.prefixes.lost(list(failed))
        return failed

    def _decode(self, drafts: Drafts) -> None:
        num_rows, began_s = self.scheduler.num_decoding, self._decoded_s
        name = f"a decode step (rows: {num_rows}, drafts: {drafts.num_tokens})"
        predicted_s = self.costs.step_s(num_rows, drafts) or 0.0
        self.progress.begin(name, predicted_s, ("decode", num_rows, drafts), self.scheduler.decoding)
        try:
            outputs = self.runner.decode(drafts)
            chunks = self.scheduler.update_decode(outputs)
        except Exception as error:
            log.exception("decode step failed with %d rows", num_rows, extra=named(self.scheduler.decoding))
            if drafts.num_tokens:
                self._speculation.failed()  # plain decoding may still work
            self._publish(self._fail_rows(f"decode step failed: {type(error).__name__}"))
            return
        self.failed_steps_in_a_row = 0
        self._decoded_s = self._clock()
        seconds = None if began_s is None else self._decoded_s - began_s
        num_tokens = sum(len(output.token_ids) for output in outputs.values())
        found = drafts.num_tokens == max((output.num_drafted for output in outputs.values()), default=0)
        self.costs.record_step(num_rows, drafts, num_tokens / max(len(outputs), 1), seconds if found else None)
        self._speculation.record(outputs.values())
        self._publish(chunks)
        self._release(self.scheduler.take_released())

    def _burst_failed(self, prompts: Sequence[Prompt], error: Exception) -> None:
        """Drop the rows of a shared forward that failed, and discard the snapshots of their prompts.

        The rows may have joined the decode batch already.
        """
        rows = [prompt.row for prompt in prompts]
        alone = "the shared prefill of %s failed; each prompt is prefilled alone"
        log.error(alone, ", ".join(row.id for row in rows), exc_info=error, extra=named(rows))
        self.stats.num_failed_bursts += 1
        self.scheduler.prefills.step.close()
        for prompt in prompts:
            self.prefixes.end(prompt, failed=True)
        self._drop(rows, ())
        self.scheduler.prefills.compute_alone(prompts)

    def _prefill_failed(self, prompt: Prompt, error: Exception) -> None:
        row, rows = prompt.row, list(prompt.rows)
        self.scheduler.prefills.step.close()
        self.prefixes.end(prompt, failed=True)
        if isinstance(error, InvalidRequest):  # the client's fault does not count towards max_failed_steps
            self._publish(self.scheduler.fail_prefill(prompt, str(error)))
            return
        failed = "prefill of %s failed after %d tokens"
        log.error(failed, row.id, prompt.num_prefilled, exc_info=error, extra=named(rows))
        works = True
        try:
            self.runner.probe()  # tells a failing device from a prompt that fails by itself
        except Exception:
            log.exception("the probe forward failed: the device does not work", extra=named(rows))
            works = False
        self.failed_steps_in_a_row += not works
        message, retry_after_s = f"prefill failed: {type(error).__name__}", None if works else retry_after.STEP_FAILED_S
        self._publish(self.scheduler.fail_prefill(prompt, message, retry_after_s))
