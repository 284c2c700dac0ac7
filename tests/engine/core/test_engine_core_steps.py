"""EngineCore with a runner without a model: drafts and times never change the tokens."""

from typing import Any

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.core.runner import PLAIN, Drafts
from engine.protocol import EngineRequest, FinishReason, SamplingParams
from tests.support.clock import Clock
from tests.support.driver import Driver
from tests.support.fake_runner import STOP, FakeRunner, answer


class TimedRunner(FakeRunner):
    """A step of k drafts takes 10 * (1 + 0.1 k) ms, a prefill chunk 1 s per 1000 tokens."""

    def __init__(self, clock: Clock, **more: Any):
        super().__init__(**more)
        self._clock = clock

    def decode(self, drafts=PLAIN):
        self._clock.advance(0.01 * (1 + 0.1 * drafts.num_tokens))
        return super().decode(drafts)

    def prefill(self, rows, max_tokens):
        output = super().prefill(rows, max_tokens)
        self._clock.advance(output.num_tokens / 1000)
        return output


def config(mtp: Any, **more: Any) -> EngineConfig:
    return EngineConfig.model_validate({"mtp": mtp, **more})


def request(request_id: str, max_tokens: int = 50, num_prompt: int = 10, seed: int = 0) -> EngineRequest:
    sampling = SamplingParams(max_tokens, seed=seed)
    return EngineRequest(request_id, np.arange(num_prompt, dtype=np.int32), sampling, (STOP,))


def drafts(runner: FakeRunner) -> list[int]:
    return [call[1] for call in runner.calls if call[0] == "decode"]


@pytest.mark.parametrize("mtp", ["off", "auto", {"max_draft_tokens": 1}, {"max_draft_tokens": 3}])
def test_drafts_change_the_timing_of_tokens_but_never_the_tokens(mtp):
    requests = [request(f"r{i}", 20 + 7 * i, seed=i) for i in range(5)]
    runner = FakeRunner(3, accepts=lambda seed, position: (seed + position) % 3 > 0)
    runner.stops_at = {2: 11, 3: 0}
    driver = Driver(runner, config(mtp))
    tokens = driver.run({3 * i: [each] for i, each in enumerate(requests)})
    for i, each in enumerate(requests):
        assert tokens[each.request_id] == answer(each)[: runner.stops_at.get(i)]


def test_fixed_drafts_stop_where_the_batch_is_too_large():
    runner = FakeRunner(3)
    Driver(runner, config({"max_draft_tokens": 2, "max_rows": 2})).run(
        {0: [request(f"r{i}", 20 * (i + 1), seed=i) for i in range(4)]}
    )
    by_rows = {len(call) - 2: call[1] for call in runner.calls if call[0] == "decode"}
    assert by_rows[1] == by_rows[2] == 2 and by_rows[3] == by_rows[4] == 0


def test_auto_speculation_keeps_drafting_where_drafts_pay():
    clock = Clock()
    runner = TimedRunner(clock, max_draft_tokens=3)
    driver = Driver(runner, config("auto"), clock)
    driver.run({0: [request("r", 600)]})
    assert drafts(runner)[:4] == [3] * 4 and drafts(runner)[-20:] == [3] * 20
    status = driver.core.figures.speculation
    assert status["mtp"]["mode"] == "auto" and status["mtp"]["acceptance"] == 1.0
    assert status["step_ms"]["1"]["3"] == pytest.approx(13.0, rel=1e-2)
    assert driver.core.costs.step_s(1, Drafts(3)) == pytest.approx(0.013, rel=1e-2)
    assert driver.core.costs.token_s(1) == pytest.approx(0.013 / 4, rel=1e-2)


def test_auto_speculation_stops_drafting_where_drafts_are_never_accepted():
    clock = Clock()
    runner = TimedRunner(clock, max_draft_tokens=3, accepts=lambda seed, position: False)
    Driver(runner, config("auto"), clock).run({0: [request("r", 1000)]})
    assert sum(k > 0 for k in drafts(runner)) < 80 and drafts(runner)[-100:] == [0] * 100


