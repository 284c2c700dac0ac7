"""Memory and rows for queued requests: eviction first, then preemption, never in vain, and no starvation."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.core.admission import MAX_PASSING
from engine.core.cost_model import CostModel
from engine.core.memory.budget import OBSERVATIONS, MemoryBudget
from engine.core.memory.costs import MemoryCosts
from engine.core.memory.needs import MemoryNeeds
from engine.core.row import Row
from engine.core.runner import PLAIN, PrefillOutput, RowOutput
from engine.core.scheduler import Scheduler
from engine.protocol import EngineRequest, SamplingParams
from tests.engine.core.rows import (
    EvictableBytes,
    finish_prefill,
    make_scheduler,
    scheduler_of,
    spec,
    start,
    step_of,
)
from tests.support.clock import Clock
from tests.support.driver import Driver
from tests.support.fake_runner import FakeRunner, answer

COSTS = MemoryCosts(base_bytes=10_000, token_bytes=10, layer_share=0.125, slots_step=16, overshoot=3)


def request(name: str, num_prompt: int, max_tokens: int, seed: int = 0, **more: Any) -> EngineRequest:
    prompt = np.arange(num_prompt, dtype=np.int32) + 5 + 100 * seed
    return EngineRequest(name, prompt, SamplingParams(max_tokens, seed=seed), (), **more)


def driver(budget: int, costs: MemoryCosts = COSTS, clock: Clock | None = None, **config: Any) -> Driver:
    runner = FakeRunner()
    runner.costs, runner.memory_limit_bytes = costs, budget
    limits = {"memory": {"headroom_gb": 0}, "prefix_cache": {"enabled": False}} | config
    return Driver(runner, EngineConfig.model_validate(limits), clock)


class Evictables:
    """Cached bytes that may all be evicted, and the seconds that evicting any of them costs."""

    def __init__(self, num_bytes: int = 0, price_s: float = 0.0):
        self.evictable_bytes = num_bytes
        self.price_s = price_s

    @property
    def snapshot_bytes(self) -> int:
        return self.evictable_bytes

    @property
    def image_bytes(self) -> int:
        return 0

    def evict(self, num_bytes: int) -> bool:
        if num_bytes > self.evictable_bytes:
            return False
        self.evictable_bytes -= num_bytes
        return True

    def price(self, num_bytes: int) -> float:
        return self.price_s if num_bytes <= self.evictable_bytes else float("inf")


def tight(budget: int, evictable: Evictables | None = None, clock: Clock | None = None, **config: Any) -> Scheduler:
    """A scheduler in which a token of a row costs ten bytes and nothing else costs any."""
    evictable = evictable or Evictables()
    costs = MemoryCosts(token_bytes=10, layer_share=0.0, slots_step=16, overshoot=3)
    books = MemoryBudget(MemoryNeeds(costs, budget, config.pop("reserve_tokens", 1000)), evictable)
    return make_scheduler(EngineConfig.model_validate(config), clock, books, evictable)


def admit(scheduler: Scheduler, spec: EngineRequest) -> Row:
    row = Row(spec)
    scheduler.add([row])
    assert list(step_of(scheduler).prefill) == [row]
    finish_prefill(scheduler, [row])
    return row


def test_a_request_that_fits_into_an_idle_engine_is_accepted_unchanged_and_answered():
    """One row takes its prompt's cache over: it is not there twice."""
    engine = driver(20_000)
    whole = request("whole", 800, 60)
    assert engine.core.budget.needs.clamp_max_tokens(whole, engine.core.figures.pinned_bytes) == whole
    assert engine.run({0: [whole]})["whole"] == answer(whole)


def test_a_preempted_long_answer_fits_when_it_restarts():
    """By then its prompt is longer, and a chunk of it takes more than at the beginning."""
    costs = replace(COSTS, pair_bytes=1.0)
    long, urgent = request("long", 10, 1900, priority=9), request("urgent", 10, 5)
    engine = driver(60_000, costs, max_running=1, scheduler={"policy": "priority"})
    core = engine.core
    most = core.budget.needs.min_bytes(core.budget.needs.need([Row(long)], whole=True))
    assert most > 49_000, "its rows, and 16 tokens that look at 1900"
    engine = driver(10_000 + most, costs, max_running=1, scheduler={"policy": "priority"})
    core = engine.core
    assert core.budget.needs.clamp_max_tokens(long, core.figures.pinned_bytes) == long
    tokens = engine.run({0: [long], 1800: [urgent]})
    assert core.stats.num_preempted == 1 and core.stats.num_failed == 0
    assert tokens == {"long": answer(long), "urgent": answer(urgent)}


