"""Rows and prompts in progress that lose their places go on from where they stood, and get the same tokens."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import engine.worker  # noqa: F401  # before MLX
from engine.config import EngineConfig
from engine.core.prefix_cache.snapshot_boundaries import LEAST_TOKENS
from engine.core.runner import ModelRunner
from engine.protocol import EngineRequest
from engine.worker.model_runner import MLXRunner
from tests.support.cold_runner import load_cold
from tests.support.conversations import plain_request, plain_tokens
from tests.support.driver import Driver
from tests.support.fake_runner import FakeRunner, answer
from tests.support.night import some_at_night

NUM_PROMPT, NUM_ANSWER = 60, 90
MIN_TOKENS = LEAST_TOKENS


@pytest.fixture(scope="module")
def runner(tiny_model: Callable[..., Path]) -> MLXRunner:
    """Never closed: that would take the main thread's streams from the tests that follow."""
    return load_cold(EngineConfig(model=str(tiny_model(layers=4, interval=2, agree=0.3, seed=1))))


def make_driver(runner: ModelRunner, mtp: object = "off", **settings: object) -> Driver:
    return Driver(runner, EngineConfig.model_validate({"mtp": mtp, **settings}))


def make_requests() -> list[EngineRequest]:
    return [
        plain_request(name, plain_tokens(name, NUM_PROMPT), max_tokens=NUM_ANSWER) for name in ("row", "other", "third")
    ]


def preempt_after(driver: Driver, num_steps: int) -> int:
    """Preempt the first of the decoding rows after so many steps; return the prompt tokens computed from then on."""
    scheduler, stats = driver.core.scheduler, driver.core.stats
    while scheduler.num_decoding < 3:
        driver.core.step()
    for _ in range(num_steps):
        driver.core.step()
    before = stats.num_prompt_tokens
    if "row/0" in scheduler._running:  # else it has ended
        scheduler.preempt(scheduler._running["row/0"], "growth")
    driver.run({0: []})
    assert driver.core.prefixes.store.integrity_error() is None
    return stats.num_prompt_tokens - before


@pytest.mark.parametrize("mtp", ["off", {"max_draft_tokens": 3}])
@pytest.mark.parametrize("num_steps", some_at_night([0, 4, 20], {4}, "the same after other steps"))
def test_a_preempted_row_recomputes_one_token_if_its_state_is_worth_a_snapshot(runner, mtp, num_steps):
    requests = make_requests()
    cold = make_driver(runner, mtp, prefix_cache={"enabled": False}).run({0: requests})
    driver = make_driver(runner, mtp)
    for request in requests:
        driver.core.add_request(request)
    num_computed = preempt_after(driver, num_steps)
    assert num_computed == 1 if num_steps == 20 else num_computed <= MIN_TOKENS + 1
    assert driver.tokens == cold


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_row_that_ends_with_the_step_under_way_is_not_computed_again(num_drafts):
    mtp = {"max_draft_tokens": num_drafts, "max_rows": 8} if num_drafts else "off"
    num_computed, end = {}, NUM_ANSWER // (num_drafts + 1) + 2
    for num_steps in (step for step in range(end) if step % 4 == 0 or step >= end - 8):
        requests = make_requests()
        driver = make_driver(FakeRunner(num_drafts), mtp)
        for request in requests:
            driver.core.add_request(request)
        num_computed[num_steps] = preempt_after(driver, num_steps)
        assert driver.tokens == {request.request_id: answer(request) for request in requests}
    assert max(num_computed.values()) <= MIN_TOKENS + 1 and num_computed[end - 1] == 0
    assert {num for step, num in num_computed.items() if 20 // (num_drafts + 1) <= step < end - 4} == {1}


@pytest.mark.parametrize("broken", ["pending", "snapshot_row"])
def test_a_preempted_row_whose_state_cannot_be_saved_is_recomputed(broken):
    requests, runner = make_requests(), FakeRunner()
    driver = make_driver(runner)
    for request in requests:
        driver.core.add_request(request)
    while driver.core.scheduler.num_decoding < 3:
        driver.core.step()
    driver.core.scheduler.preempt(driver.core.scheduler._running["row/0"], "growth")
    runner.broken = {broken}
    driver.core.step()
    runner.broken = set()
    driver.run({0: []})
    assert driver.tokens["row"] == answer(requests[0])
    failed = {name for name, error in driver.errors.items() if error}
    assert failed == ({"other", "third"} if broken == "pending" else set()), "those of the failed step"
    assert driver.core.prefixes.store.integrity_error() is None


def test_a_preempted_prompt_continues_behind_its_last_chunk(runner):
    request = plain_request("prompt", plain_tokens("prompt", 200), max_tokens=5)
    cold = make_driver(runner, prefix_cache={"enabled": False}).run({0: [request]})
    driver = make_driver(runner, prefill_chunk_tokens=64)
    driver.core.add_request(request)
    driver.core.step()
    scheduler = driver.core.scheduler
    (prefill,) = scheduler.prefills.in_progress
    assert 0 < prefill.start < prefill.end
    scheduler.preempt(prefill, "growth")
    assert driver.run({0: []}) == cold
    assert driver.core.stats.num_prompt_tokens == 200 and driver.core.stats.num_preempted == 1
    assert driver.core.prefixes.store.integrity_error() is None


@pytest.mark.parametrize("mtp", ["off", {"max_draft_tokens": 3}])
def test_a_prompt_preempted_by_urgent_requests_recomputes_no_token(runner, mtp):
    low = replace(plain_request("low", plain_tokens("low", 400), max_tokens=9), priority=5)
    urgent = [plain_request(f"urgent {i}", plain_tokens(f"urgent {i}", 30), max_tokens=5) for i in range(3)]
    cold = make_driver(runner, mtp, prefix_cache={"enabled": False}).run({0: [low, *urgent]})
    settings = {"prefill_chunk_tokens": 64, "max_running": 1, "scheduler": {"policy": "priority"}}
    driver = make_driver(runner, mtp, **settings)
    arrivals = {step: [request] for step, request in zip((1, 20, 40), urgent, strict=True)}
    assert driver.run({0: [low], **arrivals}) == cold
    stats = driver.core.stats
    assert stats.num_preempted >= 1 and stats.num_prompt_tokens == 400 + 3 * 30
    assert driver.core.prefixes.store.integrity_error() is None
