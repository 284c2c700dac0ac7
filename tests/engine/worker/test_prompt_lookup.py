"""Prompt lookup: which tokens are drafted, that no token changes, and that repetitions are accepted."""

from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import engine.worker  # noqa: F401  # before MLX
from engine.config import EngineConfig
from engine.protocol import EngineRequest, SamplingParams
from engine.worker.model_runner import MLXRunner
from engine.worker.prompt_lookup import MAX_CANDIDATES, MAX_MATCH, MIN_MATCH, TokenHistory
from tests.support.cold_runner import load_cold
from tests.support.driver import Driver
from tests.support.night import some_at_night

LOOKUP = {"mtp": "off", "prompt_lookup": {"max_draft_tokens": 4, "max_rows": 64}}
OFF = {"mtp": "off", "prompt_lookup": "off"}
MODELS: dict[str, dict[str, Any]] = {
    "hybrid": {"layers": 4, "interval": 2, "mtp": False},
    "with a head": {"layers": 2, "interval": 2, "agree": 0.3},
}


SAMPLINGS: list[dict[str, Any]] = [{}, {"temperature": 0.9}, {"repetition_penalty": 1.2, "logprobs": 1}]


def history(*token_ids: int) -> TokenHistory:
    return TokenHistory(np.array(token_ids, np.int32))


def test_tokens_after_the_last_of_the_longest_matches_are_drafted():
    assert history(1, 2, 3, 4, 5, 9, 2, 3, 4, 6, 8, 2, 3, 4).drafts(2) == [6, 8]
    assert history(7, 2, 3, 4, 5, 9, 2, 3, 4, 6, 7, 2, 3, 4).drafts(2) == [5, 9], "7 2 3 4 is longer"


def test_fewer_equal_tokens_than_a_match_needs_draft_nothing():
    assert MIN_MATCH == 3
    assert not history(1, 2, 3, 9, 8, 2, 3).has_drafts
    assert history(1, 2, 3, 9, 8, 1, 2, 3).has_drafts
    assert not history().has_drafts and not history(1).has_drafts and not history(1, 1, 1).has_drafts


def test_repeated_text_is_continued_beyond_its_end():
    assert history(9, 1, 2, 3, 1, 2, 3).drafts(8) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_number_of_compared_occurrences_is_limited():
    tokens = history(*[7, 8, 9], *[1] * 5000, *[7, 8, 9])
    assert tokens.drafts(1) == [1]
    tokens = history(*[7, 8, 9, 5], *[9] * MAX_CANDIDATES, 7, 8, 9)
    assert not tokens.has_drafts, "the match is before the last occurrences of its last token"


def test_appended_tokens_are_searched_and_found():
    tokens = history(5, 6, 7, 8)
    assert not tokens.has_drafts
    tokens.append((5, 6))
    assert not tokens.has_drafts
    tokens.append((7,))
    assert tokens.has_drafts and tokens.drafts(1) == [8]
    for token in range(100, 1100):
        tokens.append((token,))
    tokens.append((100, 101, 102))
    assert tokens.drafts(3) == [103, 104, 105]


def reference(tokens: list[int]) -> int | None:
    """Return the index after the last of the longest matches by trying every place."""
    best, place = MIN_MATCH - 1, None
    for end in range(len(tokens) - 1):
        length = 0
        while length < min(MAX_MATCH, end + 1) and tokens[end - length] == tokens[-1 - length]:
            length += 1
        if length > best or (length == best and place is not None):
            best, place = length, end + 1
    return place


@given(st.lists(st.integers(0, 2), max_size=60))
def test_search_finds_what_a_comparison_at_every_place_finds(tokens):
    found, expected = history(*tokens), reference(tokens)
    assert found.has_drafts == (expected is not None)
    if expected is not None:
        assert found.drafts(1) == [tokens[expected]]


@pytest.fixture(scope="module")
def runner_of(tiny_model: Callable[..., Path]) -> Callable[[str], MLXRunner]:
    """Runners are never closed: that would take the main thread's streams from the tests that follow."""

    @cache
    def of(name: str) -> MLXRunner:
        return load_cold(EngineConfig(model=str(tiny_model(**MODELS[name]))))

    return of


def requests(**sampling: Any) -> list[EngineRequest]:
    """Return prompts of different lengths whose answers consist of five tokens, and so repeat themselves."""
    prompts = [np.random.default_rng(n).integers(20, 25, n).astype(np.int32) for n in (20, 60, 100)]
    params: dict[str, Any] = {
        "temperature": 0.0,
        "logit_bias": tuple((token, 30.0) for token in range(20, 25)),
    } | sampling
    return [
        EngineRequest(f"r{i}", prompt, SamplingParams(30 + 7 * i, seed=i, **params), ())
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize(
    ("model", "sampling"),
    some_at_night(
        product(MODELS, SAMPLINGS),
        [("hybrid", SAMPLINGS[0]), ("hybrid", SAMPLINGS[1]), ("with a head", SAMPLINGS[2])],
        "the gate has both models and each sampling",
        are_sets=True,
    ),
)
def test_answers_with_prompt_lookup_are_those_without(runner_of, model, sampling):
    runner = runner_of(model)
    expected = {}
    for request in requests(**sampling):
        expected |= Driver(runner, EngineConfig.model_validate(OFF)).run({0: [request]})
    batch = requests(**sampling)
    driver = Driver(runner, EngineConfig.model_validate(LOOKUP))
    assert driver.run({0: batch[:1], 9: batch[1:]}) == expected
    status = driver.core.figures.speculation["prompt_lookup"]
    assert status["num_drafted"] > status["num_accepted"] > 0
    assert driver.core.figures.speculation["mtp"]["num_drafted"] == 0


def test_a_head_and_prompt_lookup_in_turn_change_no_token(runner_of):
    runner, batch = runner_of("with a head"), requests()
    expected = {}
    for request in batch:
        expected |= Driver(runner, EngineConfig.model_validate(OFF)).run({0: [request]})
    both = {"mtp": {"max_draft_tokens": 2, "max_rows": 2}, "prompt_lookup": {"max_draft_tokens": 8, "max_rows": 64}}
    driver = Driver(runner, EngineConfig.model_validate(both))
    assert driver.run({0: batch[:1], 5: batch[1:]}) == expected
    assert all(driver.core.figures.speculation[name]["num_accepted"] for name in ("mtp", "prompt_lookup"))


def test_rows_decode_alone_where_nothing_repeats(runner_of):
    """Penalties keep the answer from repeating itself."""
    ids = np.arange(20, 400, dtype=np.int32)
    request = EngineRequest("r", ids, SamplingParams(40, temperature=1.0, seed=3, presence_penalty=2.0), ())
    driver = Driver(runner_of("hybrid"), EngineConfig.model_validate(LOOKUP))
    driver.run({0: [request]})
    assert driver.core.figures.speculation["prompt_lookup"]["num_rounds"] <= 4
