"""Which prompts share a forward, and that a forward which fails costs no request but the guilty one."""

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.core.burst import MAX_BURST_ROWS, MAX_START_TOKENS, Span, num_together
from engine.core.cost_model import CostModel
from engine.core.memory.budget import MemoryBudget
from engine.core.memory.costs import MemoryCosts
from engine.core.memory.needs import MemoryNeeds
from engine.core.row import Row
from engine.protocol import Boundary, EngineRequest, FinishReason, SamplingParams, SparsePlan
from tests.engine.core.rows import EvictableBytes
from tests.support.driver import Driver, fix_prefill_costs
from tests.support.fake_runner import STOP, FakeRunner, answer

EVERY = {"max_tokens": 10_000, "max_s": 10.0}


def costs_of(fixed_s: float, token_s: float, pair_s: float = 0.0) -> CostModel:
    costs = CostModel()
    for num_tokens, start in ((1, 0), (10, 0), (100, 0), (1000, 0), (100, 5000), (1000, 20_000)) * 2:
        seconds = fixed_s + token_s * num_tokens + pair_s * num_tokens * (start + num_tokens / 2)
        costs.record_chunk(num_tokens, start, seconds)
    return costs


FIXED = costs_of(0.02, 5e-4)
"""A forward of the demo model on two cores."""
LINEAR = costs_of(0.0, 1e-3)
"""The device is busy with every single token."""


def test_prompts_of_one_length_share_a_forward_where_forwards_have_a_fixed_price():
    assert num_together([Span(30, 0, 5)] * 16, FIXED, **EVERY) == 16
    assert num_together([Span(30, 0)] * 2, FIXED, **EVERY) == 2


def test_prompts_are_computed_one_by_one_where_cost_is_proportional_to_tokens():
    assert num_together([Span(30, 0)] * 16, LINEAR, **EVERY) == 1


def test_a_longer_prompt_is_excluded_where_padding_the_others_costs_more_than_it_saves():
    assert num_together([*[Span(30, 0)] * 6, Span(400, 0)], FIXED, **EVERY) == 6


def test_a_prompt_that_is_nearly_complete_does_not_wait_for_another():
    assert num_together([Span(5, 25), Span(60, 0, 5)], FIXED, **EVERY) == 1


def test_prompts_share_no_forward_before_costs_are_measured():
    assert num_together([Span(30, 0)] * 16, CostModel(), **EVERY) == 1


@pytest.mark.parametrize(
    ("spans", "limits", "expected"),
    [
        ([Span(30, 0)] * 16, {"max_tokens": 100}, 3),
        ([Span(30, 0)] * 16, {"max_s": 0.1}, 5),
        ([Span(30, 0)] * 3, {"max_tokens": 0}, 1),
        ([Span(8, 0)] * (2 * MAX_BURST_ROWS), {}, MAX_BURST_ROWS),
        ([Span(30, 0), Span(30, 0), Span(30, MAX_START_TOKENS + 1)], {}, 2),
    ],
    ids=["tokens of the step", "time of the step", "end of the step", "rows", "copied keys and values"],
)
def test_a_burst_keeps_to_its_limits(spans: list[Span], limits: dict[str, Any], expected: int):
    assert num_together(spans, FIXED, **(EVERY | limits)) == expected


def test_the_cost_model_learns_the_price_of_a_row_from_bursts_alone():
    costs = CostModel()
    for num_rows in (1, 2, 4, 8, 16) * 3:
        costs.record_chunk(30, 0, 0.02 + num_rows * 0.015, num_rows)
    assert costs.chunk_s(30, 0, 12) == pytest.approx(0.2, rel=0.05)
    assert costs.chunk_s(30, 0) == pytest.approx(0.035, rel=0.05)


def burst_runner(**more: Any) -> FakeRunner:
    runner = FakeRunner(**more)
    runner.no_bursts = None
    return runner


