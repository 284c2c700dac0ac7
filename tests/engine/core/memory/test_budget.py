"""MemoryBudget: reservations, releases and preemption for memory."""

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.core.memory.budget import OBSERVATIONS, MemoryBudget, make_memory_budget
from engine.core.memory.costs import MemoryCosts
from engine.core.memory.needs import MemoryNeeds
from engine.core.prompt import Prompt
from engine.core.row import Row
from engine.core.runner import PrefillOutput
from engine.errors import EngineFailed, MemoryExceeded
from engine.protocol import EngineRequest, SamplingParams
from tests.engine.core.rows import EvictableBytes
from tests.support.clock import Clock
from tests.support.driver import Driver
from tests.support.fake_runner import FakeRunner, answer

COSTS = MemoryCosts(
    base_bytes=10_000,
    token_bytes=10,
    state_bytes=100,
    layer_share=0.5,
    slots_step=16,
    overshoot=3,
    row_step_bytes=50,
    chunk_bytes=100,
    token_step_bytes=4.0,
    pair_bytes=0.01,
)


def request(request_id: str, num_prompt: int = 30, max_tokens: int = 20, n: int = 1, **more: Any) -> EngineRequest:
    prompt = np.arange(num_prompt, dtype=np.int32) + 5
    sampling = SamplingParams(max_tokens, seed=sum(request_id.encode()))
    return EngineRequest(request_id, prompt, sampling, (), num_choices=n, **more)


def rows(request: EngineRequest) -> list[Row]:
    return [Row(request, index) for index in range(request.num_choices)]


def budget_of(
    limit_bytes: int = 100_000, reserve_tokens: int = 64, cached: int = 0, costs: MemoryCosts = COSTS
) -> MemoryBudget:
    return MemoryBudget(MemoryNeeds(costs, limit_bytes, reserve_tokens), EvictableBytes(cached))


def observe(books: MemoryBudget, active_bytes: int) -> None:
    """Find the same bytes in use so often that they count."""
    for _ in range(OBSERVATIONS):
        books.observe(active_bytes, lambda: active_bytes)


def driver(
    budget: int,
    costs: MemoryCosts = COSTS,
    cache_gb: float | None = None,
    clock: Callable[[], float] | None = None,
    **config: Any,
) -> Driver:
    runner = FakeRunner()
    runner.costs, runner.memory_limit_bytes = costs, budget
    limits: dict[str, Any] = {"memory": {"headroom_gb": 0, "reserve_tokens": 16}, "scheduler": {"ageing_s": 1000}}
    cache = {"enabled": cache_gb is not None} | ({"max_gb": cache_gb} if cache_gb else {})
    return Driver(runner, EngineConfig.model_validate(limits | {"prefix_cache": cache} | config), clock)


def test_a_reservation_covers_prompt_answer_and_intermediate_results_of_a_step():
    books = budget_of()
    [row] = rows(request("r", num_prompt=30, max_tokens=20))
    assert books.reserve([row]) == 0
    slots = 64  # 30 + 20 + 3, in steps of 16
    assert books.accounts.row_bytes == slots * 10 + 100 + 50
    assert books.accounts.prefill_bytes == 0, "the row takes the arrays of its prompt over"
    assert books.accounts.transient_bytes == max(100 + 30 * (4 + 0.01 * 30), (slots * 10 + 100) * 0.5)
    books.release_prefill(row)
    assert books.accounts.transient_bytes == (slots * 10 + 100) * 0.5, "one layer may be rebuilt at any time"
    books.release(row.id)
    assert books.reserved_bytes == 0 and books.free_bytes == 100_000 - 10_000


def test_rows_that_decode_together_take_the_slots_of_the_longest():
    books = budget_of()
    for request_id, num_prompt in (("short", 10), ("long", 200), ("other", 10)):
        [row] = rows(request(request_id, num_prompt))
        assert books.reserve([row]) == 0
        books.release_prefill(row)
    assert books.status()["num_decode_groups"] == 1
    assert books.accounts.row_bytes == 3 * (224 * 10 + 100 + 50)
    books.release("long/0")
    assert books.accounts.row_bytes == 2 * (48 * 10 + 100 + 50), "what only the longest has needed is free"


