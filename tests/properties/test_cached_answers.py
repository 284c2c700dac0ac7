"""The state behind answers: the next turn goes on from there, with the tokens that it gets without a cache."""

from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.core.prefix_cache.snapshot_taker import MAX_UNUSED, PROBE_EVERY
from engine.protocol import EngineRequest
from tests.support.conversations import plain_request, plain_tokens
from tests.support.driver import Driver
from tests.support.fake_runner import FakeRunner, answer

NUM_ANSWER = 40


def config(**cache: object) -> EngineConfig:
    return EngineConfig.model_validate({"prefix_cache": cache})


def next_turn(first: EngineRequest, said: list[int]) -> EngineRequest:
    ids = np.concatenate([first.token_ids, np.array(said, np.int32), plain_tokens("more", 20)])
    return replace(first, request_id="next", token_ids=ids, boundaries=())


@pytest.mark.parametrize("mtp", ["off", {"max_draft_tokens": 3}])
def test_the_next_turn_computes_no_token_of_the_answer_and_gets_the_same_tokens(runner, mtp):
    first = plain_request("first", plain_tokens("first", 60), max_tokens=NUM_ANSWER)
    kept, cold = (
        Driver(runner, EngineConfig.model_validate({"mtp": mtp, "prefix_cache": cache}))
        for cache in ({}, {"enabled": False})
    )
    said = kept.run({0: [first]})["first"]
    later = next_turn(first, said)
    tokens = kept.run({0: [later]})["next"]
    assert kept.chunks["next"][0].num_cached == len(first.token_ids) + NUM_ANSWER
    assert tokens == cold.run({0: [later]})["next"]


@pytest.mark.parametrize("broken", [set(), {"snapshot_row"}])
def test_an_answer_whose_snapshot_fails_is_still_delivered(broken: set[str]):
    runner = FakeRunner()
    runner.broken = broken
    driver = Driver(runner, config())
    request = plain_request("first", plain_tokens("first", 60), max_tokens=NUM_ANSWER)
    assert driver.run({0: [request]})["first"] == answer(request)
    kinds = [entry.kind for entry in driver.core.prefixes.status().entries]
    assert ("answer" in kinds) == (not broken)


def test_answers_are_not_cached_where_the_configuration_turns_it_off():
    driver = Driver(FakeRunner(), config(answers=False))
    driver.run({0: [plain_request("first", plain_tokens("first", 60), max_tokens=NUM_ANSWER)]})
    assert "answer" not in [entry.kind for entry in driver.core.prefixes.status().entries]


def test_answers_that_are_never_continued_are_cached_only_occasionally_until_one_is():
    driver, names = Driver(FakeRunner(), config()), count()

    def num_stored(num_requests: int) -> int:
        """Answer requests of which none continues another; return how many of their answers are cached."""
        before = driver.core.prefixes.store.counters.num_stored
        for _ in range(num_requests):
            name = f"new {next(names)}"
            ids = plain_tokens(name, 60)
            driver.run({0: [replace(plain_request(name, ids, max_tokens=NUM_ANSWER), boundaries=(), tenant=name)]})
        return driver.core.prefixes.store.counters.num_stored - before - num_requests  # each prompt is cached, too

    first = plain_request("first", plain_tokens("first", 60), max_tokens=NUM_ANSWER)
    said = driver.run({0: [first]})["first"]
    assert num_stored(MAX_UNUSED - 1) == MAX_UNUSED - 1
    assert num_stored(2 * PROBE_EVERY) == 2
    driver.run({0: [replace(next_turn(first, said[::-1]), request_id="other turn")]})
    assert driver.chunks["other turn"][0].num_cached == len(first.token_ids) - 1, "it continues the prompt"
    assert num_stored(PROBE_EVERY) == 1
    driver.run({0: [next_turn(first, said)]})
    assert driver.chunks["next"][0].num_cached == len(first.token_ids) + NUM_ANSWER
    assert num_stored(3) == 3