def test_snapshots_and_image_features_are_both_evicted_where_neither_is_enough():
    engine = driver(30_000, prefix_cache={"enabled": True, "max_gb": 1})
    engine.run({0: [request(f"before{i}", 30, 3, i) for i in range(4)]})
    engine.core.runner.feature_bytes = 6000  # type: ignore[misc]
    snapshots = engine.core.prefixes.store.num_bytes
    big = request("big", 10, 1700, 7)
    missing = engine.core.budget.shortfall_bytes([Row(big)])
    assert (
        missing > max(snapshots, 6000)
        and engine.core.budget.needs.clamp_max_tokens(big, engine.core.figures.pinned_bytes) == big
    )
    assert engine.run({0: [big]})["big"] == answer(big)
    assert engine.core.prefixes.store.num_bytes < snapshots and engine.core.runner.feature_bytes == 0


def test_the_allocation_overhead_of_snapshots_counts_as_evictable():
    engine = driver(30_000, replace(COSTS, snapshot_slack=300), prefix_cache={"enabled": True, "max_gb": 1})
    engine.run({0: [request(f"before{i}", 30, 3, i) for i in range(4)]})
    cache, big = engine.core.prefixes.store, request("big", 10, 1720, 7)
    held = cache.num_bytes + 300 * cache.num_in_memory
    assert cache.num_bytes < engine.core.budget.shortfall_bytes([Row(big)]) <= held, "arrays alone would not suffice"
    assert engine.run({0: [big]})["big"] == answer(big)


def test_evicted_memory_goes_to_a_growing_row_before_a_new_request():
    evictable = Evictables()
    scheduler = tight(2000, evictable, memory={"reserve_tokens": 16}, reserve_tokens=16)
    row = admit(scheduler, spec("row", 20, 200))
    while not scheduler.budget.needs_more_slots(row):
        scheduler.update_decode({row.id: RowOutput((7,))})
    evictable.evictable_bytes = scheduler.budget.free_bytes
    scheduler.add([Row(spec("new", 5, 1))])
    work = step_of(scheduler)
    assert work.decode and not scheduler.budget.needs_more_slots(row)
    assert scheduler.budget.free_bytes >= 0


def test_a_growing_row_gets_memory_by_shrinking_the_next_chunk():
    """The chunk before was as large as the memory was free."""
    costs = MemoryCosts(token_bytes=10, layer_share=0.0, slots_step=16, overshoot=3, token_step_bytes=25.0)
    config = EngineConfig.model_validate({"prefill_chunk_tokens_busy": 16, "prefill_chunk_tokens": 2048})
    budget = MemoryBudget(MemoryNeeds(costs, 12_000, 16), EvictableBytes())
    scheduler = make_scheduler(config, budget=budget)
    row, new = admit(scheduler, spec("row", 20, 200)), Row(spec("new", 600, 10))
    scheduler.add([new])
    assert list(step_of(scheduler).prefill) == [new]
    scheduler.update_prefill(new.prompt, PrefillOutput(16))
    budget.reserve_chunk(new.prompt, 120)  # as while nothing decoded
    while not budget.needs_more_slots(row):
        scheduler.update_decode({row.id: RowOutput((7,))})
    in_use = budget.needs.limit_bytes - budget.accounts.transient_bytes
    for _ in range(OBSERVATIONS):
        budget.observe(in_use, lambda: in_use)
    work = step_of(scheduler)
    assert list(work.prefill) == [new] and not work.drop and not budget.needs_more_slots(row)


def test_a_prompt_beside_other_rows_needs_memory_for_a_larger_chunk_than_alone():
    costs = replace(COSTS, token_step_bytes=40.0)
    books = MemoryBudget(MemoryNeeds(costs, 17_500, 16), EvictableBytes())
    row = Row(request("row", 10, 16))
    small, large = (books.shortfall_bytes([Row(request("new", n, 8))]) for n in (520, 640))
    assert (small, large) == (0, 0), "alone it starts with 16 tokens at a time"
    assert books.reserve([row]) == 0
    books.release_prefill(row)
    assert books.shortfall_bytes([Row(request("new", 520, 8))]) > 0, "64 tokens at a time would not fit"
    assert books.shortfall_bytes([Row(request("new", 520, 8))], without=[row.id]) == 0