def test_a_row_whose_padding_would_exceed_the_weights_gets_its_own_decode_group():
    books = budget_of(costs=replace(COSTS, base_bytes=1000))
    together = [rows(request(name, n))[0] for name, n in (("a", 10), ("b", 20), ("long", 500))]
    for row in together:
        assert books.reserve([row]) == 0
        books.release_prefill(row)
    a, b, long = (row.decode_group for row in together)
    assert a == b != long


def test_a_reservation_for_choices_covers_each_row_and_the_shared_prompt():
    books = budget_of()
    choices = rows(request("r", num_prompt=30, n=3))
    assert books.reserve(choices) == 0
    assert books.accounts.row_bytes == 3 * (64 * 10 + 150) and books.accounts.prefill_bytes == 32 * 10 + 100
    books.release_prefill(choices[0])
    assert books.accounts.prefill_bytes == 0


def test_the_bytes_that_a_row_s_sampling_needs_are_released_with_the_row():
    books = budget_of(costs=replace(COSTS, ranked_bytes=1000))
    asked, num_free = request("r"), books.free_bytes
    [row] = rows(replace(asked, sampling=replace(asked.sampling, top_p=0.9)))
    assert not books.reserve([row]) and books.free_bytes <= num_free - 1000
    books.release_prefill(row)
    books.release(row.id)
    assert books.free_bytes == num_free and not books.accounts.row_bytes


def test_a_failed_reservation_returns_the_missing_bytes_and_reserves_nothing():
    books = budget_of(11_800)
    [first] = rows(request("a"))
    assert books.reserve([first]) == 0
    books.release_prefill(first)
    before = books.reserved_bytes
    [row] = rows(request("b"))
    missing = books.shortfall_bytes([row])
    assert missing > 0 and books.reserve([row]) == missing and books.reserved_bytes == before
    enough = budget_of(11_800 + missing)
    assert enough.reserve([first]) == 0
    enough.release_prefill(first)
    assert enough.reserve([row]) == 0


def test_the_reservation_of_a_long_answer_is_extended_as_it_grows():
    books = budget_of(reserve_tokens=16)
    [row] = rows(request("r", num_prompt=10, max_tokens=1000))
    assert books.reserve([row]) == 0
    books.release_prefill(row)
    assert not books.needs_more_slots(row) and books.accounts.row_bytes == 32 * 10 + 150
    row.output_token_ids += [7] * 20
    assert books.needs_more_slots(row) and books.extend(row) == 0
    assert not books.needs_more_slots(row) and books.accounts.row_bytes == 64 * 10 + 150


def test_unaccounted_bytes_count_as_used_until_the_device_frees_them():
    books = budget_of()
    observe(books, 10_000 + 777)
    assert books.unaccounted_bytes == 777 and books.free_bytes == 90_000 - 777
    assert books.num_underestimates == 1
    books.observe(9_000, lambda: 9_000)
    assert books.unaccounted_bytes == 0 and books.num_underestimates == 1


def test_memory_that_the_device_frees_late_is_not_unaccounted():
    books = budget_of()
    settled = [10_000]
    waits = []

    def settle() -> int:
        waits.append(settled[0])
        return settled[0]

    for late in (300, 700, 200, 0, 500, 500, 500, 0):
        books.observe(10_000 + late, settle)
    assert books.unaccounted_bytes == 0 and books.num_underestimates == 0 and not waits
    for late in [400] * 4 * OBSERVATIONS:  # all of it is freed when the device is waited for
        books.observe(10_000 + late, settle)
    assert books.unaccounted_bytes == 0 and books.num_underestimates == 0 and len(waits) == 4
    settled[0] = 10_250  # not all of it
    for late in (700, 300, 500, 400):
        books.observe(10_000 + late, settle)
    assert books.unaccounted_bytes == 250 and books.num_underestimates == 1 and len(waits) == 5
    for late in [250] * 4 * OBSERVATIONS:  # what is known is not asked for again
        books.observe(10_000 + late, settle)
    assert books.unaccounted_bytes == 250 and books.num_underestimates == 1 and len(waits) == 5


def test_the_least_of_several_findings_is_unaccounted():
    books = budget_of()
    for late in (700, 300, 500):
        books.observe(10_000 + late, lambda: 10_900)
    assert books.num_underestimates == 0
    books.observe(10_000 + 400, lambda: 10_900)
    assert books.unaccounted_bytes == 300 and books.num_underestimates == 1


