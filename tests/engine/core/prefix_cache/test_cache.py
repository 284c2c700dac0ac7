"""Prefixes that a prompt restores and stores, through the engine's step, with a runner without a model."""

import itertools
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.core.prefix_cache.prompt_key import PromptKey
from engine.core.runner import ChunkTime
from engine.protocol import Boundary, EngineRequest, FinishReason, ImagePatches, PromptOrigin, SamplingParams
from tests.support.driver import Driver
from tests.support.fake_runner import BYTES_PER_TOKEN, STATE_BYTES, STOP, FakeRunner, answer

SYSTEM = list(range(100, 140))
QUESTION = list(range(200, 230))
GENERATION = [7, 8, 9]


def config(**prefix_cache: Any) -> EngineConfig:
    return EngineConfig.model_validate({"prefix_cache": prefix_cache, "prefill_chunk_tokens": 1000})


def request(name: str, *parts: list[int], generation: list[int] = GENERATION, **more: Any) -> EngineRequest:
    """The first part is the system part; a turn ends behind the last part."""
    ids = [token for part in parts for token in part]
    boundaries = (Boundary("system", len(parts[0])), Boundary("turn", len(ids)))
    ids = np.array([*ids, *generation], np.int32)
    sampling = SamplingParams(2, seed=len(name))
    return EngineRequest(name, ids, sampling, (STOP,), **{"boundaries": boundaries, **more})


def cached(driver: Driver, *requests: EngineRequest) -> list[int]:
    """Each alone, one after the other: how many tokens came from the cache."""
    for one in requests:
        driver.run({0: [one]})
        assert driver.finish[one.request_id] is FinishReason.LENGTH
        assert driver.tokens[one.request_id] == answer(one)
        assert driver.core.prefixes.store.integrity_error() is None
    return [driver.chunks[one.request_id][0].num_cached for one in requests]


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner()


def prefills(runner: FakeRunner) -> list[int]:
    return [call[2] for call in runner.calls if call[0] == "prefill"]


def snapshots(runner: FakeRunner) -> list[int]:
    return [call[2] for call in runner.calls if call[0] == "snapshot"]


def test_a_second_conversation_hits_the_system_part_and_the_next_turn_the_turn_before(runner):
    driver = Driver(runner, config())
    first, other = request("a", SYSTEM, QUESTION), request("b", SYSTEM, QUESTION[::-1])
    following = request("c", SYSTEM, QUESTION, GENERATION, [30] * 20)
    assert cached(driver, first, other, following, replace(first, request_id="d")) == [0, 40, 70, 70]
    assert driver.core.stats.num_cached_tokens == 180 == driver.core.prefixes.store.counters.num_cached_tokens
    assert (driver.core.prefixes.store.counters.num_hits, driver.core.prefixes.store.counters.num_misses) == (3, 1)


def test_chunks_end_at_snapshot_boundaries_and_no_token_is_computed_twice(runner):
    driver = Driver(runner, config())
    cached(driver, request("a", SYSTEM, QUESTION, generation=[5] * 40))
    assert snapshots(runner) == [40, 70, 109]
    assert prefills(runner)[:3] == [40, 30, 39]
    assert driver.core.stats.num_prompt_tokens == 110, "no token is computed twice"


def test_chunks_end_only_with_the_system_part_where_the_runner_snapshots_prefixes(runner):
    runner.snapshots_prefixes = True
    driver = Driver(runner, config())
    cached(driver, request("a", SYSTEM, QUESTION, generation=[5] * 40))
    assert snapshots(runner) == [40, 70, 109]
    assert prefills(runner) == [40, 70]
    following = request("b", SYSTEM, QUESTION, [5] * 40, [6] * 20)
    assert cached(driver, following) == [109]
    assert driver.core.prefixes.store.integrity_error() is None


def test_a_boundary_that_saves_fewer_than_min_tokens_is_passed_over(runner):
    driver = Driver(runner, config(min_tokens=32))
    cached(driver, request("a", SYSTEM, QUESTION, generation=[5] * 40))
    assert snapshots(runner) == [40, 109], "the turn is 30 tokens behind the system part"


