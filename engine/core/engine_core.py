"""The engine's step: schedule, execute, update, publish. The only place that answers for a failed step."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from engine.config import EngineConfig
from engine.core.batch import ModelRunner, PromptChunk
from engine.core.cost_model import CostModel
from engine.core.memory.budget import make_memory_budget
from engine.core.memory.evictable import EvictableMemory
from engine.core.memory.grouping import GroupMerge
from engine.core.prefix_cache.reuse import PrefixReuse
from engine.core.request import Matcher, Request
from engine.core.scheduler import RETRY_S, Chunks, Scheduler
from engine.core.speculation import SpeculationController
from engine.core.stats import Stats
from engine.protocol import EngineRequest, InvalidRequest, MemoryExceeded, QueuedRequest
from engine.snapshot_store.files import SnapshotFiles

log = logging.getLogger("orchard.engine")

FIGURES_PERIOD_S = 0.25
DISK_WAIT_S = 0.05  # for a snapshot that is read from disk, while there is nothing else to do
DISK_CLOSE_S = 5.0  # for snapshots that are still to be written at the end

MIN_CHUNK_PART = 0.3
"""Part of a chunk's measured time that counts as its own, however long the decode step in flight should take."""

Publish = Callable[[Chunks], None]


class EngineCore:
    """memory, admission, queue, speculation_status: figures for the status page, read now and then. `clock` gives
    seconds. files: of the prefix cache's disk tier."""

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        publish: Publish,
        clock: Callable[[], float] = time.monotonic,
        files: SnapshotFiles | None = None,
    ):
        self.stats = Stats()
        self.runner = runner
        no_drafts = str(runner.capabilities.get("mtp", "the runner cannot draft"))
        self.costs = CostModel(runner.max_draft_tokens, runner.step_times)
        self._speculation = SpeculationController(config.mtp, runner.max_draft_tokens, self.costs, no_drafts)
        self.prefix = PrefixReuse(config.prefix_cache, runner, self.stats, files, clock)
        self._spare = EvictableMemory(self.prefix.cache, runner)
        self.budget = make_memory_budget(config, runner, self._spare)
        self.prefix.cache.room = lambda: self.budget.free_bytes + self.prefix.cache.num_bytes
        self.prefix.cache.seconds = self.costs.prompt_s
        self.scheduler = Scheduler(
            config,
            self.stats,
            clock,
            self.budget,
            self._spare,
            self.costs,
            self.prefix,
            has_bursts=runner.no_bursts is None,
        )
        self.memory: dict[str, int] = self._memory()
        self.speculation_status: dict[str, Any] = self._speculation.status()
        self.queue: tuple[QueuedRequest, ...] = ()
        self.admission: dict[str, int] = self.budget.status()
        self.pinned_bytes = 0
        self._clock = clock
        self._figures_read_s = clock()
        self._decoded_s: float | None = None  # when the last decode step ended, unless something else came after it
        self._publish = publish

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add_request(self, spec: EngineRequest, matchers: Sequence[Matcher] = ()) -> None:
        """matchers: of the request's grammar, one for each choice."""
        each = matchers or [None] * spec.num_choices
        self.scheduler.add([Request(spec, index, matcher) for index, matcher in enumerate(each)])

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)

    def step(self) -> None:
        """Decode once for all rows, then compute chunks of prompts. Tokens are published as soon as there are any."""
        if gone := self.scheduler.take_gone():
            self._drop(gone)
        num_draft_tokens = self._speculation.num_draft_tokens(self.scheduler.num_decoding)
        work = self.scheduler.schedule(num_draft_tokens)
        if ended := self.scheduler.take_ended():
            self._publish(ended)
        if work.drop:
            self._drop(work.drop)
        self.budget.observe(self.runner.active_bytes)
        in_flight_s = 0.0
        if work.decode and self.scheduler.num_decoding:  # unless the drop failed, and all rows with it
            self._decode(num_draft_tokens, work.merges)
            in_flight_s = self.costs.step_s(self.scheduler.num_decoding, num_draft_tokens) or 0.0
        while rows := self.scheduler.next_prompt():
            self._prefill(rows, in_flight_s)
            in_flight_s = 0.0
        self.stats.num_steps += 1
        self._read_figures()

    def close(self) -> None:
        try:
            self.prefix.close(DISK_CLOSE_S)
        finally:
            self.runner.close()

    def fitted(self, request: EngineRequest) -> EngineRequest:
        """Lower max_tokens, which is a ceiling, to what the memory holds. From any thread.

        Raises MemoryExceeded for a request that would not fit if it had the engine to itself.
        """
        budget, limit = self.budget, self.budget.for_requests - self.pinned_bytes
        rows = [Request(request, index) for index in range(request.num_choices)]
        whole = budget.need(rows, whole=True)
        if budget.alone(whole) <= limit:
            return request
        num_prompt, num_output = whole.num_prompt, request.sampling.max_tokens
        if request.pooling is None and (num_fitting := budget.max_answer(whole, num_output, limit)):
            return replace(request, sampling=replace(request.sampling, max_tokens=num_fitting))
        num_tokens = budget.max_tokens_alone(self.pinned_bytes)
        raise MemoryExceeded(num_prompt, num_output, num_tokens, budget.alone(whole), limit)

    def relieve(self) -> None:
        """The machine is short of memory: everything leaves that no running answer needs."""
        self._spare.free_all()

    def _read_figures(self) -> None:
        """Now and then while busy, and once more before the thread sleeps."""
        now = self._clock()
        if self.has_work and now - self._figures_read_s < FIGURES_PERIOD_S:
            return
        self._figures_read_s = now
        self.speculation_status = self._speculation.status()
        self.queue, self.admission = self.scheduler.queue(), self.budget.status()
        self.pinned_bytes = self._spare.pinned_bytes
        try:
            self.memory = self._memory()
        except Exception:
            log.exception("the memory figures could not be read")
        if not self.has_work:
            self.prefix.check_integrity()

    def _memory(self) -> dict[str, int]:
        cache = self.prefix.cache
        max_bytes = cache.max_bytes if self.prefix.off is None else 0
        books = {"prefix_cache_bytes": cache.num_bytes, "prefix_cache_max_bytes": max_bytes}
        return self.runner.memory() | books

    def _drop(self, row_ids: list[str]) -> None:
        self.prefix.end(row_ids)
        lent = self.prefix.returning(row_ids)
        try:
            self.runner.drop(row_ids, lent)
        except Exception as error:
            log.exception("dropping %s failed", ", ".join(row_ids))
            self._publish(self._fail_rows(f"dropping other rows failed: {type(error).__name__}"))
            self._drop_again(row_ids)
        self.prefix.settle(row_ids)

    def _drop_again(self, row_ids: list[str]) -> None:
        """The decode batch is new by now; prompts in progress may be left."""
        try:
            self.runner.drop(row_ids)
        except Exception:
            log.exception("dropping %s failed again: their memory counts as used", ", ".join(row_ids))

    def _fail_rows(self, error: str) -> Chunks:
        self.stats.failed_steps_in_a_row += 1
        self._decoded_s = None
        self.runner.reset()
        failed = self.scheduler.fail_rows(error)
        self.prefix.settle(failed)
        return failed

    def _decode(self, num_draft_tokens: int, merges: Sequence[GroupMerge]) -> None:
        num_rows, began_s = self.scheduler.num_decoding, None if merges else self._decoded_s
        try:
            for merge in merges:
                self.runner.merge_groups(*merge)
            outputs = self.runner.decode(num_draft_tokens)
            chunks = self.scheduler.update_decode(outputs)
        except Exception as error:
            log.exception("decode step failed with %d rows", num_rows)
            if num_draft_tokens:
                self._speculation.failed()  # a step without drafts may still work
            self._publish(self._fail_rows(f"decode step failed: {type(error).__name__}"))
            return
        self.stats.failed_steps_in_a_row = 0
        self._decoded_s = self._clock()
        seconds = None if began_s is None else self._decoded_s - began_s
        num_tokens = sum(len(output.token_ids) for output in outputs.values())
        self.costs.record_step(num_rows, num_draft_tokens, num_tokens / max(len(outputs), 1), seconds)
        self._speculation.record(outputs.values())
        self._publish(chunks)
        self._keep_answers()

    def _prefill(self, rows: Sequence[Request], in_flight_s: float) -> None:
        """Compute one chunk, which ends at the next boundary, or several of short prompts in one forward.

        in_flight_s: decoding that the device does before it.
        """
        self._decoded_s = None
        began_s = self._clock()
        try:
            can_wait = not self.scheduler.num_decoding and len(self.scheduler.prefills.in_progress) == 1
            if not self.prefix.begin(rows, DISK_WAIT_S if can_wait else 0.0):
                self.scheduler.prefills.wait_for_disk(rows)
                return
            if not (max_tokens := self.scheduler.prefills.chunk_tokens(rows)):
                return
            first = PromptChunk(rows[0], self.prefix.clip(rows, max_tokens))
            if len(burst := self._burst(rows, first)) > 1:
                self._prefill_burst(burst, began_s, in_flight_s)
                return
            chunk_began_s = self._clock()
            output = self.runner.prefill(rows, first.num_tokens)
            chunk_s = self._clock() - chunk_began_s
            chunks = self.scheduler.update_prefill(rows, output)
            self.prefix.passed(rows)
        except Exception as error:
            self._prefill_failed(rows, error)
            return
        if output.first is not None:
            self.prefix.end([rows[0].id])
            if not self.scheduler.num_decoding:  # nothing is left for a decode step to show
                self.stats.failed_steps_in_a_row = 0
        if output.num_tokens:
            seconds, least_s = self._clock() - began_s, MIN_CHUNK_PART * chunk_s
            self.scheduler.prefills.record_chunk(rows, output.num_tokens, seconds, max(chunk_s - in_flight_s, least_s))
        else:  # an image, which may take long
            self.scheduler.prefills.end_step()
        if chunks:
            self._publish(chunks)
            self._keep_answers()

    def _burst(self, rows: Sequence[Request], first: PromptChunk) -> Sequence[PromptChunk]:
        """Begin other short prompts, and choose the chunks that are computed in one forward with the first."""
        if first.num_tokens < self.prefix.clip(rows, _num_left(rows)):
            return [first]
        others = [
            PromptChunk(other[0], self.prefix.clip(other, _num_left(other)))
            for other in self.scheduler.prefills.companions(first)
            if self._has_begun(other)
        ]
        return self.scheduler.prefills.burst(first, others) if others else [first]

    def _has_begun(self, rows: Sequence[Request]) -> bool:
        """Begin a prompt behind what the prefix cache has of it, unless another one will soon leave more."""
        if self.prefix.source_of(rows[0]) is not None:
            return False
        try:
            if self.prefix.begin(rows):
                return True
            self.scheduler.prefills.wait_for_disk(rows)
        except Exception as error:
            self._prefill_failed(rows, error)
        return False

    def _prefill_burst(self, chunks: Sequence[PromptChunk], began_s: float, in_flight_s: float) -> None:
        """Compute several chunks in one forward; if that fails, each is computed alone in the next steps."""
        chunk_began_s = self._clock()
        try:
            outputs = self.runner.prefill_burst(chunks)
        except Exception as error:
            self._burst_failed([chunk.row for chunk in chunks], error)
            return
        chunk_s, published = self._clock() - chunk_began_s, Chunks()
        self.stats.num_bursts += 1
        for chunk, output in zip(chunks, outputs, strict=True):
            published |= self.scheduler.update_prefill([chunk.row], output)
            self.prefix.passed([chunk.row])
            if output.first is not None:
                self.prefix.end([chunk.row.id])
        if published and not self.scheduler.num_decoding:
            self.stats.failed_steps_in_a_row = 0
        seconds, least_s = self._clock() - began_s, MIN_CHUNK_PART * chunk_s
        self.scheduler.prefills.record_burst(chunks, seconds, max(chunk_s - in_flight_s, least_s))
        if published:
            self._publish(published)
            self._keep_answers()

    def _burst_failed(self, rows: Sequence[Request], error: Exception) -> None:
        """The rows may have joined the decode batch. What their prompts have left in the cache must not serve."""
        row_ids = [row.id for row in rows]
        log.error("prefill of %s failed together, each is computed alone", ", ".join(row_ids), exc_info=error)
        self.stats.num_failed_bursts += 1
        self.scheduler.prefills.end_step()
        self.prefix.end(row_ids, failed=True)
        self._drop(row_ids)
        self.scheduler.prefills.compute_alone(rows)

    def _keep_answers(self) -> None:
        """Store the state behind answers that have just ended, whose rows the runner still has."""
        for row in self.scheduler.take_completed():
            self.prefix.keep_answer(row)
            self._decoded_s = None  # taking the snapshot is no part of a decode step

    def _prefill_failed(self, rows: Sequence[Request], error: Exception) -> None:
        self.scheduler.prefills.end_step()
        self.prefix.end([rows[0].id], failed=True)
        if isinstance(error, InvalidRequest):  # the caller's fault says nothing about our health
            self._publish(self.scheduler.fail_prefill(rows, str(error)))
            return
        log.error("prefill of %s failed after %d tokens", rows[0].id, rows[0].num_prefilled, exc_info=error)
        works = self._device_works()
        self.stats.failed_steps_in_a_row += not works
        message, retry_after_s = f"prefill failed: {type(error).__name__}", None if works else RETRY_S
        self._publish(self.scheduler.fail_prefill(rows, message, retry_after_s))

    def _device_works(self) -> bool:
        """Or is it the request that fails? Nobody shall end the engine with a bad prompt."""
        try:
            self.runner.probe()
        except Exception:
            log.exception("the device does not work")
            return False
        return True


def _num_left(rows: Sequence[Request]) -> int:
    """Tokens of the prompt that are not computed yet."""
    return rows[0].num_prompt_tokens - rows[0].num_prefilled