def test_a_chunk_whose_results_are_freed_late_is_still_in_the_books_of_the_next_step():
    late = driver(100_000, replace(COSTS, layer_share=0.0), prefill_chunk_tokens=64)
    prefill, budget = late.core.runner.prefill, late.core.budget

    def leave_results(rows: Sequence[Row], max_tokens: int) -> PrefillOutput:
        late.core.runner.active_bytes = budget.needs.limit_bytes - budget.free_bytes  # type: ignore[misc]
        return prefill(rows, max_tokens)

    late.core.runner.prefill = leave_results  # type: ignore[method-assign]
    late.core.add_request(request("r", num_prompt=1200, max_tokens=1))
    while late.core.has_work:
        late.core.step()
    assert late.core.stats.num_steps > OBSERVATIONS
    assert budget.num_underestimates == 0


def test_buffers_of_a_decode_group_may_exceed_its_arrays_without_being_unaccounted():
    def observed(slack: int) -> int:
        books = budget_of(costs=replace(COSTS, snapshot_slack=slack))
        (row,) = rows(request("row", 30, 20))
        assert not books.reserve([row])
        books.release_prefill(row)
        arrays = COSTS.base_bytes + COSTS.rows(1, books.grouping.of(row).slots[row.id])
        observe(books, arrays + books.accounts.transient_bytes + 300)
        return books.num_underestimates

    assert observed(0) == 1 and observed(300) == 0


def test_intermediate_results_of_a_step_in_flight_are_accounted_for():
    books = budget_of()
    [row] = rows(request("row", 30, 20))
    assert books.reserve([row]) == 0
    arrays, transient = COSTS.base_bytes + books.accounts.row_bytes, books.accounts.transient_bytes
    assert transient > 0
    observe(books, arrays + transient)
    assert books.num_underestimates == 0 and books.unaccounted_bytes == 0
    observe(books, arrays + transient + 1)
    assert books.num_underestimates == 1 and books.unaccounted_bytes == 1


def chunk(books: MemoryBudget, start: int) -> int:
    """The largest chunk of a prompt behind so many of its tokens, beside whatever runs."""
    prompt = Prompt(rows(request("of a chunk", start + 1, 1)), arrived_s=0.0, rank=0.0, num_prefilled=start)
    assert books.reserve(prompt.rows) == 0
    size = books.reserve_chunk(prompt, 2048)
    assert books.free_bytes >= 0
    books.release_chunk()
    assert books.reserve_chunk(prompt, 2048) == size, "what it could be smaller by is free until the next is chosen"
    books.release(prompt.row.id)
    return size


def test_chunks_become_smaller_behind_long_prompts():
    books = budget_of(200_000, costs=replace(COSTS, pair_bytes=1.0))
    starts, limit = (10, 100, 1000, 2800), 0.25 * books.needs.request_bytes
    sizes = [chunk(books, start) for start in starts]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 100 and sizes[-1] == 16
    for start, size in list(zip(starts, sizes, strict=True))[:3]:
        assert books.costs.chunk(size, start + size) <= limit < books.costs.chunk(size + 1, start + size + 1)


def test_chunks_become_smaller_where_little_memory_is_free():
    books = budget_of(100_000, costs=replace(COSTS, pair_bytes=1.0))
    alone = chunk(books, 100)
    observe(books, 10_000 + 70_000)
    beside_something_unknown = chunk(books, 100)
    assert 16 < beside_something_unknown < alone


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(12_000, 60_000))
def test_budget_is_never_exceeded_and_empty_after_random_arrivals_and_ends(seed: int, budget: int):
    rng, running, in_prefill = random.Random(seed), list[Row](), list[list[Row]]()
    books = budget_of(budget, rng.choice([8, 64, 10_000]))
    for i in range(60):
        group = rows(request(str(i), rng.randint(1, 300), rng.randint(1, 200), rng.choice([1, 1, 1, 2, 4])))
        before = books.reserved_bytes
        if missing := books.reserve(group):
            assert books.reserved_bytes == before and missing > 0
        else:
            in_prefill.append(group)
        while in_prefill and rng.random() < 0.4:
            group = in_prefill.pop(rng.randrange(len(in_prefill)))
            if rng.random() < 0.2:
                for row in group:  # given up before it has joined
                    books.release(row.id)
            else:
                books.release_prefill(group[0])
                running += group
        for row in running:
            row.output_token_ids += [7] * rng.randint(0, 5)
            if books.needs_more_slots(row):
                books.extend(row)
        assert books.free_bytes >= 0
        for row in [row for row in running if rng.random() < 0.3]:
            running.remove(row)
            books.release(row.id)
    running += [row for group in in_prefill for row in group]
    for row in running:
        books.release(row.id)
    assert books.reserved_bytes == books.accounts.row_bytes == books.accounts.prefill_bytes == 0