def test_the_end_of_a_prompt_gets_no_snapshot_where_the_end_of_its_turn_is_passed_over(runner):
    """The turn is 10 tokens behind the system part, the prompt 20, and the next turn may not have the last 10."""
    driver = Driver(runner, config())
    cached(driver, request("a", SYSTEM, [5] * 10, generation=[6] * 11))
    assert snapshots(runner) == [40]


def test_only_the_configured_boundaries_get_snapshots(runner):
    driver = Driver(runner, config(boundaries=["turn"]))
    cached(driver, request("a", SYSTEM, QUESTION, generation=[5] * 40))
    assert snapshots(runner) == [70]


def test_prompts_are_not_cached_when_the_cache_is_off(runner):
    off = Driver(runner, config(enabled=False))
    assert cached(off, request("a", SYSTEM, QUESTION), request("b", SYSTEM, QUESTION)) == [0, 0]
    assert off.core.prefixes.status().off_reason == "prefix_cache.enabled is false" and not snapshots(runner)


def test_prefixes_that_take_less_time_than_a_snapshot_are_not_cached(runner, caplog):
    runner.chunk_times, runner.snapshot_s = [ChunkTime(n, 0.02 + n * 1e-4) for n in (64, 256)], 0.006
    with caplog.at_level("INFO", "orchard.engine"):
        driver = Driver(runner, config())
    assert "prefixes of fewer than 60 tokens are not cached" in caplog.text
    assert cached(driver, request("a", SYSTEM, [5] * 10), request("b", SYSTEM, [5] * 10)) == [0, 0]
    assert not snapshots(runner)
    assert cached(driver, request("c", SYSTEM, QUESTION), request("d", SYSTEM, QUESTION)) == [0, 70]
    assert snapshots(runner) == [70], "the system part has 40 tokens"
    asked = Driver(runner, config(min_tokens=16))
    assert cached(asked, request("a", SYSTEM, [5] * 10), request("b", SYSTEM, [5] * 10)) == [0, 40], "as configured"


def test_a_hit_always_leaves_at_least_one_token_to_compute(runner):
    driver = Driver(runner, config())
    whole = EngineRequest("a", np.array(SYSTEM, np.int32), SamplingParams(1), (STOP,))
    shorter = replace(whole, request_id="b", token_ids=whole.token_ids[:39])
    assert cached(driver, whole, replace(whole, request_id="c"), shorter) == [0, 39, 0]


def test_requests_that_come_together_prefill_their_common_prefix_once(runner):
    driver = Driver(runner, config())
    eight = [request(f"r{i}", SYSTEM, [300 + i] * 30) for i in range(8)]
    driver.run({0: eight})
    assert driver.core.stats.num_prompt_tokens == 40 + 8 * 33
    assert [driver.chunks[r.request_id][0].num_cached for r in eight] == [0] + [40] * 7


def test_tenants_share_no_snapshots_and_the_miss_reports_the_tenant(runner):
    driver = Driver(runner, config())
    mine, theirs = request("a", SYSTEM, QUESTION, tenant="mine"), request("b", SYSTEM, QUESTION, tenant="theirs")
    nobodys = request("c", SYSTEM, QUESTION)
    again = [replace(one, request_id=one.request_id * 2) for one in (mine, theirs, nobodys)]
    assert cached(driver, mine, theirs, nobodys, *again) == [0, 0, 0, 70, 70, 70]
    misses = driver.core.prefixes.status().recent_misses
    assert [miss.reason for miss in misses] == ["tenant", "tenant", "cold"]
    assert not any(miss.prompt_token_ids or miss.stored_token_ids for miss in misses), "no tenant reads others' text"


