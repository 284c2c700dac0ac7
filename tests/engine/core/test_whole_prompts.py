"""Models whose prompt tokens see each other: each prompt is one chunk, and nothing of it is cached."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.core.memory.costs import MemoryCosts
from engine.core.memory.needs import MemoryNeeds
from engine.core.request_check import check_request
from engine.core.row import Row
from engine.core.runner import PrefillOutput
from engine.errors import InvalidRequest, MemoryExceeded
from engine.protocol import Boundary, EngineRequest, Progress, SamplingParams
from tests.support.driver import Driver
from tests.support.fake_runner import FakeRunner

WHY = "the tokens of its prompts see each other"
COSTS = MemoryCosts(base_bytes=1000, token_bytes=10, token_step_bytes=100)
LIMITS: dict[str, Any] = {"prefill_chunk_tokens": 64, "prefill_chunk_tokens_busy": 32}


class WholeRunner(FakeRunner):
    """Records the sizes of the chunks of each request."""

    def __init__(self):
        super().__init__()
        self.whole_prompts: str | None = WHY
        self.sizes: dict[str, list[int]] = {}

    def prefill(self, rows: Sequence[Row], max_tokens: int) -> PrefillOutput:
        made = super().prefill(rows, max_tokens)
        self.sizes.setdefault(rows[0].spec.request_id, []).append(made.num_tokens)
        return made


def request(name: str, num_tokens: int = 400, max_tokens: int = 8) -> EngineRequest:
    boundaries = (Boundary("turn", 200),)
    return EngineRequest(name, np.full(num_tokens, 5, np.int32), SamplingParams(max_tokens), (), boundaries=boundaries)


def test_each_prompt_is_one_chunk_beside_rows_and_other_prompts():
    runner = WholeRunner()
    driver = Driver(runner, EngineConfig.model_validate(LIMITS))
    driver.run({0: [request("row", 20, 64)], 2: [request("one"), request("like one"), request("short", 7)]})
    assert runner.sizes == {"row": [20], "one": [400], "like one": [400], "short": [7]}
    assert not any(driver.errors.values()) and len(driver.tokens["one"]) == 8


def test_no_prefix_is_cached_or_waited_for():
    runner = WholeRunner()
    driver = Driver(runner, EngineConfig.model_validate({**LIMITS, "prefix_cache": {"min_tokens": 1}}))
    for name in ("one", "like one"):
        driver.run({0: [request(name)]})
    assert driver.chunks["like one"][0].num_cached == 0 and runner.sizes["like one"] == [400]
    assert driver.core.prefixes.status().off_reason == WHY
    other = Driver(FakeRunner(), EngineConfig.model_validate({**LIMITS, "prefix_cache": {"min_tokens": 1}}))
    for name in ("one", "like one"):
        other.run({0: [request(name)]})
    assert other.chunks["like one"][0].num_cached > 0, "other models cache it"


def test_an_answer_of_another_engine_is_computed_behind_the_whole_prompt():
    runner = WholeRunner()
    whole = Driver(FakeRunner()).run({0: [request("one")]})["one"]
    continued = replace(request("one"), progress=(Progress(tuple(whole[:3])),))
    driver = Driver(runner, EngineConfig.model_validate(LIMITS))
    assert driver.run({0: [continued]})["one"] == whole[3:]
    assert runner.sizes == {"one": [400, 3]}


def test_a_row_that_was_preempted_needs_no_larger_chunk_than_its_prompt():
    """A chunk of 290 tokens, with which the answer would begin again, would not fit."""
    needs = MemoryNeeds(COSTS, 30_000, 16, whole_prompts=True)
    row = Row(needs.clamp_max_tokens(request("one", 200, 100), 0), 0)
    assert row.sampling.max_tokens == 100
    row.output_token_ids += [5] * 90
    need = needs.need([row])
    assert (need.num_prompt, need.least_chunk) == (290, 200)
    assert COSTS.chunk(290, 290) + COSTS.prompt(290) > needs.request_bytes
    assert needs.min_bytes(need) <= needs.request_bytes


def test_a_prompt_that_fits_in_no_chunk_is_refused_with_its_size_and_the_limit():
    needs = MemoryNeeds(COSTS, 30_000, 16, whole_prompts=True)
    chunked = MemoryNeeds(COSTS, 30_000, 16)
    assert chunked.clamp_max_tokens(request("one"), 0).sampling.max_tokens == 8
    with pytest.raises(MemoryExceeded) as refused:
        needs.clamp_max_tokens(request("one"), 0)
    assert refused.value.args[0] == 400 and refused.value.args[2] == needs.max_row_tokens() < 400
    assert needs.clamp_max_tokens(request("one", needs.max_row_tokens() - 8), 0).sampling.max_tokens == 8


def test_logprobs_of_a_prompt_are_refused_by_name():
    asked = replace(request("one"), prompt_logprobs=0)
    check_request(asked, EngineConfig(), FakeRunner())
    with pytest.raises(InvalidRequest, match=f"the prompts of this model have no logprobs: {WHY}"):
        check_request(asked, EngineConfig(), WholeRunner())
