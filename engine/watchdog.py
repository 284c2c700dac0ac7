"""Watches a running engine: late work is logged, a hung device fails it, low host memory makes it reject requests.

It also keeps a Mac awake while the engine has work.
"""

import asyncio
import logging

from engine.async_device_thread import AsyncDeviceThread
from engine.awake import Awake
from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.core.progress import Work
from engine.core.row import named
from engine.errors import EngineFailed
from engine.host_memory import HostMemory
from engine.status import WorkInHand

log = logging.getLogger("orchard.engine")

WATCH_PERIOD_S = 0.5


class Watchdog:
    """Watches the device thread of an engine and the machine's memory.

    Args:
        config: The engine's configuration.
        thread: The engine's device thread.

    Attributes:
        shortage: Why new requests must be rejected for now: the machine is short of memory. None if it is not.
        ignores_memory: Whether memory is no longer watched, because new requests are rejected anyway.
        is_hung: Whether the engine has failed because its device hangs.
        num_late: Pieces of work that took much longer than predicted.
    """

    def __init__(self, config: EngineConfig, thread: AsyncDeviceThread[EngineCore]):
        self._step_timeout_s = config.step_timeout_s
        self._thread = thread
        min_gb = config.memory.min_available_gb
        self._host_memory = HostMemory(None if min_gb is None else int(min_gb * 2**30))
        self._awake = Awake()
        self._late: Work | None = None  # the last work reported as late
        self._task: asyncio.Task[None] | None = None
        self.shortage: str | None = None
        self.ignores_memory = self.is_hung = False
        self.num_late = 0

    @property
    def available_bytes(self) -> int:
        """Memory of the machine that processes can still take."""
        return self._host_memory.available()

    def start(self) -> None:
        """Begin to watch, until the engine ends or `stop` is called."""
        self._task = asyncio.ensure_future(self._watch())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def hang(self) -> str | None:
        """Log late work once; return an error message if the device hangs, else None."""
        core = self._thread.worker
        if core is None:
            return None
        work = core.progress.work  # read before its age: work that begins meanwhile is younger
        age_s, limit_s = self._thread.step_age_s, work.limit_s(self._step_timeout_s)
        predicted = f", predicted {work.predicted_s:.2g} s" if work.predicted_s else ""
        so_far = f"{work.name} has been running for {age_s:.1f} s{predicted}"
        if work.is_late(age_s) and work is not self._late:
            self._late = work
            self.num_late += 1
            log.warning(so_far, extra=named(work.rows))
        return f"{so_far}; the limit is {limit_s:g} s" if age_s > limit_s else None

    def work_in_hand(self, core: EngineCore) -> WorkInHand | None:
        """Return the piece of work that the device computes now; None if it is idle."""
        work, seconds = core.progress.work, self._thread.step_age_s
        return WorkInHand(work.name, seconds, work.predicted_s, work.is_late(seconds)) if seconds else None

    async def _watch(self) -> None:
        try:
            while self._thread.error is None:
                await asyncio.sleep(WATCH_PERIOD_S)
                self._look()
        finally:
            self._awake.keep(is_busy=False)

    def _look(self) -> None:
        core = self._thread.worker
        self._awake.keep(core is not None and core.has_work)
        if (error := self.hang()) is not None:
            self.is_hung = True
            self._thread.fail(EngineFailed(error))
        elif not self.ignores_memory:
            shortage = self._host_memory.shortage()
            if shortage is not None and self.shortage is None:
                log.error("new requests are rejected: %s", shortage)
                self._thread.submit(lambda core: core.free_evictable())
            self.shortage = shortage
