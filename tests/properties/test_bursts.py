"""Short prompts that come together, through a whole engine core: bursts change when tokens come and never which."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine.worker  # noqa: F401  # before MLX
from engine.config import EngineConfig
from engine.core.memory.budget import HEADROOM_SHARE
from engine.protocol import Boundary, EngineRequest, FinishReason, SamplingParams
from engine.worker.model_runner import MLXRunner, load_runner
from tests.properties.test_memory_budget import Books, requests
from tests.support.driver import Driver, fix_prefill_costs
from tests.support.faults import Failing, Faults, Faulty
from tests.support.night import some_at_night
from tests.support.own_process import run_in_own_process

TINY: dict[str, Any] = {"layers": 4, "interval": 2, "agree": 0.3, "seed": 1}


@pytest.fixture(scope="module")
def tiny(tiny_model: Callable[..., Path]) -> MLXRunner:
    """Never closed: that would take the main thread's streams from the tests that follow."""
    return load_runner(EngineConfig(model=str(tiny_model(**TINY))), lambda progress: None)


def with_bursts(driver: Driver) -> Driver:
    """Lets prompts share forwards as often as they may."""
    fix_prefill_costs(driver.core, 0.005, 1e-5)
    return driver


def request(name: str, num_prompt: int, max_tokens: int = 12, **sampling: Any) -> EngineRequest:
    ids = np.random.default_rng(sum(name.encode())).integers(20, 500, num_prompt).astype(np.int32)
    params = SamplingParams(max_tokens, **{"temperature": 0.0, "seed": num_prompt} | sampling)
    boundaries = (Boundary("turn", num_prompt - 3),) if num_prompt > 20 else ()
    return EngineRequest(name, ids, params, (), boundaries=boundaries)


def many() -> list[EngineRequest]:
    cold = [request(f"cold {i}", 7 + 9 * i) for i in range(5)]
    hot = [request(f"hot {i}", 12 + 11 * i, temperature=1.0, top_p=0.9, presence_penalty=0.5) for i in range(4)]
    return [*cold, *hot]


def alone(runner: MLXRunner, requests: list[EngineRequest]) -> dict[str, list[int]]:
    off = EngineConfig.model_validate({"mtp": "off", "prefix_cache": {"enabled": False}})
    return {each.request_id: Driver(runner, off).run({0: [each]})[each.request_id] for each in requests}


@pytest.mark.parametrize("mtp", ["off", {"max_draft_tokens": 2}])
@pytest.mark.parametrize("cache", [True, False])
def test_requests_in_bursts_get_the_tokens_that_each_gets_alone(tiny, mtp, cache):
    asked = many()
    expected = alone(tiny, asked)
    config = EngineConfig.model_validate({"mtp": mtp, "prefix_cache": {"enabled": cache}})
    driver = with_bursts(Driver(tiny, config))
    arrivals = {0: [request("first", 9, 40)], 4: asked[:6], 6: asked[6:]}
    tokens = driver.run(arrivals)
    assert {name: tokens[name] for name in expected} == expected
    assert driver.core.stats.num_bursts >= 2 and driver.core.stats.num_failed_bursts == 0
    assert driver.core.budget.reserved_bytes == 0


def test_conversations_continued_in_a_burst_start_from_their_snapshots(tiny):
    first = [request(f"talk {i}", 40 + 3 * i) for i in range(4)]
    driver = with_bursts(Driver(tiny))
    said = driver.run({0: first})
    turns = []
    for each in first:
        more = request(f"more {each.request_id}", 8).token_ids
        ids = np.concatenate([each.token_ids, np.array(said[each.request_id], np.int32), more]).astype(np.int32)
        turns.append(EngineRequest(f"next {each.request_id}", ids, each.sampling, ()))
    expected, before = alone(tiny, turns), driver.core.stats.num_bursts
    tokens = driver.run({0: [*turns, request("new", 15)]})
    assert {name: tokens[name] for name in expected} == expected
    assert driver.core.stats.num_cached_tokens >= 4 * 37 and driver.core.stats.num_bursts > before


def test_requests_aborted_between_bursts_leave_no_memory_behind(tiny):
    asked = many()
    expected = alone(tiny, asked)
    driver = with_bursts(Driver(tiny, EngineConfig.model_validate({"prefill_chunk_tokens": 64})))
    tokens = driver.run({0: asked}, aborts={1: ["cold 1", "hot 0"], 2: ["cold 4"]})
    for name, whole in expected.items():
        is_whole = name not in ("cold 1", "hot 0", "cold 4")
        got = tokens.get(name, [])
        assert got == whole if is_whole else got == whole[: len(got)]
    assert driver.core.stats.num_bursts and driver.core.budget.reserved_bytes == 0
    assert tiny.memory()["prefill_cache_bytes"] == tiny.memory()["decode_cache_bytes"] == 0