def request(name: str, num_prompt: int = 30, max_tokens: int = 5, seed: int = 0, **more: Any) -> EngineRequest:
    ids = np.random.default_rng(seed).integers(3, 900, num_prompt).astype(np.int32)
    return EngineRequest(name, ids, SamplingParams(max_tokens, seed=seed), (STOP,), **more)


def driver_of(runner: FakeRunner, **config: Any) -> Driver:
    driver = Driver(runner, EngineConfig.model_validate({"mtp": "off", **config}))
    fix_prefill_costs(driver.core, 0.02, 5e-4)
    return driver


def bursts(runner: FakeRunner) -> list[list[str]]:
    return [[row_id.partition("/")[0] for row_id, _ in call[1:]] for call in runner.calls if call[0] == "prefill_burst"]


def test_prompts_that_come_together_are_computed_together_up_to_their_boundaries():
    runner = burst_runner()
    driver = driver_of(runner)
    requests = [request(f"r{i}", 30 + i, seed=i, boundaries=(Boundary("turn", 25 + i),)) for i in range(4)]
    tokens = driver.run({0: requests})
    assert tokens == {each.request_id: answer(each) for each in requests}
    names = [each.request_id for each in requests]
    assert bursts(runner) == [names, names] and not [call for call in runner.calls if call[0] == "prefill"]
    taken = [call[1:] for call in runner.calls if call[0] == "snapshot"]
    assert taken == [(f"r{i}/0", 25 + i) for i in range(4)]
    assert driver.core.stats.num_bursts == 2 and driver.core.stats.num_failed_bursts == 0


def test_a_runner_that_takes_no_bursts_is_never_asked_for_one():
    runner = FakeRunner()
    driver_of(runner).run({0: [request(f"r{i}", seed=i) for i in range(4)]})
    assert not bursts(runner)


def test_requests_that_cannot_share_a_forward_are_computed_alone():
    runner = burst_runner()
    plan = SparsePlan(np.arange(0, 30, 2, dtype=np.int32), 0, "none")
    alone = [request("choices", num_choices=2, seed=1), request("sparse", sparse=plan, seed=2)]
    requests = [request("one", seed=3), *alone, request("two", seed=4)]
    driver = driver_of(runner, prefix_cache={"enabled": False})
    driver.run({0: requests})
    assert bursts(runner) == [["one", "two"]]
    assert set(driver.finish.values()) == {FinishReason.LENGTH}


def test_prompts_with_a_prefix_in_common_wait_until_it_is_computed_once():
    runner = burst_runner()
    system = request("system", 200).token_ids
    requests = [
        EngineRequest(
            f"r{i}",
            np.concatenate([system, request("x", 20, seed=i + 1).token_ids]),
            SamplingParams(3, seed=i),
            (STOP,),
            boundaries=(Boundary("system", 200),),
        )
        for i in range(3)
    ]
    driver = driver_of(runner)
    driver.run({0: requests})
    assert driver.core.stats.num_cached_tokens == 2 * 200
    assert [call for call in runner.calls if call[0] == "prefill" and call[2] == 200] == [("prefill", "r0/0", 200)]
    assert any({"r1", "r2"} <= set(names) for names in bursts(runner))


def test_a_burst_that_fails_is_computed_one_by_one():
    runner = burst_runner()
    runner.broken = {"prefill_burst"}
    driver = driver_of(runner)
    requests = [request(f"r{i}", seed=i) for i in range(4)]
    tokens = driver.run({0: requests})
    assert tokens == {each.request_id: answer(each) for each in requests}
    assert len(bursts(runner)) == 1 and driver.core.stats.num_failed_bursts == 1
    assert driver.core.failed_steps_in_a_row == driver.core.stats.num_failed == 0
    assert not runner.rows and not runner.prompts and driver.core.budget.reserved_bytes == 0


