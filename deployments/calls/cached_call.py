"""CachedCall: one call to the replicas shared by concurrent and closely following requests."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class CachedCall(Generic[T]):
    """Caches the result of a call for a short time, with at most one call in progress. Errors are not cached."""

    def __init__(
        self, ask: Callable[[], Awaitable[T]], max_age_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Create a call without an answer yet.

        Args:
            ask: The call.
            max_age_s: How long an answer is reused, counted from the start of its call.
            clock: Monotonic seconds.
        """
        self._ask = ask
        self._max_age_s = max_age_s
        self._clock = clock
        self._asked_at = float("-inf")
        self._answer: asyncio.Task[T] | None = None

    async def get(self) -> T:
        """Return the cached answer or make the call. A cancelled caller does not cancel the call for the others."""
        answer = self._answer
        if answer is None or (answer.done() and not self._is_young(answer)):
            self._asked_at = self._clock()
            answer = self._answer = asyncio.ensure_future(self._asked())
            answer.add_done_callback(lambda task: task.cancelled() or task.exception())  # marks it as retrieved
        return await asyncio.shield(answer)

    def forget(self) -> None:
        """Invalidate the cached answer and any call in progress, for an event that makes older answers wrong."""
        self._answer = None

    async def _asked(self) -> T:
        return await self._ask()

    def _is_young(self, answer: "asyncio.Task[T]") -> bool:
        is_answered = not answer.cancelled() and answer.exception() is None
        return is_answered and self._clock() - self._asked_at < self._max_age_s