def test_an_engine_whose_weights_leave_no_room_does_not_start_and_names_the_figures():
    runner = FakeRunner()
    runner.costs, runner.memory_limit_bytes = COSTS, 10_500
    config = EngineConfig.model_validate({"memory": {"headroom_gb": 0}})
    with pytest.raises(EngineFailed, match=r"takes 10000 bytes.*the limit is 10500 bytes.*limit_gb.*headroom_gb"):
        make_memory_budget(config, runner, EvictableBytes())


def test_the_accounts_add_up_to_the_limit():
    books = MemoryBudget(MemoryNeeds(COSTS, 100_000, 64), EvictableBytes(snapshot_bytes=3000, image_bytes=500))
    for name, n in (("row", 1), ("choices", 3)):
        assert not books.reserve(rows(replace(request(name, num_prompt=40, max_tokens=20), num_choices=n)))
    observe(books, 100_000 - books.free_bytes + 700)
    status, accounts = books.status(), asdict(books.accounts)
    assert sum(accounts.values()) == status["limit_bytes"] == 100_000
    assert all(num_bytes > 0 for num_bytes in accounts.values()), accounts
    assert status["reserved_bytes"] == sum(status[f"{name}_bytes"] for name in ("row", "prefill", "transient"))
    assert (status["prefix_cache_bytes"], status["image_cache_bytes"]) == (3000, 500)


def test_the_headroom_is_kept_free():
    runner = FakeRunner()
    runner.memory_limit_bytes = 2**30
    assert make_memory_budget(EngineConfig(), runner, EvictableBytes()).needs.limit_bytes == 2**30 - 2**27
    config = EngineConfig.model_validate({"memory": {"limit_gb": 4, "headroom_gb": 1}})
    assert make_memory_budget(config, runner, EvictableBytes()).needs.limit_bytes == 3 * 2**30


def test_max_tokens_is_lowered_to_what_fits_and_a_prompt_that_never_fits_is_refused_with_both_numbers():
    core = driver(budget=14_000).core
    needs, pinned_bytes = core.budget.needs, core.figures.pinned_bytes
    fits = request("fits")
    assert needs.clamp_max_tokens(fits, pinned_bytes) is fits
    fitted = needs.clamp_max_tokens(request("r", max_tokens=900), pinned_bytes)
    assert 100 < fitted.sampling.max_tokens < 400
    more = replace(fitted, sampling=SamplingParams(fitted.sampling.max_tokens + 16))
    assert needs.clamp_max_tokens(more, pinned_bytes).sampling.max_tokens < more.sampling.max_tokens
    with pytest.raises(MemoryExceeded, match=r"needs \d+ bytes .* 900 tokens in the prompt, 900 .* has 4000 bytes"):
        needs.clamp_max_tokens(request("r", num_prompt=900, max_tokens=900), pinned_bytes)


def test_answers_are_complete_when_memory_holds_only_a_few_rows_at_a_time():
    """Rows outgrow what they have reserved, the youngest make room, and go on where they were."""
    tight, requests = driver(budget=14_000), [request(f"r{i}", 20 + i, 90) for i in range(6)]
    tokens = tight.run({0: requests})
    assert tokens == {r.request_id: answer(r) for r in requests}
    assert tight.core.stats.num_preempted > 0
    assert tight.core.budget.reserved_bytes == 0


