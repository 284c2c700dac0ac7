"""The work in hand and its limits: named, predicted, each piece for itself."""

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.core.progress import FIRST_FACTOR, LATE_FACTOR, LOST_FACTOR, MIN_LATE_S, Work, WorkInProgress
from engine.core.runner import PLAIN, StepTime
from engine.protocol import EngineRequest, SamplingParams
from tests.engine.core.test_engine_core_steps import TimedRunner
from tests.support.clock import Clock
from tests.support.driver import Driver
from tests.support.fake_runner import STOP


def test_work_may_take_the_timeout_or_a_multiple_of_its_prediction_whichever_is_longer():
    assert Work("a chunk", 0.5).limit_s(120) == 120
    assert Work("a chunk of a slow device", 100.0).limit_s(120) == LOST_FACTOR * 100
    assert Work("a drop").limit_s(120) == 120, "nothing is predicted"


def test_work_is_late_before_the_limit_of_the_watchdog():
    work = Work("a chunk", 3.0)
    assert not work.is_late(LATE_FACTOR * 3.0) and work.is_late(LATE_FACTOR * 3.0 + 0.1)
    assert not Work("a decode step", 0.01).is_late(MIN_LATE_S), "what takes a moment is not worth a word"
    assert Work("a drop").is_late(MIN_LATE_S + 0.1)
    assert LATE_FACTOR < LOST_FACTOR


def test_the_first_work_of_a_shape_gets_a_longer_limit_for_compiling():
    progress = WorkInProgress([("decode", 1, 0)])
    limits = []
    for shape in (("decode", 1, 0), ("decode", 2, 0), ("decode", 2, 0), ("prefill", 1, 7)):
        progress.begin("work", 10.0, shape)
        limits.append(progress.work.limit_s(1.0))
    assert limits == [200.0, FIRST_FACTOR * 200, 200.0, FIRST_FACTOR * 200]
    assert Work("compiles", 1.0, is_first=True).is_late(FIRST_FACTOR * LATE_FACTOR + 0.1)
    assert not Work("compiles", 1.0, is_first=True).is_late(LATE_FACTOR + 0.1)


class WatchedRunner(TimedRunner):
    """Notes what is in hand whenever it is called."""

    core = None

    def __init__(self, clock: Clock, **more):
        super().__init__(clock, **more)
        self.seen: list[Work] = []

    def _called(self, name, *args):
        super()._called(name, *args)
        if self.core is not None:
            self.seen.append(self.core.progress.work)


def request(request_id: str, num_prompt: int, max_tokens: int = 3) -> EngineRequest:
    return EngineRequest(request_id, np.arange(num_prompt, dtype=np.int32), SamplingParams(max_tokens), (STOP,))


@pytest.fixture
def watched() -> tuple[WatchedRunner, Driver]:
    clock = Clock()
    runner = WatchedRunner(clock)
    runner.step_times = [StepTime(1, PLAIN, 0.01), StepTime(2, PLAIN, 0.01)]
    driver = Driver(runner, EngineConfig.model_validate({"prefix_cache": {"enabled": False}}), clock)
    runner.core = driver.core  # type: ignore[assignment]
    return runner, driver


def test_each_chunk_and_step_is_reported_with_its_own_predicted_time(watched):
    runner, driver = watched
    driver.run({0: [request("warm", 64)]})
    del runner.seen[:]
    driver.core.add_request(request("a", 40))
    driver.core.add_request(request("b", 50))
    driver.core.step()
    chunk, other = runner.seen
    assert (chunk.name, other.name) == ("a chunk of 40 tokens at position 0", "a chunk of 50 tokens at position 0")
    assert chunk.predicted_s == pytest.approx(0.04, rel=0.1) and other.predicted_s == pytest.approx(0.05, rel=0.1)
    assert driver.core.progress.work.name == "a step", "nothing that is predicted is in hand any more"
    del runner.seen[:]
    driver.core.step()
    assert runner.seen[0].name == "a decode step (rows: 2, drafts: 0)"
    assert runner.seen[0].predicted_s == pytest.approx(0.01, rel=0.1) and not runner.seen[0].is_first


def test_work_after_a_failed_chunk_is_not_reported_as_the_chunk(watched):
    runner, driver = watched
    runner.broken = {"prefill"}
    driver.run({0: [request("a", 40)]})
    assert driver.core.progress.work.name == "a step"