def test_a_prompt_that_fails_in_a_burst_fails_alone():
    class Poisoned(FakeRunner):
        def prefill(self, rows: Any, max_tokens: int) -> Any:
            if rows[0].spec.request_id == "r2":
                raise RuntimeError("secret detail of the library")
            return super().prefill(rows, max_tokens)

        def prefill_burst(self, chunks: Any) -> Any:
            outputs = super().prefill_burst(chunks[:1])  # has joined when the next one fails
            if any(chunk.row.spec.request_id == "r2" for chunk in chunks):
                raise RuntimeError("secret detail of the library")
            return [*outputs, *super().prefill_burst(chunks[1:])]

    runner = Poisoned()
    runner.no_bursts = None
    driver = driver_of(runner, prefix_cache={"enabled": False})
    requests = [request(f"r{i}", seed=i) for i in range(4)]
    driver.run({0: requests})
    assert driver.finish["r2"] is FinishReason.ERROR and driver.errors["r2"] == "prefill failed: RuntimeError"
    whole = {each.request_id: answer(each) for each in requests if each.request_id != "r2"}
    assert {name: tokens for name, tokens in driver.tokens.items() if tokens} == whole
    assert driver.core.stats.num_failed_bursts == driver.core.stats.num_failed == 1
    assert not runner.rows and not runner.prompts


def test_prompt_tokens_are_not_charged_twice_after_a_burst_that_fails():
    runner = burst_runner()
    driver = driver_of(runner)
    driver.core.add_request(request("r0", 60, boundaries=(Boundary("turn", 30),)))
    driver.core.step()
    runner.broken = {"prefill_burst"}
    driver.run({0: [request("r1", 60, seed=1), request("r2", 60, seed=2)]})
    assert driver.core.stats.num_failed_bursts == 1 and set(driver.finish.values()) == {FinishReason.LENGTH}


COSTS = MemoryCosts(
    base_bytes=1000, token_bytes=10, state_bytes=100, slots_step=16, chunk_bytes=5000, token_step_bytes=2.0
)


def test_a_burst_reserves_the_states_of_all_of_its_rows_and_what_a_forward_needs_once():
    budget = MemoryBudget(MemoryNeeds(COSTS, 100_000, 64), EvictableBytes())
    rows = [Row(request(f"r{i}", seed=i)) for i in range(4)]
    for row in rows:
        assert budget.reserve([row]) == 0
    before = budget.reserved_bytes
    assert budget.reserve_burst(rows, 30, 30) == 0
    expected = 5000 + 3 * 100 + 4 * 30 * 2 + 2 * COSTS.layer(4, 32)
    assert COSTS.burst(4, 30, 30) == expected and budget.reserved_bytes > before
    small = replace(COSTS, chunk_bytes=40)  # each row has at most what a chunk alone has
    assert small.burst(4, 30, 30) == 4 * small.chunk(30, 30) + 2 * small.layer(4, 32)
    assert budget.accounts.transient_bytes >= expected
    budget.release_chunk()
    assert budget.reserved_bytes == before


def test_a_burst_without_memory_says_how_much_is_missing_and_reserves_nothing():
    rows = [Row(request(f"r{i}", seed=i)) for i in range(4)]
    held = EvictableBytes()
    budget = MemoryBudget(MemoryNeeds(COSTS, 100_000, 64), held)
    for row in rows:
        budget.reserve([row])
    before, held.snapshot_bytes = budget.reserved_bytes, budget.free_bytes - 10
    missing = budget.reserve_burst(rows, 30, 30)
    assert 0 < missing < COSTS.burst(4, 30, 30) and budget.reserved_bytes == before
    held.snapshot_bytes -= missing - 1
    assert budget.reserve_burst(rows, 30, 30) == 1
    held.image_bytes -= 1
    assert budget.reserve_burst(rows, 30, 30) == 0 and budget.reserved_bytes > before
    assert budget.reserve_burst(rows, 3000, 3000) == sys.maxsize, "no eviction helps"