def test_a_request_that_never_fits_fails_when_the_engine_is_idle_and_the_next_is_admitted():
    """Its turn came while something ran, long ago; now nothing runs, and there is still no room."""
    clock = Clock()
    scheduler = tight(3000, clock=clock, max_running=4)
    row = admit(scheduler, spec("runs", 20, 100))
    scheduler.add([Row(spec("never", 400, 10))])
    step_of(scheduler)
    clock.advance(100)
    step_of(scheduler)
    scheduler.abort(row.spec.request_id)
    [(row_id, chunk)] = step_of(scheduler).failed.items()
    assert row_id == "never/0" and "more bytes of memory; the budget is 3000 bytes" in (chunk.error or "")
    admit(scheduler, spec("next", 20, 10))


def test_a_row_that_outgrows_the_memory_alone_fails_without_the_request_behind_it():
    scheduler = tight(1000, max_running=4, reserve_tokens=16)
    row = admit(scheduler, spec("long", 20, 500))
    scheduler.add([Row(spec("next", 60, 10))])
    failed: dict[str, Any] = {}
    while not failed:
        scheduler.update_decode({row.id: RowOutput((7,))})
        work = step_of(scheduler)
        failed = work.failed
        assert not work.prefill
    assert set(failed) == {"long/0"}
    assert [one.id for one in step_of(scheduler).prefill] == ["next/0"]


def test_evictable_memory_is_freed_before_a_row_is_preempted():
    clock, evictable = Clock(), Evictables()
    scheduler = tight(20_000, evictable, clock, max_running=8)
    for i in range(6):
        admit(scheduler, replace(spec(f"hog{i}", 28, 100), client="hog"))
    scheduler.add([Row(replace(spec("new", 500, 100), client="other"))])
    evictable.evictable_bytes = scheduler.budget.free_bytes
    work = step_of(scheduler)
    assert [row.id for row in work.prefill] == ["new/0"] and scheduler._stats.num_preempted == 0


def test_preemption_and_eviction_together_admit_a_request_where_neither_is_enough():
    clock, evictable = Clock(), Evictables()
    scheduler = tight(4 * 480 + 1200, evictable, clock, max_running=4)
    for i in range(4):
        admit(scheduler, replace(spec(f"hog{i}", 28, 15), client="hog"))
    evictable.evictable_bytes = scheduler.budget.free_bytes
    scheduler.add([Row(replace(spec("new", 100, 20), client="other"))])
    clock.advance(6)
    assert [row.id for row in step_of(scheduler).prefill] == ["new/0"] and scheduler._stats.num_preempted == 1


def test_a_client_with_its_fair_share_of_rows_preempts_no_other():
    clock = Clock()
    scheduler = tight(10**6, clock=clock, max_running=6)
    for client, num_rows in (("most", 3), ("share", 2), ("little", 1)):
        for i in range(num_rows):
            admit(scheduler, replace(spec(f"{client}{i}"), client=client))
    scheduler.add([Row(replace(spec("more"), client="share"))])
    clock.advance(6)
    assert not step_of(scheduler).prefill and scheduler._stats.num_preempted == 0


def test_a_client_with_most_of_the_memory_is_preempted_for_other_clients_but_not_for_itself():
    for client, displaced in (("big", 0), ("other", 1)):
        clock = Clock()
        scheduler = tight(10_000, clock=clock, max_running=8)
        admit(scheduler, replace(spec("big", 700, 100), client="big"))
        admit(scheduler, replace(spec("small", 20, 20), client="other"))
        clock.advance(20)  # 700 tokens take 0.7 s, as far as is known: the row has run for longer than 20 times that
        scheduler.add([Row(replace(spec("new", 300, 20), client=client))])
        clock.advance(6)
        step_of(scheduler)
        assert scheduler._stats.num_preempted == displaced, client


def test_a_row_is_not_preempted_before_it_has_run_for_twenty_times_its_recompute_time():
    clock = Clock()
    scheduler = tight(10_000, clock=clock, max_running=8)
    admit(scheduler, replace(spec("big", 700, 100), client="big"))
    admit(scheduler, replace(spec("small", 20, 20), client="other"))
    began_s = clock()
    scheduler.add([Row(replace(spec("new", 300, 20), client="other"))])
    for waited_s, num_preempted in ((13.9, 0), (14.1, 1)):
        clock.now_s = began_s + waited_s
        step_of(scheduler)
        assert scheduler._stats.num_preempted == num_preempted, waited_s


