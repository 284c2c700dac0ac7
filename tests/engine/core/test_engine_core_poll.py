"""Aborts and new requests that arrive within a step take effect between its pieces."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.protocol import EngineRequest, FinishReason, SamplingParams
from tests.support.driver import Driver
from tests.support.fake_runner import STOP, FakeRunner, answer, run_engine, until
from tests.support.faults import Meanwhile

NUM_PROMPT = 20
"""A prompt is computed in two chunks of a step: the prefix cache keeps the state in front of its last token."""


def request(request_id: str, num_prompt: int = NUM_PROMPT, max_tokens: int = 5, **more: Any) -> EngineRequest:
    token_ids = np.random.default_rng(sum(request_id.encode())).integers(5, 900, num_prompt).astype(np.int32)
    return EngineRequest(request_id, token_ids, SamplingParams(max_tokens), (STOP,), **more)


class Inbox:
    """Commands for an EngineCore: each is executed at a certain poll, counted from 1."""

    def __init__(self) -> None:
        self.commands: dict[int, Callable[[EngineCore], None]] = {}
        self.num_polls = 0

    def __call__(self, core: EngineCore) -> None:
        self.num_polls += 1
        self.commands.pop(self.num_polls, lambda core: None)(core)


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


def work_of(runner: FakeRunner) -> list[tuple[str, str]]:
    """Chunks and drops in their order, each with a row."""
    return [(name, args[0]) for name, *args in runner.calls if name in ("prefill", "drop")]


def chunks_of(runner: FakeRunner, row_id: str) -> int:
    return work_of(runner).count(("prefill", row_id))


def test_a_prompt_that_is_aborted_between_two_chunks_is_not_advanced_again_in_the_step(inbox: Inbox):
    runner = FakeRunner()
    driver = Driver(runner, poll=inbox)
    for name in "ab":
        driver.core.add_request(request(name))
    inbox.commands[2] = lambda core: core.abort("a")  # behind the first chunk of a
    driver.core.step()
    assert work_of(runner) == [("prefill", "a/0"), ("drop", "a/0"), ("prefill", "b/0"), ("prefill", "b/0")]
    assert driver.core.stats.num_aborted == 1 and "a" not in driver.tokens
    assert driver.run({0: []}) == {"b": answer(request("b"))}


def test_a_row_that_is_aborted_within_a_step_is_dropped_before_the_next_chunk(inbox: Inbox):
    runner = FakeRunner()
    driver = Driver(runner, poll=inbox)
    driver.core.add_request(request("runs", max_tokens=50))
    driver.core.step()
    driver.core.add_request(request("new"))
    inbox.commands[inbox.num_polls + 1] = lambda core: core.abort("runs")  # behind the decode step
    driver.core.step()
    assert work_of(runner)[-3:] == [("drop", "runs/0"), ("prefill", "new/0"), ("prefill", "new/0")]
    assert "runs/0" not in runner.rows
    tokens = driver.run({0: []})
    assert tokens["new"] == answer(request("new")) and driver.core.budget.reserved_bytes == 0


def test_the_row_of_an_aborted_request_is_free_for_a_prompt_of_the_same_step(inbox: Inbox):
    runner = FakeRunner()
    driver = Driver(runner, EngineConfig(max_running=1), poll=inbox)
    for name in "ab":
        driver.core.add_request(request(name))
    inbox.commands[2] = lambda core: core.abort("a")
    driver.core.step()
    assert list(driver.tokens) == ["b"], "b had to wait for the row of a"


def test_an_abort_between_two_chunks_ends_all_choices_of_a_prompt(inbox: Inbox):
    runner = FakeRunner()
    driver = Driver(runner, poll=inbox)
    driver.core.add_request(request("three", num_choices=3))
    inbox.commands[2] = lambda core: core.abort("three")
    driver.core.step()
    assert chunks_of(runner, "three/0") == 1 and not runner.prompts and not driver.tokens
    driver.run({0: []})
    assert not driver.core.has_work and driver.core.stats.num_aborted == 3


def test_a_request_that_arrives_between_two_chunks_has_its_first_token_in_the_same_step(inbox: Inbox):
    runner = FakeRunner()
    driver = Driver(runner, poll=inbox)
    driver.core.add_request(request("a"))
    inbox.commands[2] = lambda core: core.add_request(request("late"))
    driver.core.step()
    assert len(driver.tokens["late"]) == 1
    assert driver.run({0: []}) == {name: answer(request(name)) for name in ("a", "late")}


def test_an_abort_overtakes_no_request(inbox: Inbox):
    """The request and its abort arrive together."""
    driver = Driver(FakeRunner(), poll=inbox)
    driver.core.add_request(request("a"))

    def come_and_go(core: EngineCore) -> None:
        core.add_request(request("late"))
        core.abort("late")

    inbox.commands[2] = come_and_go
    assert driver.run({0: []}) == {"a": answer(request("a"))}
    assert driver.core.stats.num_aborted == 1


class Interrupted(FakeRunner):
    """Lets something happen in the event loop during its first chunk, from its beginning to its end."""

    meanwhile: Meanwhile | None = None

    def prefill(self, rows, max_tokens):
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return super().prefill(rows, max_tokens)


def test_the_async_engine_hands_an_abort_over_between_two_chunks():
    runner = Interrupted()

    async def test(engine: AsyncEngine) -> None:
        async def abort() -> None:
            assert engine.abort("a")

        runner.meanwhile = Meanwhile(abort)
        *_, last = [chunk async for chunk in engine.generate(request("a"))]
        assert last.finish_reason is FinishReason.ABORT
        await until(lambda: engine.status().num_running == 0)
        assert [name for name, _ in work_of(runner)] == ["prefill", "drop"], "one chunk, and no second one"

    run_engine(test, runner, {})


def test_the_async_engine_shuts_down_after_the_step_in_progress():
    runner = Interrupted()

    async def test(engine: AsyncEngine) -> None:
        ended: list[asyncio.Task[None]] = []

        async def shut_down() -> None:
            ended.append(asyncio.create_task(engine.shutdown()))
            await asyncio.sleep(0)

        runner.meanwhile = Meanwhile(shut_down)
        *_, last = [chunk async for chunk in engine.generate(request("a"))]
        await ended[0]
        assert last.finish_reason is FinishReason.ERROR and runner.closed
        assert [name for name, *_ in runner.calls] == ["prefill", "snapshot", "prefill"], "the step, and no further one"

    run_engine(test, runner, {})
