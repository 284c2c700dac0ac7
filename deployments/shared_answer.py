"""SharedAnswer: one question to the replicas for all who ask at about the same time."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedAnswer(Generic[T]):
    """Asks at most once at a time, and not again as long as the last answer is young. An error is not kept.

    `forget` is for events after which an older answer would be wrong.
    """

    def __init__(
        self, ask: Callable[[], Awaitable[T]], max_age_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            max_age_s: An answer counts from the moment when it was asked for, and is given for so long.
            clock: Monotonic seconds.
        """
        self._ask = ask
        self._max_age_s = max_age_s
        self._clock = clock
        self._asked_at = float("-inf")
        self._answer: asyncio.Task[T] | None = None

    async def get(self) -> T:
        """The answer. One caller that is cancelled does not take it from the others."""
        answer = self._answer
        if answer is None or (answer.done() and not self._is_young(answer)):
            self._asked_at = self._clock()
            answer = self._answer = asyncio.ensure_future(self._asked())
            answer.add_done_callback(lambda task: task.cancelled() or task.exception())  # if all callers have left
        return await asyncio.shield(answer)

    def forget(self) -> None:
        """Those who ask from now on get a new answer, also if there is a question under way."""
        self._answer = None

    async def _asked(self) -> T:
        return await self._ask()

    def _is_young(self, answer: "asyncio.Task[T]") -> bool:
        is_answered = not answer.cancelled() and answer.exception() is None
        return is_answered and self._clock() - self._asked_at < self._max_age_s