def test_eviction_that_cannot_free_enough_evicts_nothing_and_pinned_snapshots_stay():
    engine = driver(30_000, replace(COSTS, snapshot_slack=300), prefix_cache={"enabled": True, "max_gb": 1})
    engine.run({0: [request(f"before{i}", 30, 3, i) for i in range(4)]})
    cache, evictable = engine.core.prefixes.store, engine.core._evictable
    pinned = next(cache.nodes())
    cache.pin(pinned)
    assert evictable.pinned_bytes == cache.pinned_bytes + 300
    before = evictable.num_bytes
    assert not evictable.evict(evictable.evictable_bytes + 1) and evictable.num_bytes == before
    assert (
        evictable.evict(evictable.evictable_bytes) and [*cache.nodes()] == [pinned] and evictable.evictable_bytes == 0
    )


def test_rows_are_not_preempted_where_that_would_not_free_enough_memory():
    clock = Clock()
    scheduler = tight(24_000, clock=clock, max_running=8, scheduler={"ageing_s": 5})
    for i in range(6):
        admit(scheduler, replace(spec(f"hog{i}", 28, 100), client="hog"))
    for i in range(2):
        admit(scheduler, replace(spec(f"fair{i}", 500, 100), client="fair"))
    scheduler.add([Row(replace(spec("new", 1500, 100), client="new"))])
    clock.advance(6)
    assert not step_of(scheduler).prefill and scheduler._stats.num_preempted == 0


@pytest.mark.parametrize(("num_between", "passes"), [(MAX_PASSING - 1, True), (MAX_PASSING, False)])
def test_a_prompt_that_fits_passes_a_few_that_do_not(num_between, passes):
    scheduler = tight(20_000, max_running=32, scheduler={"policy": "fifo"})
    admit(scheduler, spec("running", 500, 100))
    for name in ("head", *(f"large{i}" for i in range(num_between))):
        scheduler.add([Row(spec(name, 1500, 100))])
    scheduler.add([Row(spec("small", 100, 20))])
    assert [row.id for row in step_of(scheduler).prefill] == (["small/0"] if passes else [])


def test_a_prompt_that_does_not_fit_keeps_no_memory_of_the_prefix_cache(monkeypatch):
    scheduler, calls = tight(20_000, max_running=8), []
    admit(scheduler, spec("running", 500, 100))
    for name in ("assign", "revoke"):
        monkeypatch.setattr(scheduler._admission._prefixes, name, lambda prompt, name=name: calls.append(name))
    scheduler.add([Row(spec("large", 1500, 100))])
    assert not step_of(scheduler).prefill and calls == ["assign", "revoke"]


def test_an_urgent_request_preempts_a_row_for_memory_as_for_rows():
    for max_running, budget in ((3, 10**6), (32, 10_000 + 3 * 1040 * 10 + 4000)):
        engine = driver(budget, max_running=max_running, scheduler={"policy": "priority"})
        for i in range(3):
            engine.core.add_request(request(f"low{i}", 30, 1000, i, priority=9))
        for _ in range(6):
            engine.core.step()
        urgent = request("urgent", 30, 300, 9)
        engine.core.add_request(urgent)
        engine.core.step()
        engine.core.step()
        assert engine.tokens["urgent"] and engine.core.stats.num_preempted == 1, budget
        tokens = engine.run({0: []})
        assert all(tokens[f"low{i}"] == answer(request(f"low{i}", 30, 1000, i)) for i in range(3))


def test_started_rows_make_progress_despite_a_steady_stream_of_new_clients():
    clock = Clock()
    engine = driver(10**6, clock=clock, max_running=4)
    for i in range(4):
        engine.core.add_request(request(f"long{i}", 50, 40_000, i, client="long"))
    for _ in range(300):
        engine.core.step()
        clock.advance(0.05)
    num_others, seen = 0, {}
    for step in range(4000):
        while engine.core.scheduler.num_waiting < 6:
            engine.core.add_request(request(f"once{num_others}", 50, 40, client=f"once{num_others}"))
            num_others += 1
        engine.core.step()
        clock.advance(0.05)
        if step == 2000:
            seen = {name: len(engine.tokens[name]) for name in ("long0", "long1", "long2", "long3")}
    assert num_others > 50 and all(len(engine.tokens[name]) > before for name, before in seen.items())


