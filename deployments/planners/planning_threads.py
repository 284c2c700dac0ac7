"""PlanningThreads: the threads that render and tokenize prompts, with a queue that is fair between clients."""

import asyncio
import heapq
import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

LARGE_BYTES = 256 * 2**10
"""Conversations of this size take tenths of a second or more to plan. They never occupy all threads."""

MAX_LARGE_BYTES = 64 * 2**20
"""Bytes of large conversations that are planned at the same time, as planning holds several copies of each. A single
larger one is planned while no other large one is."""

MAX_CLIENTS = 1024
"""Clients that are tracked before those without pending virtual time are dropped."""

BASE_BYTES = 4096
"""Fixed cost of a conversation in the fair queue, in addition to its bytes."""


@dataclass(order=True)
class Job:
    """One conversation in the queue."""

    finish: int
    """Virtual finish time in bytes (start-time fair queueing)."""
    number: int
    """Sequence number of arrival, which breaks ties."""
    num_bytes: int = field(compare=False)
    """Size of the conversation."""
    work: Callable[[Callable[[], bool]], Any] = field(compare=False)
    planned: asyncio.Future[Any] = field(compare=False)
    """The result for the caller."""
    left: threading.Event = field(compare=False, default_factory=threading.Event)
    """Set when the caller no longer waits."""

    @property
    def is_large(self) -> bool:
        return self.num_bytes >= LARGE_BYTES


class PlanningThreads:
    """Runs planning work in one thread per core, at least two; large conversations never occupy the last one.

    Clients share the threads by planned bytes (start-time fair queueing; Goyal et al. 1996). Work whose caller is
    cancelled is not started; running work can poll for it.
    """

    def __init__(self, num_threads: int | None = None):
        self._num_threads = num_threads or max(2, os.cpu_count() or 2)
        self._executor = ThreadPoolExecutor(self._num_threads, "planning")
        self._waiting: list[Job] = []
        self._numbers = itertools.count()
        self._clock = 0
        self._finish_of: dict[str, int] = {}
        self._num_running = self._num_large = self._large_bytes = 0

    async def run(self, client: str, num_bytes: int, work: Callable[[Callable[[], bool]], T]) -> T:
        """Run work in a thread when it is the client's turn.

        Args:
            client: The client that the work counts for.
            num_bytes: Size of the conversation.
            work: Called with a function that tells whether the result is still needed.
        """
        finish = max(self._clock, self._finish_of.get(client, 0)) + num_bytes + BASE_BYTES
        if len(self._finish_of) > MAX_CLIENTS:
            self._finish_of = {name: at for name, at in self._finish_of.items() if at > self._clock}
        self._finish_of[client] = finish
        job = Job(finish, next(self._numbers), num_bytes, work, asyncio.get_running_loop().create_future())
        heapq.heappush(self._waiting, job)
        self._start_next()
        try:
            return await job.planned
        finally:
            job.left.set()

    def _start_next(self) -> None:
        """Start as many jobs as fit; large jobs that must wait are passed over."""
        passed = []
        while self._waiting and self._num_running < self._num_threads:
            job = heapq.heappop(self._waiting)
            if job.left.is_set():
                continue
            if job.is_large and not self._has_room_for(job):
                passed.append(job)
                continue
            self._start(job)
        for job in passed:
            heapq.heappush(self._waiting, job)
        if not self._waiting:
            self._finish_of.clear()

    def _has_room_for(self, job: Job) -> bool:
        if self._num_large == 0:
            return True
        fits = self._large_bytes + job.num_bytes <= MAX_LARGE_BYTES
        return fits and self._num_large < self._num_threads - 1

    def _start(self, job: Job) -> None:
        self._clock = max(self._clock, job.finish - job.num_bytes - BASE_BYTES)
        self._count(job, 1)
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(self._executor, job.work, lambda: not job.left.is_set())
        running.add_done_callback(lambda done: self._ended(job, done))

    def _ended(self, job: Job, done: asyncio.Future[Any]) -> None:
        self._count(job, -1)
        self._start_next()
        error = None if done.cancelled() else done.exception()
        if job.planned.done():
            return  # the caller was cancelled
        if done.cancelled():
            job.planned.cancel()
        elif error is not None:
            job.planned.set_exception(error)
        else:
            job.planned.set_result(done.result())

    def _count(self, job: Job, sign: int) -> None:
        self._num_running += sign
        if job.is_large:
            self._num_large += sign
            self._large_bytes += sign * job.num_bytes