def test_prompts_with_equal_digests_are_still_compared(runner, monkeypatch):
    monkeypatch.setattr(PromptKey, "digests", lambda self, lengths: ((n, f"{n}") for n in lengths if n <= len(self)))
    runner.image_token_id = 9
    driver = Driver(runner, config(boundaries=["turn"]))
    seen = request("seen", SYSTEM, [9] * 10, QUESTION, images=(picture("red"),), tenant="mine")
    others = (
        replace(seen, request_id="blue", images=(picture("blue"),)),
        replace(seen, request_id="theirs", tenant="theirs"),
        replace(seen, request_id="text", token_ids=np.concatenate([[5], seen.token_ids[1:]]).astype(np.int32)),
    )
    assert cached(driver, seen, *others, replace(seen, request_id="same")) == [0, 0, 0, 0, 80]


def test_two_alternating_system_prompts_both_stay_cached(runner):
    driver = Driver(runner, config())
    other = [token + 500 for token in SYSTEM]
    turns = [
        request(f"{name}{i}", part, [600 + i] * 20) for i in range(3) for name, part in (("a", SYSTEM), ("b", other))
    ]
    assert cached(driver, *turns) == [0, 0, 40, 40, 40, 40]


def picture(content_hash: str, num_tokens: int = 10) -> ImagePatches:
    return ImagePatches(np.zeros((4, 3, 8, 8), np.uint8), (1, 2, 2), num_tokens, content_hash)


def test_a_prompt_with_another_image_does_not_hit_behind_the_image(runner):
    runner.image_token_id = 9
    driver = Driver(runner, config())
    seen = [1, 2, *[9] * 10, 3, 4, 5, 6]
    red = request("red", SYSTEM, seen, QUESTION, images=(picture("red"),))
    blue = replace(red, request_id="blue", images=(picture("blue"),))
    again = [replace(red, request_id="red2"), replace(blue, request_id="blue2")]
    assert cached(driver, red, blue, *again) == [0, 40, 86, 86]
    assert driver.core.prefixes.status().recent_misses[0].reason == "image"
    assert driver.core.prefixes.status().recent_misses[0].num_common == 42


def test_a_boundary_inside_an_image_gets_no_snapshot(runner):
    runner.image_token_id = 9
    driver = Driver(runner, config())
    inside = replace(
        request("a", SYSTEM, [9] * 10, QUESTION, images=(picture("red"),)),
        boundaries=(Boundary("system", 45), Boundary("turn", 80)),
    )
    cached(driver, inside)
    assert snapshots(runner) == [80]


@pytest.mark.parametrize(("field", "reason"), [("tools", "tools"), ("template_kwargs", "template_kwargs")])
def test_a_miss_names_the_changed_tools_or_template_arguments(runner, field, reason):
    driver = Driver(runner, config())
    changed = [*SYSTEM[:5], *[77] * 35]
    first = request("a", SYSTEM, QUESTION, origin=PromptOrigin(**{field: "one"}))
    second = request("b", changed, QUESTION, origin=PromptOrigin(**{field: "other"}))
    assert cached(driver, first, second) == [0, 0]
    (miss, _) = driver.core.prefixes.status().recent_misses
    assert (miss.reason, miss.num_common, miss.num_cached) == (reason, 5, 0)


def test_a_miss_shows_where_the_text_differs(runner):
    driver = Driver(runner, config())
    changed = [*SYSTEM[:39], 77]
    assert cached(driver, request("a", SYSTEM, QUESTION), request("b", changed, QUESTION)) == [0, 0]
    (miss, cold) = driver.core.prefixes.status().recent_misses
    assert cold.reason == "cold" and cold.num_prompt_tokens == 73
    assert (miss.reason, miss.num_common, miss.request_id) == ("text", 39, "b")
    assert miss.prompt_token_ids == (77, *QUESTION[:7]) and miss.stored_token_ids[:1] == (139,)
    assert driver.core.prefixes.status().misses == {"cold": 1, "text": 1}


