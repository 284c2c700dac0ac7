"""When failures make the engine unhealthy and when they must not, and failures in what nobody asked for: freeing rows,
reading figures."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from engine.errors import EngineFailed
from engine.protocol import FinishReason
from tests.support.fake_runner import until
from tests.support.faults import Failing, Meanwhile, nothing
from tests.support.faulty_engine import PLAIN, RUNS, TINY, WAITS, Bench

MAX_FAILED_STEPS = 3


@pytest.fixture(scope="module")
def bench(tiny_model: Callable[..., Path]) -> Iterator[Bench]:
    with Bench(tiny_model(**TINY), max_failed_steps=MAX_FAILED_STEPS) as bench:
        yield bench


@contextmanager
def fails(bench: Bench, seam: str, times: float = inf, of: str | None = None) -> Iterator[None]:
    fault = bench.faults.arm(seam, Failing(), times=times, of=of)
    yield
    assert fault.num_fired == min(times, fault.num_passed) > 0
    bench.faults.clear()


async def ends(bench: Bench, *names: str) -> list[FinishReason | None]:
    """Return the finish reasons of requests that run one after the other."""
    return [(await bench.read(replace(RUNS, request_id=name))).reasons[0] for name in names]


WELL, FAILED = FinishReason.LENGTH, FinishReason.ERROR


def test_consecutive_failed_steps_make_the_engine_unhealthy_and_a_good_one_healthy_again(bench: Bench):
    async def test() -> None:
        with fails(bench, "decode"):
            assert await ends(bench, "a", "b") == [FAILED, FAILED]
        bench.engine.check_health()
        assert await ends(bench, "c") == [WELL]
        with fails(bench, "decode"):
            assert await ends(bench, "d", "e") == [FAILED, FAILED]
            bench.engine.check_health()
            assert await ends(bench, "f") == [FAILED]
        with pytest.raises(EngineFailed, match="3 consecutive steps failed; the limit is 3"):
            bench.engine.check_health()
        assert await ends(bench, "g") == [WELL]
        bench.engine.check_health()

    bench.run(test)


def test_a_prompt_that_always_fails_does_not_make_the_engine_unhealthy(bench: Bench):
    """Alone in the engine, and one that nobody else will be blamed for."""

    async def test() -> None:
        with fails(bench, "prefill", of="poison"):
            for _ in range(2 * MAX_FAILED_STEPS):
                assert await ends(bench, "poison") == [FAILED]
                bench.engine.check_health()
        bench.begin()
        assert await ends(bench, "a") == [WELL]
        await bench.check(PLAIN, 1)

    bench.run(test)


def test_a_failing_prompt_does_not_disturb_other_requests(bench: Bench):
    async def test() -> None:
        async with bench.scene(PLAIN) as scene:
            with fails(bench, "prefill", of="victim"):
                await scene.go()
                bench.engine.check_health()
        assert await bench.is_undisturbed(scene.runs, RUNS) and await bench.is_undisturbed(scene.waits, WAITS)
        await bench.check(PLAIN, 3)

    bench.run(test)


def test_prompts_that_fail_because_the_device_does_make_the_engine_unhealthy(bench: Bench):
    async def test() -> None:
        with fails(bench, "prefill"), fails(bench, "probe"):
            assert await ends(bench, "a", "b") == [FAILED, FAILED]
            bench.engine.check_health()
            assert await ends(bench, "c") == [FAILED]
        with pytest.raises(EngineFailed, match="3 consecutive steps failed; the limit is 3"):
            bench.engine.check_health()
        bench.begin()
        assert await ends(bench, "d") == [WELL]
        await bench.check(PLAIN, 1)

    bench.run(test)


@pytest.mark.parametrize(
    ("freeing", "times", "phase"), [("drop", 1, "before"), ("drop", 1, "after"), ("remove", 2, "before")]
)
@pytest.mark.parametrize("seam", ["prefill", "decode"])
def test_an_aborted_row_is_removed_although_freeing_it_fails(
    bench: Bench, seam: str, freeing: str, times: int, phase: str
):
    """The row that left is freed with the next step; that fails, and with it those that decode. `remove`: of a batch
    that is broken, however often it is tried."""

    async def test() -> None:
        async with bench.scene(PLAIN) as scene:

            async def leave() -> None:
                assert bench.engine.abort("victim")

            joined = bench.faults.arm("join", nothing, of="waits", phase="after") if seam == "decode" else None
            of = "victim" if seam == "prefill" else None
            left = bench.faults.arm(seam, Meanwhile(leave), call=2, of=of, behind=joined)
            fault = bench.faults.arm(freeing, Failing(), of="victim", times=times, phase=phase)
            await scene.go()
        assert left.num_fired == 1
        await until(lambda: fault.num_fired == times)  # it is tried again after the rows were told
        assert scene.victim.reasons == [FinishReason.ABORT]
        assert scene.runs.reasons == [FAILED] and "inside a library" not in (scene.runs.errors[0] or "")
        for reader, request in ((scene.runs, RUNS), (scene.victim, PLAIN), (scene.waits, WAITS)):
            assert reader.tokens[0] == (await bench.alone(request))[0][: len(reader.tokens[0])]
        await bench.check(PLAIN, 3, 1)

    bench.run(test)


def test_unreadable_memory_figures_cost_no_answer(bench: Bench):
    async def test() -> None:
        async with bench.scene(PLAIN) as scene:
            num_before = bench.faults.num_passed["memory"]
            with fails(bench, "memory"):
                await scene.go()
                await until(lambda: bench.faults.num_passed["memory"] > num_before)  # at the latest with the last step
                assert bench.engine.status().memory, "those that were read last"
        for reader, request in ((scene.runs, RUNS), (scene.victim, PLAIN), (scene.waits, WAITS)):
            assert await bench.is_undisturbed(reader, request)
        await bench.check(PLAIN, 3)

    bench.run(test)