def test_a_prompt_preempted_before_its_first_token_still_times_out_in_the_queue():
    clock = Clock()
    scheduler = tight(
        2100, clock=clock, reserve_tokens=16, prefill_chunk_tokens_busy=16, scheduler={"queue_timeout_s": 10}
    )
    row = admit(scheduler, spec("row", 20, 150))
    new = Row(spec("new", 120, 10))
    scheduler.add([new])
    assert list(step_of(scheduler).prefill) == [new]
    scheduler.update_prefill(new.prompt, PrefillOutput(16))
    clock.advance(8)
    while not scheduler._stats.num_preempted:
        scheduler.update_decode({row.id: RowOutput((7,))})
        assert not step_of(scheduler).failed
    clock.advance(3)
    assert set(step_of(scheduler).failed) == {"new/0"}, "11 s since it came"


def test_a_client_is_not_charged_again_for_recomputing_a_preempted_row():
    scheduler = scheduler_of()
    [row] = start(scheduler, replace(spec("row", 100), client="c"))
    paid = scheduler._shares.served("c")
    scheduler.preempt(row, "growth")
    assert list(step_of(scheduler).prefill) == [row]
    finish_prefill(scheduler, [row])
    assert scheduler._shares.served("c") == paid + 2, "for the one new token"


def test_ageing_raises_one_request_of_a_priority_and_fairness_chooses_which():
    clock = Clock()
    scheduler = scheduler_of("priority", clock, max_running=1)
    start(scheduler, spec("runs"))
    for name, priority, client in (("aged", 1, "a"), *((f"fresh{i}", 1, "b") for i in range(3)), ("urgent", 0, "c")):
        scheduler.add([Row(replace(spec(name, priority=priority), client=client))])
        clock.advance(5.5 * (name == "aged"))
    scheduler._shares.charge("a", num_prompt_tokens=5000)
    order = [one.request_id for one in scheduler.queue.status(scheduler.budget.needs)]
    assert order == ["fresh0", "urgent", "fresh1", "fresh2", "aged"], "one of them, whichever it is"


def test_a_reservation_covers_the_logits_processing_that_the_sampling_parameters_need():
    costs = replace(COSTS, ranked_bytes=100, shaped_bytes=1000)
    books = MemoryBudget(MemoryNeeds(costs, 100_000, 16), EvictableBytes())
    plain = SamplingParams(16)
    asked = {
        0: (plain, replace(plain, temperature=0.5, seed=3)),
        100: (replace(plain, top_p=0.9), replace(plain, top_k=5), replace(plain, min_p=0.1)),
        1000: (replace(plain, presence_penalty=1.0), replace(plain, logprobs=0), replace(plain, min_tokens=3)),
        1100: (replace(plain, top_p=0.9, logit_bias=((5, 1.0),), repetition_penalty=1.1),),
    }
    base = books.needs.min_bytes(books.needs.need([Row(request("r", 20, 16))]))
    for num_bytes, samplings in asked.items():
        for sampling in samplings:
            row = Row(replace(request("r", 20, 16), sampling=sampling))
            assert books.needs.min_bytes(books.needs.need([row])) == base + num_bytes
            assert books.reserve([row]) == 0
            assert books._sampling_bytes == num_bytes
            books.release(row.id)
    assert books.reserved_bytes == 0


@pytest.mark.parametrize(("max_tokens", "is_evicted"), [(40, False), (200, True)])
def test_snapshots_are_evicted_for_a_shared_decode_group_only_for_long_answers(max_tokens, is_evicted):
    """A decode group of its own reads the weights once more per token: 40 tokens of 1 s are worth less than the
    snapshots, 200 are worth more."""
    costs = MemoryCosts(base_bytes=100_000, token_bytes=10, layer_share=0.0, slots_step=16, overshoot=3)
    model, cached = CostModel(), Evictables(price_s=100.0)
    for _ in range(2):  # the first step after a change of rows is ignored
        model.record_step(1, PLAIN, 1.0, 1.0)
    budget = MemoryBudget(MemoryNeeds(costs, 200_000, 1000), cached)
    scheduler = make_scheduler(EngineConfig(max_running=2), None, budget, cached, model)
    admit(scheduler, spec("long", 3000, 200))
    short = Row(spec("short", 2800, max_tokens))
    cached.evictable_bytes = num_cached = budget.free_bytes - 31_000
    assert 0 < budget.group_shortfall_bytes([short]) <= num_cached
    scheduler.add([short])
    assert list(step_of(scheduler).prefill) == [short]
    assert (cached.evictable_bytes < num_cached) is is_evicted
    assert (short.decode_group == 0) is is_evicted
