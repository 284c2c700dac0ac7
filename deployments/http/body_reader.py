"""BodyReader: parses request bodies of any size without blocking the event loop."""

import asyncio
import logging
import threading
import weakref

from deployments.http.body_process import BodyProcess, ProcessDied
from deployments.http.parsed_request import ParsedRequest, ReadingRules
from deployments.http.request_reader import is_cheap, read_request
from engine import retry_after
from engine.errors import Unavailable

logger = logging.getLogger("orchard.http")

NUM_PROCESSES = 2
"""Processes that parse large bodies; more than one, so that a slow body does not block the others."""

READ_TIMEOUT_S = 60.0
"""Longest time for one body; 32 MiB take about a second."""

START_TIMEOUT_S = 60.0
"""Longest time for the start of a process, which takes about a second."""

BASE_MEMORY_BYTES, MEMORY_PER_BODY_BYTE = 2**30, 16
"""Memory that a process may allocate: BASE_MEMORY_BYTES plus this factor times http.max_body_bytes. Text takes up to
four bytes per character and is copied while messages are merged."""


class BodyReader:
    """Parses cheap bodies in this process, and all others in subprocesses, which start on first use.

    A subprocess that died or timed out is replaced. They end when the reader is closed or garbage collected.
    """

    def __init__(self, rules: ReadingRules, max_body_bytes: int):
        self._rules = rules
        self._max_memory_bytes = BASE_MEMORY_BYTES + MEMORY_PER_BODY_BYTE * max_body_bytes
        self._free = asyncio.Semaphore(NUM_PROCESSES)
        self._idle: list[BodyProcess] = []
        self.close = weakref.finalize(self, _kill_all, self._idle)

    async def read(self, body: bytes, kind: str) -> ParsedRequest:
        """Parse a body. If the caller is cancelled, the subprocess still finishes the body before it takes another one.

        Raises:
            Unavailable: A subprocess failed.
            InvalidRequest, ModelNotFound: See `read_request`.
        """
        if is_cheap(body, self._rules):
            return read_request(body, kind, self._rules)
        await self._free.acquire()
        reading = asyncio.ensure_future(self._read(body, kind))
        reading.add_done_callback(self._done)
        return await asyncio.shield(reading)

    def _done(self, reading: asyncio.Future[ParsedRequest]) -> None:
        self._free.release()
        if not reading.cancelled():
            reading.exception()  # marks it as retrieved, as the caller may have been cancelled

    async def _read(self, body: bytes, kind: str) -> ParsedRequest:
        process = self._take_idle() or await self._start()
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                return await process.read(body, kind)
        except TimeoutError:
            raise _failed(f"The request body could not be read within {READ_TIMEOUT_S:g} s.") from None
        except ProcessDied:
            raise _failed("The process that read the request body has died.") from None
        finally:
            if process.has_answered:
                self._idle.append(process)
            else:
                process.kill()

    async def _start(self) -> BodyProcess:
        starting = _Start(self._rules, self._max_memory_bytes)
        try:
            process = await asyncio.to_thread(starting.run)
        except asyncio.CancelledError:
            starting.abandon()
            raise
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await process.until_ready()
        except BaseException as error:
            process.kill()
            if isinstance(error, TimeoutError | ProcessDied):
                raise _failed("The process that reads large request bodies could not be started.") from None
            raise
        return process

    def _take_idle(self) -> BodyProcess | None:
        while self._idle:
            process = self._idle.pop()
            if process.is_alive:
                return process
            process.kill()
        return None


def _failed(message: str) -> Unavailable:
    logger.warning("%s", message)
    return Unavailable(message, retry_after.BODY_S)


class _Start:
    """The start of a process on another thread, which goes on when the caller is cancelled."""

    def __init__(self, rules: ReadingRules, max_memory_bytes: int):
        self._rules, self._max_memory_bytes = rules, max_memory_bytes
        self._lock = threading.Lock()
        self._process: BodyProcess | None = None
        self._is_wanted = True

    def run(self) -> BodyProcess:
        """Start the process; kill it if the start has been abandoned meanwhile."""
        process = BodyProcess(self._rules, self._max_memory_bytes)
        with self._lock:
            self._process = process
            if not self._is_wanted:
                process.kill()
        return process

    def abandon(self) -> None:
        """Kill the process, now or as soon as it has started."""
        with self._lock:
            self._is_wanted = False
            if self._process is not None:
                self._process.kill()


def _kill_all(processes: list[BodyProcess]) -> None:
    while processes:
        processes.pop().kill()