def test_random_arrivals_and_aborts_in_tight_memory_give_every_row_its_own_tokens():
    for seed in range(6):
        rng = random.Random(seed)
        tight = driver(budget=rng.randint(13_000, 18_000), max_running=6)
        needs = tight.core.budget.needs
        requests = [
            request(f"r{i}", rng.randint(1, 120), rng.randint(1, 100), rng.choice([1, 1, 2])) for i in range(20)
        ]
        requests = [r for r in requests if needs.min_bytes(needs.need(rows(r), whole=True)) <= 3000]
        arrivals = {rng.randint(0, 60): [r] for r in requests}
        aborts = {rng.randint(0, 80): [r.request_id] for r in requests[::4]}
        tight.run(arrivals, aborts)
        for r in (r for group in arrivals.values() for r in group):
            for index in range(r.num_choices):
                name = r.request_id if not index else f"{r.request_id}/{index}"
                got = tight.tokens[name]
                assert got == answer(r, index)[: len(got)], (seed, name)
                assert len(got) == r.sampling.max_tokens or r in requests[::4]
        assert tight.core.budget.reserved_bytes == 0 and not tight.core.runner.rows  # type: ignore[attr-defined]


def test_snapshots_are_evicted_before_a_request_waits_for_memory():
    cached = driver(budget=16_600, cache_gb=1.0)
    cached.run({0: [request("first", num_prompt=200, max_tokens=5)]})
    assert cached.core.prefixes.store.num_bytes > 0
    big = request("big", num_prompt=240, max_tokens=40)
    assert cached.core.budget.shortfall_bytes(rows(big)) > 0
    cached.core.add_request(replace(big, tenant="other"))
    cached.core.step()
    assert cached.core.scheduler.num_running == 1 and cached.core.prefixes.store.counters.num_evicted == 1


def test_a_snapshot_takes_no_memory_that_rows_have_reserved():
    cached = driver(budget=13_000, cache_gb=1.0)
    tokens = cached.run({0: [request("r", num_prompt=150, max_tokens=5)]})
    assert tokens["r"] == answer(request("r", num_prompt=150, max_tokens=5))
    assert cached.core.prefixes.store.num_bytes == 0 and cached.core.prefixes.store.counters.num_rejected == 1


def test_small_requests_overtake_one_that_waits_for_memory_only_for_a_limited_time():
    clock = Clock()
    tight = driver(budget=13_700, clock=clock, scheduler={"ageing_s": 10})
    tight.core.add_request(request("running", num_prompt=100, max_tokens=60))
    tight.core.step()
    for name, num_prompt in (("large", 120), ("small", 5)):
        tight.core.add_request(request(name, num_prompt, max_tokens=8))
    assert tight.core.budget.shortfall_bytes(rows(request("large", 120, 8))) > 0
    tight.core.step()
    assert tight.tokens["small"] and not tight.tokens["large"], "it passes"
    clock.advance(11)
    tight.core.add_request(request("late", 5, max_tokens=8))
    tight.core.step()
    assert not tight.tokens["late"] and not tight.tokens["large"], "nobody passes any more"
    assert tight.run({0: []})["large"] == answer(request("large", 120, 8))


def test_a_request_without_other_rows_does_not_wait_for_unaccounted_bytes():
    """It may stay for ever. Somebody else who comes waits for one of the two to go."""
    tight = driver(budget=14_000)
    tight.core.runner.active_bytes = 13_990  # type: ignore[misc]
    for _ in range(OBSERVATIONS):
        tight.core.step()
    first, second = request("first", max_tokens=60), request("second")
    tight.core.add_request(first)
    tight.core.add_request(second)
    tight.core.step()
    tight.core.step()
    assert tight.core.scheduler.num_running == 1 and tight.core.scheduler.num_waiting == 1
    tokens = tight.run({0: []})
    assert tokens == {"first": answer(first), "second": answer(second)}


def test_an_idle_engine_refuses_a_request_that_never_fits_with_the_missing_bytes():
    """A request that has not passed `MemoryNeeds.clamp_max_tokens`."""
    tight = driver(budget=14_000)
    tight.core.add_request(request("r", max_tokens=900, num_prompt=900))
    tight.core.step()
    tight.core.step()
    assert "more bytes of memory; the budget is 14000 bytes" in (tight.errors["r"] or "")
    assert tight.chunks["r"][-1].retry_after_s and not tight.core.has_work