@pytest.mark.parametrize(
    ("seam", "call", "phase"),
    some_at_night(
        product(("prefill_burst", "join"), (1, 2), ("before", "after")),
        [("prefill_burst", 1, "before"), ("prefill_burst", 2, "after"), ("join", 1, "after"), ("join", 2, "before")],
        "the gate has both phases of both seams, each in one of two calls",
        are_sets=True,
    ),
)
def test_a_burst_that_fails_costs_no_request(tiny, seam, call, phase):
    """Whether it fails before the forward, at the join, or when all rows have joined already."""
    asked = many()
    expected = alone(tiny, asked)
    faults = Faults()
    batch, runner = tiny._batch, Faulty(tiny, faults, {"prefill_burst": "prefill_burst"})
    burst_only = faults.arm(seam, Failing(), call=call, phase=phase)
    tiny._batch = Faulty(batch, faults, {"join": "join"}) if seam == "join" else batch  # type: ignore[assignment]
    try:
        driver = with_bursts(Driver(runner))  # type: ignore[arg-type]
        tokens = driver.run({0: asked})
    finally:
        tiny._batch = batch
    assert burst_only.num_fired == 1
    failed = [name for name, reason in driver.finish.items() if reason is FinishReason.ERROR]
    assert driver.core.stats.num_failed_bursts == 1 - len(failed) and len(failed) <= (seam == "join")
    assert {name: tokens[name] for name in expected if name not in failed} == {
        name: whole for name, whole in expected.items() if name not in failed
    }
    assert driver.core.failed_steps_in_a_row == 0 and driver.core.budget.reserved_bytes == 0
    assert tiny.memory()["prefill_cache_bytes"] == tiny.memory()["decode_cache_bytes"] == 0
    driver.core.prefixes.check_integrity()


def test_a_prompt_that_fails_in_a_burst_fails_alone(tiny, monkeypatch):
    asked = many()
    expected = alone(tiny, asked)
    make_room = tiny._prefill.begin

    def begin(row: Any) -> Any:
        if row.spec.request_id == "cold 2":
            raise RuntimeError("something inside a library")
        return make_room(row)

    monkeypatch.setattr(tiny._prefill, "begin", begin)
    driver = with_bursts(Driver(tiny))
    tokens = driver.run({0: asked})
    assert driver.errors["cold 2"] == "prefill failed: RuntimeError" and not tokens.get("cold 2")
    assert {name: tokens[name] for name in expected if name != "cold 2"} == {
        name: whole for name, whole in expected.items() if name != "cold 2"
    }
    assert driver.core.stats.num_failed == driver.core.stats.num_failed_bursts == 1


@pytest.mark.parametrize("cache", [True, False])
def test_memory_of_bursts_never_exceeds_the_budget(tiny, cache):
    books = Books(tiny, prefix_cache={"enabled": True, "max_gb": 0.05} if cache else {"enabled": False})
    with_bursts(books.driver)
    books.run(requests(16, (20, 33, 60), 30))
    assert books.core.stats.num_bursts
    assert books.least_margin >= 1 - HEADROOM_SHARE and books.budget.reserved_bytes == 0
    books.core.prefixes.store.reset()


def check_bursts_of_the_demo_model() -> None:
    books = Books(load_runner(EngineConfig(), lambda progress: None))
    with_bursts(books.driver)
    books.run(requests(16, (20, 33, 60), 30))
    assert books.core.stats.num_bursts
    books.check()


@pytest.mark.night("a tiny model, whose accounts are tighter: test_memory_of_bursts_never_exceeds_the_budget")
def test_memory_of_bursts_of_the_demo_model_matches_the_budget():
    run_in_own_process(check_bursts_of_the_demo_model)


def test_a_tight_memory_limit_changes_no_token_of_a_burst(tiny):
    asked = many()
    expected = alone(tiny, asked)
    driver = with_bursts(Driver(tiny))
    budget = driver.core.budget
    budget.needs.limit_bytes = budget.costs.base_bytes + 4 * budget.costs.chunk(64, 64)
    assert driver.run({0: asked}) == expected