def test_a_step_next_to_a_prefill_is_not_timed():
    clock = Clock()
    runner = TimedRunner(clock, max_draft_tokens=3)
    driver = Driver(runner, config("off", prefill_chunk_tokens_busy=16), clock)
    driver.run({0: [request("r", 70)], 5: [request("long", 1, num_prompt=900)]})
    assert driver.core.costs.step_s(1, PLAIN) == pytest.approx(0.01, rel=1e-2)


def test_a_slow_prefill_makes_the_chunks_smaller_while_rows_decode():
    clock = Clock()
    runner = TimedRunner(clock)
    limits = {"prefill_chunk_tokens_busy": 256, "scheduler": {"max_stall_s": 0.1}, "prefix_cache": {"enabled": False}}
    driver = Driver(runner, config("off", **limits), clock)
    driver.run({0: [request("r", 30)], 5: [request("long", 1, num_prompt=600)]})
    sizes = [call[2] for call in runner.calls if call[0] == "prefill" and call[1] == "long/0"]
    assert len(sizes) <= 8 and all(size <= 120 for size in sizes), "about 0.1 s each, the first one is a guess"


def test_the_speculation_status_reports_why_there_is_no_head():
    driver = Driver(FakeRunner())
    assert driver.core.figures.speculation["mtp"]["reason"] == "the fake has none"


def test_drafts_are_counted_for_each_request_and_overall():
    runner = FakeRunner(3, accepts=lambda seed, position: position % 2 == 0)
    driver = Driver(runner, config({"max_draft_tokens": 2}))
    driver.run({0: [request("r", 21)]})
    drafted = sum(chunk.num_drafted for chunk in driver.chunks["r"])
    accepted = sum(chunk.num_accepted for chunk in driver.chunks["r"])
    assert (drafted, accepted) == (driver.core.stats.num_drafted, driver.core.stats.num_accepted)
    assert 0 < accepted < drafted and driver.core.stats.num_output_tokens == 21


def test_a_failed_drop_ends_the_rows_and_the_step_continues_with_its_prompts():
    runner = FakeRunner()
    driver = Driver(runner)
    for name in "ab":
        driver.core.add_request(request(name))
        driver.core.step()
    runner.broken = {"drop"}
    driver.core.abort("a")
    driver.core.add_request(request("c"))
    driver.core.step()
    assert driver.finish == {"b": FinishReason.ERROR} and len(driver.tokens["c"]) == 1
    assert [call[0] for call in runner.calls[-2:]] == ["drop", "prefill"], "there is nothing to decode"


class BrokenRunner(TimedRunner):
    """Every decode step with at least `from_drafts` drafts fails."""

    def __init__(self, from_drafts: int, clock: Clock, **more: Any):
        super().__init__(clock, **more)
        self._from_drafts = from_drafts

    def decode(self, drafts=PLAIN):
        if drafts.num_tokens >= self._from_drafts:
            raise RuntimeError("no such kernel")
        return super().decode(drafts)


@pytest.mark.parametrize("num_prompt", [10, 5000])
def test_decode_steps_that_always_fail_are_counted_although_prompts_still_succeed(num_prompt):
    driver = Driver(BrokenRunner(0, Clock()), config("off"))
    for i in range(4):
        driver.run({0: [request(f"r{i}", num_prompt=num_prompt)]})
        assert driver.finish[f"r{i}"] is FinishReason.ERROR
    assert driver.core.failed_steps_in_a_row == 4
    driver.run({0: [request("one token", max_tokens=1)]})
    assert driver.finish["one token"] is FinishReason.LENGTH


def test_steps_with_drafts_that_always_fail_cost_one_batch_and_not_every_one():
    clock = Clock()
    driver = Driver(BrokenRunner(1, clock, max_draft_tokens=3), config("auto"), clock)
    for i in range(6):
        driver.run({0: [request(f"r{i}", 60)]})
    failed = [name for name, reason in driver.finish.items() if reason is FinishReason.ERROR]
    assert len(failed) == 1
    assert driver.core.failed_steps_in_a_row == 0