def test_a_prompt_that_is_a_prefix_of_a_stored_one_is_reported_as_a_cold_miss(runner):
    driver = Driver(runner, config(boundaries=["turn"]))
    long = request("long", SYSTEM, [5] * 100, origin=PromptOrigin(template_kwargs="one"))
    assert cached(driver, long, request("short", SYSTEM, [5] * 20, generation=[5])) == [0, 0]
    assert driver.core.prefixes.status().recent_misses[0].reason == "cold"


def test_a_rewritten_history_is_reported_as_changed_text_although_its_system_part_hits(runner):
    driver = Driver(runner, config())
    long = [[*range(300, 400)], [*range(400, 420)]]
    rewritten = [long[0][:90] + [5] * 10, long[1]]
    assert cached(driver, request("a", SYSTEM, *long), request("b", SYSTEM, *rewritten)) == [0, 40]
    miss = driver.core.prefixes.status().recent_misses[0]
    assert (miss.reason, miss.num_cached, miss.num_common, miss.boundary) == ("text", 40, 130, "turn")
    assert driver.core.prefixes.status().misses == {"cold": 1}, "it was a hit"


PINNED = EngineRequest(
    "pin",
    np.array([*SYSTEM, 1], np.int32),
    SamplingParams(1),
    (STOP,),
    boundaries=(Boundary("system", 40),),
    pinned=True,
)
PER_PROMPT = 2 * STATE_BYTES + 70 * BYTES_PER_TOKEN


def sized(num_bytes: int) -> EngineConfig:
    return config(max_gb=num_bytes / 2**30)


def test_a_conversation_that_returned_outlives_another_and_the_miss_reports_the_eviction(runner):
    milliseconds = itertools.count()
    driver = Driver(runner, config(), lambda: next(milliseconds) / 1000)
    a, b = (request(name, [start + token for token in SYSTEM], QUESTION) for name, start in (("a", 0), ("b", 50)))
    assert cached(driver, a, b, replace(a, request_id="a2")) == [0, 0, 70]
    driver.core.prefixes.memory.evict()
    assert cached(driver, replace(a, request_id="a3"), replace(b, request_id="b2")) == [70, 40]
    miss = driver.core.prefixes.status().recent_misses[0]
    assert (miss.reason, miss.boundary, miss.num_common) == ("evicted", "turn", 70)


def test_memory_of_a_long_conversation_grows_linearly_with_its_length(runner):
    driver = Driver(runner, config())
    parts = [SYSTEM]
    for turn in range(20):
        parts.append([1000 + turn] * 25)
        hits = cached(driver, request(f"t{turn}", *parts))
        assert hits == [0 if not turn else 40 + 25 * turn]
    entries = driver.core.prefixes.status().entries
    num_tokens = 40 + 20 * 25
    assert driver.core.prefixes.store.num_bytes == num_tokens * BYTES_PER_TOKEN + len(entries) * STATE_BYTES
    assert len(entries) == 21


def test_snapshots_behind_a_removed_one_still_hit(runner):
    driver = Driver(runner, config())
    parts = [SYSTEM, [1] * 25, [2] * 25, [3] * 25]
    cached(driver, request("a", *parts[:2]), request("b", *parts[:3]), request("c", *parts))
    cache = driver.core.prefixes.store
    middle = next(entry for entry in cache.nodes() if entry.num_tokens == 90)
    before = cache.num_bytes
    cache.forget(middle)
    assert before - cache.num_bytes == STATE_BYTES, "its segment is still needed"
    assert cached(driver, request("d", *parts, [4] * 25)) == [115]
    while len(cache):
        cache.forget(next(iter(cache.nodes())))
    assert cache.num_bytes == 0 and cache.integrity_error() is None


def test_a_snapshot_larger_than_the_whole_cache_is_rejected_without_eviction(runner):
    driver = Driver(runner, sized(PER_PROMPT + 100))
    assert cached(driver, request("a", SYSTEM, QUESTION)) == [0]
    huge = request("b", list(range(500)), QUESTION)
    assert cached(driver, huge, replace(huge, request_id="c"), request("a2", SYSTEM, QUESTION)) == [0, 0, 70]
    assert driver.core.prefixes.store.counters.num_rejected > 0 == driver.core.prefixes.store.counters.num_evicted


