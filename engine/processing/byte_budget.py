"""ByteBudget: a semaphore in bytes for the tasks of one event loop."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class BudgetLease:
    """The bytes that one task has acquired from a budget."""

    def __init__(self, budget: "ByteBudget", num_bytes: int):
        self._budget = budget
        self.num_bytes = num_bytes

    def shrink(self, num_bytes: int) -> None:
        """Release all but num_bytes."""
        if num_bytes < self.num_bytes:
            self._budget._give_back(self.num_bytes - num_bytes)
            self.num_bytes = num_bytes


class ByteBudget:
    """A semaphore that counts bytes and serves tasks in order of arrival.

    A task must not acquire more bytes while it has some, or two tasks could deadlock.
    """

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self.peak_bytes = 0  # largest held_bytes so far
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def hold(self, num_bytes: int) -> AsyncIterator[BudgetLease]:
        """Acquire num_bytes for the context, at most the whole budget."""
        hold = BudgetLease(self, await self._acquire(min(num_bytes, self.max_bytes)))
        try:
            yield hold
        finally:
            hold.shrink(0)

    async def _acquire(self, num_bytes: int) -> int:
        if not self._waiting and self.held_bytes + num_bytes <= self.max_bytes:
            self._take(num_bytes)
            return num_bytes
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (num_bytes, granted)
        self._waiting.append(entry)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                self._waiting.remove(entry)
                self._grant()  # the next one may need less
            else:  # granted and cancelled at the same time
                self._give_back(num_bytes)
            raise
        return num_bytes

    def _take(self, num_bytes: int) -> None:
        self.held_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def _give_back(self, num_bytes: int) -> None:
        self.held_bytes -= num_bytes
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self.held_bytes + self._waiting[0][0] <= self.max_bytes:
            num_bytes, granted = self._waiting[0]
            if granted.cancelled():  # its task has not run since; it removes the entry itself
                return
            self._waiting.popleft()
            self._take(num_bytes)
            granted.set_result(None)
