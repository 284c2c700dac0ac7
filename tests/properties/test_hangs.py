"""A step that does not come back: whoever waits is told so in time, nobody else is let in, and nothing is left behind.

Those that wait: a row that decodes, a prompt that is taken in, a request in the queue, one whose grammar is being
compiled, and somebody who has asked what the cache holds.
"""

import asyncio
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.errors import EngineFailed, Unavailable
from engine.processing import grammar
from engine.protocol import EngineRequest, FinishReason, GrammarSpec
from tests.support.fake_runner import until
from tests.support.faults import Armed, Failing, Faults, Hanging, nothing
from tests.support.faulty_engine import PLAIN, REGEX, THREE, TINY, Bench, Reader, with_picture

STEP_TIMEOUT_S = 1.0
SOON_S = 30.0
"""From the beginning of a hang: a generous multiple, as the machine may be busy."""


@pytest.fixture(scope="module")
def bench(tiny_model: Callable[..., Path]) -> Iterator[Bench]:
    """Nothing hangs in this one: it knows the answers and holds the weights."""
    with Bench(tiny_model(**TINY)) as bench:
        yield bench


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    """No grammar is compiled while this hangs."""
    faults = Faults()
    monkeypatch.setattr(grammar, "_source", faults.around(grammar._source, "compile"))
    with Hanging() as hang:
        faults.arm("compile", hang)
        yield hang


COMPILES = replace(REGEX, request_id="compiles", grammar=GrammarSpec("regex", "[a-z]{40,99}"))

HANGS: dict[str, tuple[str, EngineRequest, dict[str, Any]]] = {
    "first chunk": ("prefill", PLAIN, {}),
    "restore": ("restore", PLAIN, {}),
    "snapshot": ("snapshot", PLAIN, {}),
    "picture": ("encode", with_picture(), {}),
    "join": ("join", THREE, {"call": 2}),
    "decode": ("decode", PLAIN, {}),
    "mask": ("masks", REGEX, {"call": 3}),
    "hand-over": ("publish", PLAIN, {}),
    "drop": ("drop", PLAIN, {}),
    "memory": ("memory", PLAIN, {}),
    "probe": ("probe", PLAIN, {}),
}
"""seam, the request in the middle, which call of the seam"""


def arm(faults: Faults, name: str, hang: Callable[[], None]) -> Armed:
    seam, _, when = HANGS[name]
    if seam == "probe":  # which finds out whether a prompt failed because the device does
        faults.arm("prefill", Failing(), of="victim")
    if seam in ("decode", "memory"):  # while all of the scene are there
        when = {"behind": faults.arm("prefill", nothing, of="victim")}
    elif seam not in ("encode", "drop", "probe"):
        when = {"of": "victim", **when}
    return faults.arm(seam, hang, **when)


LIMIT = r"the limit is [1-9]\d?(\.\d+)? s"
"""The first work of a shape may take twice the timeout, and work on a busy machine a multiple of its prediction."""


def assert_told(reader: Reader) -> None:
    """That it is not the request's fault, and why."""
    if reader.refusal is not None:
        assert isinstance(reader.refusal, Unavailable) and re.search(LIMIT, reader.refusal.message)
        return
    for index, end in reader.ends.items():
        if end.finish_reason is FinishReason.ERROR:
            assert end.error is not None and re.search(LIMIT, end.error) and end.retry_after_s is not None, end
        else:
            assert end.finish_reason is FinishReason.LENGTH, f"choice {index}: {end}"
    assert len(reader.ends) == len(reader.tokens), "every choice has ended"


@pytest.mark.parametrize("name", HANGS)
def test_a_hanging_step_ends_all_waiting_requests_with_the_reason_and_leaves_no_state(bench: Bench, name: str):
    before = bench.run(bench.look)
    other = bench.another(step_timeout_s=STEP_TIMEOUT_S)
    _, request, _ = HANGS[name]

    async def test() -> None:
        seeds = [replace(PLAIN, request_id="before")] if name == "restore" else []
        async with other.scene(request, before=seeds) as scene:
            fault = arm(other.faults, name, hang)
            scene.gate.release()
            await until(hang.began.is_set, SOON_S)
            asked = asyncio.create_task(other.engine.cache_status())
            tasks = [asked, *(reader.task for reader in scene.all)]
            await until(lambda: all(task.done() for task in tasks), SOON_S)
            assert fault.num_fired == 1
            for reader in scene.all:
                assert_told(reader)
            assert isinstance(asked.exception(), EngineFailed)
            await assert_refuses(other)
        hang.release()
        await other.engine.shutdown()
        assert await asyncio.to_thread(other.engine._thread.join, SOON_S), "its thread has ended"
        with pytest.raises(EngineFailed):
            await other.read(PLAIN)

    with other, Hanging() as hang:
        other.run(test)
    assert bench.run(bench.look) == before