def test_a_pinned_snapshot_survives_other_prompts_and_clearing(runner):
    driver = Driver(runner, sized(2 * PER_PROMPT))
    cached(driver, PINNED)
    others = [request(f"r{i}", [300 + 50 * i + token for token in range(40)], QUESTION) for i in range(6)]
    cached(driver, *others)
    driver.core.prefixes.clear()
    assert cached(driver, request("b", SYSTEM, QUESTION)) == [40]
    (entry, *_) = [entry for entry in driver.core.prefixes.status().entries if entry.pinned]
    assert entry.num_tokens == 40 and driver.core.prefixes.status().num_pinned == 1


def test_a_snapshot_that_does_not_fit_beside_pinned_ones_is_rejected_without_eviction(runner):
    driver = Driver(runner, sized(2 * PER_PROMPT))
    small = request("small", [9] * 20, [8] * 20)
    large = request("large", list(range(350)), QUESTION)
    assert cached(driver, PINNED, small, large, replace(small, request_id="again")) == [0, 0, 0, 40]
    assert driver.core.prefixes.status().num_rejected == 1 and driver.core.prefixes.status().num_evicted == 0


def test_clearing_empties_the_cache_and_the_next_miss_reports_it(runner):
    driver = Driver(runner, config())
    cached(driver, request("a", SYSTEM, QUESTION))
    cleared = driver.core.prefixes.clear()
    assert (cleared.num_entries, cleared.num_bytes) == (2, PER_PROMPT)
    assert driver.core.prefixes.status().num_bytes == driver.core.prefixes.status().num_entries == 0
    assert cached(driver, request("b", SYSTEM, QUESTION)) == [0]
    assert driver.core.prefixes.status().recent_misses[0].reason == "cleared"


def test_clearing_the_cache_while_a_prompt_continues_a_snapshot_costs_no_answer(runner):
    driver = Driver(runner, EngineConfig(prefill_chunk_tokens=16))
    cached(driver, request("a", SYSTEM, QUESTION))
    driver.core.add_request(request("b", SYSTEM, QUESTION, [300] * 60))
    driver.core.step()
    driver.core.step()
    driver.core.prefixes.clear()
    driver.run({0: []})
    assert driver.tokens["b"] == answer(request("b", SYSTEM, QUESTION))
    assert driver.core.prefixes.store.integrity_error() is None
    assert cached(driver, request("c", SYSTEM, QUESTION, [300] * 60, [5] * 10)) == [130]


def test_the_complete_snapshots_of_an_aborted_prompt_stay_in_the_cache(runner):
    driver = Driver(runner, EngineConfig(prefill_chunk_tokens=16))
    long = request("a", SYSTEM, [300] * 60)
    driver.run({0: [long]}, aborts={5: ["a"]})
    assert [entry.num_tokens for entry in driver.core.prefixes.status().entries] == [40]
    assert driver.core.prefixes.store.integrity_error() is None
    assert cached(driver, replace(long, request_id="b")) == [40]


def test_a_failed_prompt_removes_the_snapshots_it_has_stored(runner):
    driver = Driver(runner, EngineConfig(prefill_chunk_tokens=16))
    cached(driver, request("before", SYSTEM, [5] * 30))
    driver.core.add_request(request("a", [9, *SYSTEM], [300] * 60))
    for _ in range(4):
        driver.core.step()
    assert {entry.num_tokens for entry in driver.core.prefixes.status().entries} == {40, 41, 70}
    runner.broken = {"prefill"}
    driver.core.step()
    assert driver.finish["a"] is FinishReason.ERROR
    runner.broken = set()
    assert {entry.num_tokens for entry in driver.core.prefixes.status().entries} == {40, 70}
    assert driver.core.prefixes.store.integrity_error() is None


