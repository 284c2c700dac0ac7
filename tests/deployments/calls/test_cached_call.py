"""One question for all who ask at about the same time."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from deployments.calls.cached_call import CachedCall
from tests.support.clock import Clock


class Question:
    """Answers with how often it was asked, after `seconds`."""

    def __init__(self, seconds: float = 0.01):
        self.num_asked = 0
        self.clock = Clock(0.0)
        self.error: Exception | None = None
        self._seconds = seconds
        self.shared = CachedCall(self.ask, 0.5, self.clock)

    async def ask(self) -> int:
        self.num_asked += 1
        answer = self.num_asked
        await asyncio.sleep(self._seconds)
        if self.error is not None:
            raise self.error
        return answer


def run(test: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(test(), 10))


def test_concurrent_calls_share_one_answer_and_later_calls_use_the_cached_answer():
    async def go() -> list[int]:
        question = Question()
        at_once = await asyncio.gather(*[question.shared.get() for _ in range(100)])
        question.clock.now_s = 0.4
        young = await question.shared.get()
        question.clock.now_s = 0.6
        return [*set(at_once), young, await question.shared.get()]

    assert run(go) == [1, 1, 2]


def test_call_after_forget_gets_a_new_answer():
    async def go() -> list[int]:
        question = Question()
        asked_before = asyncio.ensure_future(question.shared.get())
        await asyncio.sleep(0)
        question.shared.forget()
        return [await question.shared.get(), await asked_before]

    assert run(go) == [2, 1]


def test_cancelled_call_does_not_cancel_the_answer_of_other_calls():
    async def go() -> int:
        question = Question()
        leaving, staying = (asyncio.ensure_future(question.shared.get()) for _ in range(2))
        await asyncio.sleep(0)
        leaving.cancel()
        return await staying

    assert run(go) == 1


def test_error_is_raised_in_all_waiting_calls_and_not_cached():
    async def go() -> int:
        question = Question()
        question.error = ZeroDivisionError()
        said = await asyncio.gather(question.shared.get(), question.shared.get(), return_exceptions=True)
        assert [type(error) for error in said] == [ZeroDivisionError] * 2 and question.num_asked == 1
        question.error = None
        return await question.shared.get()

    assert run(go) == 2


def test_error_after_the_last_waiting_call_was_cancelled_gives_no_warning():
    async def go() -> None:
        question = Question()
        question.error = ZeroDivisionError()
        waiting = asyncio.ensure_future(question.shared.get())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.sleep(0.05)

    run(go)