def test_a_request_that_waits_for_its_grammar_ends_when_a_step_hangs(bench: Bench, compiling: Hanging):
    other = bench.another(step_timeout_s=STEP_TIMEOUT_S, grammar={"compile_timeout_s": 100})

    async def test() -> None:
        async with other.scene(PLAIN) as scene:
            compiles = Reader(other.engine, COMPILES)
            arm(other.faults, "decode", hang)
            await until(compiling.began.is_set)
            scene.gate.release()
            await until(hang.began.is_set, SOON_S)
            await until(compiles.task.done, SOON_S)
            assert_told(compiles)

    with other, Hanging() as hang:
        other.run(test)


async def assert_refuses(bench: Bench) -> None:
    for _ in range(2):
        with pytest.raises(Unavailable, match=LIMIT):
            await bench.read(replace(PLAIN, request_id="late"))
    with pytest.raises(EngineFailed, match=LIMIT):
        bench.engine.check_health()
    assert re.search(LIMIT, bench.engine.status().unavailable or bench.engine.status().error or "")


def test_shutdown_does_not_wait_for_a_hanging_step(bench: Bench):
    other = bench.another()

    async def test() -> None:
        async with other.scene(PLAIN) as scene:
            arm(other.faults, "first chunk", hang)
            scene.gate.release()
            await until(hang.began.is_set, SOON_S)
            await asyncio.wait_for(other.engine.shutdown(timeout_s=0.3), SOON_S)
            await until(lambda: all(reader.task.done() for reader in scene.all), SOON_S)
            for reader in scene.all:
                assert set(reader.reasons) == {FinishReason.ERROR} and "did not end within" in (reader.errors[0] or "")
        assert not other.engine._thread.join(0)
        hang.release()
        assert await asyncio.to_thread(other.engine._thread.join, SOON_S), "it ends when it can"

    with other, Hanging() as hang:
        other.run(test)


def test_a_hanging_status_query_is_handled_like_a_hanging_step(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    """The device thread answers questions between two steps, and must come back from them, too."""
    other = bench.another(step_timeout_s=STEP_TIMEOUT_S)

    async def test() -> None:
        core = other.engine._thread.worker
        assert core is not None
        monkeypatch.setattr(core.prefixes, "status", lambda: hang())
        asked = asyncio.create_task(other.engine.cache_status())
        await until(hang.began.is_set)
        reader = Reader(other.engine, PLAIN)
        await until(lambda: asked.done() and reader.task.done(), SOON_S)
        assert isinstance(asked.exception(), EngineFailed)
        assert_told(reader)
        await assert_refuses(other)

    with other, Hanging() as hang:
        other.run(test)


@pytest.mark.parametrize("who", ["step", "reader"])
def test_draining_has_a_time_limit(bench: Bench, who: str):
    """For a step that hangs, or for a reader that does not come back for the rest of its answer."""
    other = bench.another()

    async def test() -> None:
        async with other.scene(PLAIN, pauses=who == "reader") as scene:
            fault = arm(other.faults, "decode", hang if who == "step" else nothing)
            scene.gate.release()
            await until(lambda: fault.num_fired > 0, SOON_S)
            await asyncio.wait_for(other.engine.drain(0.3), SOON_S)
            with pytest.raises(Unavailable):
                await other.read(replace(PLAIN, request_id="late"))
            scene.victim.resume.set()
            await until(lambda: all(reader.task.done() for reader in scene.all), SOON_S)
            for reader in scene.all:
                for end in reader.ends.values():
                    assert end.finish_reason is FinishReason.LENGTH or end.retry_after_s is not None, end
        hang.release()

    with other, Hanging() as hang:
        other.run(test)


def test_an_engine_that_hangs_while_it_loads_can_be_shut_down(bench: Bench):
    async def test() -> None:
        def load(config: EngineConfig, progress: Callable[[float], None]) -> Any:
            hang()
            raise ValueError("it was too late")

        engine = AsyncEngine(bench.config, load)
        waits = asyncio.create_task(engine.wait_ready())
        await until(hang.began.is_set)
        await engine.shutdown(timeout_s=0.3)
        await until(waits.done)
        assert isinstance(waits.exception(), EngineFailed)
        with pytest.raises(EngineFailed):
            await anext(aiter(engine.generate(PLAIN)))
        hang.release()
        assert await asyncio.to_thread(engine._thread.join, SOON_S)

    with Hanging() as hang:
        bench.run(test)