def test_a_state_that_is_not_finite_is_not_stored(runner, monkeypatch):
    monkeypatch.setattr(runner, "snapshot", lambda rows, parent: None)
    driver = Driver(runner, config())
    assert cached(driver, request("a", SYSTEM, QUESTION), request("b", SYSTEM, QUESTION)) == [0, 0]
    assert driver.core.prefixes.status().num_entries == 0 and driver.core.prefixes.status().num_rejected == 2


def test_a_snapshot_that_failed_to_restore_stays_for_the_next_prompt(runner):
    driver = Driver(runner, config())
    cached(driver, request("a", SYSTEM, QUESTION))
    runner.broken = {"restore"}
    assert cached(driver, request("b", SYSTEM, QUESTION)) == [0]
    assert driver.core.prefixes.status().num_unusable == 2, "the turn's, then the system part's"
    runner.broken = set()
    assert cached(driver, request("c", SYSTEM, QUESTION)) == [70]


@pytest.mark.parametrize("fault", ["snapshot", "restore"])
def test_a_failed_snapshot_or_restore_does_not_fail_the_request(runner, fault):
    driver = Driver(runner, config())
    cached(driver, request("a", SYSTEM, QUESTION))
    runner.broken = {fault}
    assert cached(driver, request("b", SYSTEM, QUESTION[::-1])) == [0 if fault == "restore" else 40]
    runner.broken = set()
    assert driver.core.failed_steps_in_a_row == 0


def test_a_preempted_row_continues_from_its_own_snapshot_and_counts_its_prompt_once(runner):
    driver = Driver(
        runner, EngineConfig.model_validate({"max_running": 1, "scheduler": {"policy": "priority", "ageing_s": 1000}})
    )
    slow = replace(request("slow", SYSTEM, QUESTION), sampling=SamplingParams(30, seed=4), priority=5)
    driver.core.add_request(slow)
    for _ in range(10):
        driver.core.step()
    driver.run({0: [request("fast", SYSTEM, QUESTION[::-1])]})
    assert driver.tokens["slow"] == answer(slow) and driver.core.stats.num_preempted == 1
    assert [call[1:] for call in runner.calls if call[0] == "restore"] == [("fast/0", 40), ("slow/0", 70)]
    assert {chunk.num_cached for chunk in driver.chunks["slow"]} == {0}
    assert driver.core.prefixes.store.counters.num_hits == driver.core.prefixes.store.counters.num_misses == 1


def test_inconsistent_accounts_are_detected_when_idle_and_the_cache_is_emptied(runner, caplog):
    driver = Driver(runner, config())
    cached(driver, request("a", SYSTEM, QUESTION))
    driver.core.prefixes.store.num_bytes += 1
    for i in range(100):  # it does not look all the time
        if "the prefix cache is inconsistent and is cleared" in caplog.text:
            break
        time.sleep(0.01)
        driver.run({0: [EngineRequest(f"x{i}", np.array([1], np.int32), SamplingParams(1), (STOP,))]})
    assert "the prefix cache is inconsistent and is cleared" in caplog.text
    status = driver.core.prefixes.status()
    assert status.num_entries == status.num_bytes == 0 and status.num_integrity_errors == 1
    assert cached(driver, request("b", SYSTEM, QUESTION), request("c", SYSTEM, QUESTION)) == [0, 70]


def test_bytes_and_entries_of_the_status_add_up(runner):
    driver = Driver(runner, config())
    cached(driver, request("a", SYSTEM, QUESTION, tenant="salt"), request("b", SYSTEM, QUESTION, tenant="salt"))
    status = driver.core.prefixes.status()
    assert sum(entry.num_bytes for entry in status.entries) == status.num_bytes == PER_PROMPT
    assert [(entry.kind, entry.num_hits, entry.where) for entry in status.entries] == [
        ("system", 0, "memory"),
        ("turn", 1, "memory"),
    ]
    assert {entry.tenant for entry in status.entries} != {"salt"}, "a salt is a secret"
    assert driver.core.figures.memory["prefix_cache_bytes"] == status.num_bytes <= status.max_bytes == 2**30
