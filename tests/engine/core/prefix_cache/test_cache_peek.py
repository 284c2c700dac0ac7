"""The cached prefix of a prompt as a planner sees it: its length, and that it stays until the prompt comes."""

from dataclasses import replace

import numpy as np
import pytest

from engine.core.spec_prefill.plan import fingerprint
from engine.protocol import SparsePlan
from tests.engine.core.prefix_cache.test_cache import QUESTION, SYSTEM, cached, config, request
from tests.support.driver import Driver
from tests.support.fake_runner import BYTES_PER_TOKEN, STATE_BYTES, FakeRunner

ROOM = 2 * (STATE_BYTES + 70 * BYTES_PER_TOKEN)
OLDER = request("older", [60] * 40, QUESTION)


@pytest.fixture
def driver() -> Driver:
    return Driver(FakeRunner(), config(boundaries=["turn"], max_gb=ROOM / 2**30))


def test_peek_returns_the_longest_cached_prefix_and_changes_no_counter(driver):
    assert driver.core.prefixes.peek(OLDER) == 0
    cached(driver, OLDER)
    counters = replace(driver.core.prefixes.store.counters)
    following = request("next", [60] * 40, QUESTION, [30] * 20)
    assert driver.core.prefixes.peek(following) == 70
    assert driver.core.prefixes.peek(replace(following, tenant="other")) == 0
    assert driver.core.prefixes.store.counters == counters


def test_a_peeked_snapshot_is_evicted_after_the_others(driver):
    newer = request("newer", [61] * 40, QUESTION)
    cached(driver, OLDER, newer)
    assert driver.core.prefixes.peek(OLDER) == 70
    driver.core.prefixes.memory.evict()
    assert [driver.core.prefixes.peek(one) for one in (OLDER, newer)] == [70, 0]


def test_peek_finds_no_prefix_when_the_cache_is_off():
    driver = Driver(FakeRunner(), config(enabled=False))
    cached(driver, OLDER)
    assert driver.core.prefixes.peek(OLDER) == 0


def test_a_prompt_whose_prefix_is_not_cached_is_prefilled_whole_by_its_plan(driver):
    following = request("next", SYSTEM, QUESTION, [30] * 20)
    positions = np.delete(np.arange(len(following.token_ids), dtype=np.int32), range(72, 80))
    plan = SparsePlan(positions, 70, fingerprint(following.token_ids, positions, 70))
    assert cached(driver, replace(following, sparse=plan)) == [0]
    chunk = driver.chunks["next"][0]
    assert chunk.num_skipped == 8 and driver.core.stats.num_prompt_tokens == len(following.token_ids) - 8
