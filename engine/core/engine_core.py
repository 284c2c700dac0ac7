"""The engine's step: schedule, execute, update, publish. The only place that answers for a failed step."""

import logging
import time
from collections.abc import Callable

from engine.config import EngineConfig
from engine.core.batch import ModelRunner
from engine.core.request import Request
from engine.core.scheduler import Chunks, Scheduler
from engine.core.stats import Stats
from engine.protocol import EngineRequest, InvalidRequest

log = logging.getLogger("orchard.engine")

MEMORY_PERIOD_S = 0.25

Publish = Callable[[Chunks], None]


class EngineCore:
    def __init__(self, config: EngineConfig, runner: ModelRunner, publish: Publish):
        self.stats = Stats()
        self.scheduler = Scheduler(config, self.stats)
        self.runner = runner
        self.memory = runner.memory()
        self._memory_read = time.monotonic()
        self._publish = publish

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add_request(self, spec: EngineRequest) -> None:
        self.scheduler.add(Request(spec))

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)

    def step(self) -> None:
        """One step for the rows, then one chunk of a prompt. Tokens go out as soon as each of the two has them."""
        work = self.scheduler.schedule()
        if work.drop:
            self._drop(work.drop)
        if work.decode:
            self._decode()
        if work.prefill is not None:
            self._prefill(work.prefill, work.max_prefill_tokens)
        self.stats.num_steps += 1
        self._read_memory()

    def close(self) -> None:
        self.runner.close()

    def _read_memory(self) -> None:
        """For the status page: now and then while busy, and once more before the thread sleeps."""
        now = time.monotonic()
        if self.has_work and now - self._memory_read < MEMORY_PERIOD_S:
            return
        try:
            self.memory, self._memory_read = self.runner.memory(), now
        except Exception:
            log.exception("the memory figures could not be read")

    def _drop(self, request_ids: list[str]) -> None:
        try:
            self.runner.drop(request_ids)
        except Exception as error:
            log.exception("dropping %s failed", ", ".join(request_ids))
            self._publish(self._fail_rows(f"dropping other rows failed: {type(error).__name__}"))

    def _fail_rows(self, error: str) -> Chunks:
        self.stats.failed_steps_in_a_row += 1
        self.runner.reset()
        return self.scheduler.fail_rows(error)

    def _decode(self) -> None:
        try:
            chunks = self.scheduler.update_decode(self.runner.decode())
            self.stats.failed_steps_in_a_row = 0
        except Exception as error:
            log.exception("decode step failed with %d rows", self.scheduler.num_running)
            chunks = self._fail_rows(f"decode step failed: {type(error).__name__}")
        self._publish(chunks)

    def _prefill(self, request: Request, max_tokens: int) -> None:
        try:
            chunks = self.scheduler.update_prefill(request, self.runner.prefill(request, max_tokens))
            self.stats.failed_steps_in_a_row = 0
        except InvalidRequest as error:  # the caller's fault says nothing about our health
            chunks = self.scheduler.fail_prefill(request, str(error))
        except Exception as error:
            log.exception("prefill of %s failed after %d tokens", request.id, request.num_prefilled)
            self.stats.failed_steps_in_a_row += 1
            chunks = self.scheduler.fail_prefill(request, f"prefill failed: {type(error).__name__}")
        if chunks:
            self._publish(chunks)
