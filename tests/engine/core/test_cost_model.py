"""CostModel against machines whose times are known."""

import random

import pytest

from engine.core.cost_model import BUSY_TOKENS, CostModel
from engine.core.runner import PLAIN, ChunkTime, Drafts, StepTime
from tests.benchmarks.sim_runner import MACHINES


def chunk_s(num_tokens: int, start: int) -> float:
    """A 27B model on a Mac: 77 ms for the weights, 4 ms a token, attention."""
    return 0.077 + 0.004 * num_tokens + 3e-8 * num_tokens * (start + num_tokens / 2)


def learned(noise: float = 0.0, num_chunks: int = 32) -> CostModel:
    rng, costs, start = random.Random(1), CostModel(), 0
    for i in range(num_chunks):
        num_tokens = (64, 256, 1024)[i % 3]
        costs.record_chunk(num_tokens, start, chunk_s(num_tokens, start) * rng.lognormvariate(0, noise))
        start += num_tokens
    return costs


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 0.05), (0.1, 0.15)])
def test_chunks_are_predicted_as_they_were_measured(noise: float, tolerance: float):
    costs = learned(noise)
    for num_tokens, start in ((64, 1000), (256, 5000), (1024, 10_000)):
        assert costs.chunk_s(num_tokens, start) == pytest.approx(chunk_s(num_tokens, start), rel=tolerance)


def test_an_outlying_chunk_time_does_not_move_predictions():
    costs = learned()
    before = costs.chunk_s(256, 10_000)
    costs.record_chunk(256, 14_000, 20 * chunk_s(256, 14_000))
    assert costs.chunk_s(256, 10_000) == pytest.approx(before, rel=0.05)


def test_a_machine_that_has_become_slower_is_learned():
    costs = learned()
    for i in range(32):
        costs.record_chunk(256, 256 * i, 3 * chunk_s(256, 256 * i))
    assert costs.chunk_s(256, 4000) == pytest.approx(3 * chunk_s(256, 4000), rel=0.1)


@pytest.mark.parametrize("start", [0, 5000, 60_000])
def test_max_tokens_is_the_largest_chunk_predicted_to_fit_into_the_time(start: int):
    costs = learned()
    num_tokens = costs.max_tokens(1.0, start)
    assert costs.chunk_s(num_tokens, start) <= 1.0 < costs.chunk_s(num_tokens + 1, start)
    assert costs.max_tokens(0.0, start) == 0


def test_a_prompt_takes_the_sum_of_its_chunks():
    costs = learned()
    chunks = sum(costs.chunk_s(2048, start) for start in range(0, 8 * 2048, 2048))
    assert costs.prompt_s(0, 8 * 2048) == pytest.approx(chunks) and costs.prompt_s(9, 9) == 0


@pytest.mark.parametrize("name", MACHINES)
def test_fresh_engine_predicts_long_prompts_from_the_short_chunks_of_warm_up(name: str):
    machine = MACHINES[name]
    costs = CostModel(chunk_times=[ChunkTime(n, machine.chunk_seconds(0, n)) for n in (64, 256)])
    for num_tokens in (2_000, 20_000, 60_000):
        seconds = machine.prompt_seconds(num_tokens)
        assert seconds / 2 < costs.prompt_s(0, num_tokens) < 2 * seconds


def test_attention_that_a_long_prompt_has_shown_survives_short_prompts():
    costs, rng = learned(), random.Random(2)
    before = costs.prompt_s(0, 60_000)
    for _ in range(64):
        num_tokens = rng.randrange(20, 300)
        costs.record_chunk(num_tokens, 0, chunk_s(num_tokens, 0) * rng.lognormvariate(0, 0.02))
    assert costs.prompt_s(0, 60_000) == pytest.approx(before, rel=0.1)


def test_the_first_chunk_which_compiles_kernels_is_replaced():
    costs = CostModel()
    costs.record_chunk(64, 0, 50.0)
    costs.record_chunk(64, 64, 0.3)
    assert costs.chunk_s(64, 128) == pytest.approx(0.3, rel=0.3), "not 50 s"


def test_the_time_per_token_is_the_step_time_divided_by_the_tokens_of_a_step():
    costs = CostModel([Drafts(k) for k in (1, 2, 3)])
    assert costs.token_s(1) is None and costs.step_s(1, PLAIN) is None
    for _ in range(20):
        costs.record_step(1, PLAIN, 1.0, 0.02)
    for _ in range(20):
        costs.record_step(16, Drafts(3), 2.0, 0.08)
    assert costs.step_s(1, PLAIN) == pytest.approx(0.02, rel=0.2)
    assert costs.step_s(16, Drafts(3)) == pytest.approx(0.08, rel=0.05)
    assert costs.token_s(16) == pytest.approx(0.04, rel=0.05) and costs.token_s(100) == pytest.approx(0.04, rel=0.5)


def test_steps_that_the_pipeline_mixes_or_that_waited_for_a_chunk_are_not_timed():
    costs = CostModel([Drafts(k) for k in (1, 2, 3)], [StepTime(1, PLAIN, 0.01)])
    before = costs.step_s(1, PLAIN)
    for num_rows in (1, 2) * 8:
        costs.record_step(num_rows, PLAIN, 1.0, 0.5)
    for _ in range(8):
        costs.record_step(1, PLAIN, 1.0, None)
        costs.record_step(1, PLAIN, 0.0, 0.5)
    assert costs.step_s(1, PLAIN) == before


@pytest.mark.parametrize(
    ("times", "limit", "expected"),
    [
        (((64, 0.34), (256, 1.3)), None, BUSY_TOKENS),  # a token takes 5 ms: larger chunks bring little
        (((64, 0.0532), (256, 0.0628)), None, 1000),  # 50 ms, and 50 us per token
        (((64, 0.0532), (256, 0.0628)), 300, 300),
        ((), None, BUSY_TOKENS),
    ],
)
def test_a_step_beside_rows_computes_as_many_prompt_tokens_as_cost_little_more_than_one(times, limit, expected):
    costs = CostModel(chunk_times=[ChunkTime(n, seconds) for n, seconds in times])
    assert costs.busy_tokens(limit) == pytest.approx(expected, rel=0.05)
