"""Preemption of rows by more urgent requests: no token is repeated or lost, and rows do not thrash."""

import random

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.core.cost_model import GUESSED_S_PER_TOKEN
from engine.core.row import Row, RowState
from engine.core.runner import PrefillOutput
from engine.core.scheduler import Scheduler
from engine.protocol import EngineRequest, FinishReason, SamplingParams
from tests.engine.core.rows import finish_prefill, out, rows_of, scheduler_of, spec, start, step_of
from tests.support.clock import Clock
from tests.support.driver import Driver
from tests.support.fake_runner import STOP, FakeRunner, answer

PRIORITY = EngineConfig.model_validate({"max_running": 2, "scheduler": {"policy": "priority"}})


def request(
    request_id: str, priority: int = 0, max_tokens: int = 20, n: int = 1, num_prompt: int = 30
) -> EngineRequest:
    sampling = SamplingParams(max_tokens, seed=sum(request_id.encode()))
    prompt = np.arange(num_prompt, dtype=np.int32)
    return EngineRequest(request_id, prompt, sampling, (STOP,), num_choices=n, priority=priority)


def test_an_urgent_request_preempts_the_latest_of_the_least_urgent_rows():
    scheduler = scheduler_of("priority", max_running=3)
    for name, priority in {"a": 5, "b": 5, "c": 4}.items():
        start(scheduler, spec(name, priority=priority))
    urgent = rows_of(spec("urgent"))
    scheduler.add(urgent)
    work = step_of(scheduler)
    assert work.drop == ["b/0"] and list(work.prefill) == urgent
    assert (scheduler.num_running, scheduler.num_waiting, scheduler._stats.num_preempted) == (3, 1, 1)


def start_prompt(scheduler: Scheduler, request: EngineRequest, num_tokens: int) -> list[Row]:
    """Admit a request and compute so many tokens of its prompt."""
    rows = rows_of(request)
    scheduler.add(rows)
    assert list(step_of(scheduler).prefill) == rows
    scheduler.update_prefill(rows[0].prompt, PrefillOutput(num_tokens, None))
    return rows


def test_an_urgent_request_preempts_a_less_urgent_prompt_in_progress():
    scheduler = scheduler_of("priority", max_running=3)
    start(scheduler, spec("decoding", priority=4))
    wide = start_prompt(scheduler, spec("wide", num_prompt=9000, priority=5, n=2), 2000)
    scheduler.add(rows_of(spec("equal", priority=5)))
    urgent = rows_of(spec("urgent", priority=3))
    assert not step_of(scheduler).drop
    scheduler.add(urgent)
    work = step_of(scheduler)
    assert sorted(work.drop) == ["wide/0", "wide/1"] and list(work.prefill) == urgent
    assert [row.state for row in wide] == [RowState.WAITING] * 2 and wide[0].prompt.num_prefilled == 0
    assert scheduler._stats.num_preempted == 2
    assert [waiting.request_id for waiting in scheduler.queue.status(scheduler.budget.needs)] == ["wide", "equal"]


def test_a_restarted_prompt_is_preempted_only_after_a_wait_that_doubles_with_each_restart():
    clock = Clock()
    scheduler = scheduler_of("priority", clock, max_running=1)
    low = start_prompt(scheduler, spec("low", num_prompt=90_000, priority=5), 5000)
    for num_restarts in range(1, 5):
        name = f"urgent {num_restarts}"
        urgent = rows_of(spec(name, num_prompt=7000 if num_restarts == 2 else 100))
        scheduler.add(urgent)
        wait_s = GUESSED_S_PER_TOKEN * (7000 if num_restarts == 2 else 5000) * 2 ** (num_restarts - 1)
        if num_restarts > 1:  # the first time it has no right to its place yet
            clock.advance(0.9 * wait_s)
            assert not step_of(scheduler).drop
            clock.advance(0.2 * wait_s)
        work = step_of(scheduler)
        assert work.drop == ["low/0"] and list(work.prefill) == urgent
        assert low[0].num_restarts == num_restarts
        scheduler.abort(name)
        assert list(step_of(scheduler).prefill) == low
        scheduler.update_prefill(low[0].prompt, PrefillOutput(5000, None))


def test_preempted_prompt_without_computed_tokens_counts_no_restart():
    scheduler = scheduler_of("priority", max_running=1)
    low, urgent = rows_of(spec("low", num_prompt=9000, priority=5)), rows_of(spec("urgent", priority=3))
    scheduler.add(low)
    assert list(step_of(scheduler).prefill) == low
    scheduler.add(urgent)
    work = step_of(scheduler)
    assert work.drop == ["low/0"] and list(work.prefill) == urgent
    assert low[0].num_restarts == 0


@pytest.mark.parametrize(("policy", "priority"), [("priority", 4), ("priority", 5), ("fifo", 0), ("shortest_first", 0)])
def test_a_row_is_not_preempted_for_an_equally_urgent_request_or_under_another_policy(policy, priority):
    scheduler = scheduler_of(policy)
    start(scheduler, spec("a", priority=4))
    start(scheduler, spec("b", priority=4))
    scheduler.add(rows_of(spec("c", num_prompt=1, priority=priority)))
    assert not step_of(scheduler).prefill and scheduler._stats.num_preempted == 0


def test_waiting_long_does_not_make_a_request_urgent_enough_to_preempt():
    clock = Clock()
    scheduler = scheduler_of("priority", clock, max_running=1)
    start(scheduler, spec("a", priority=1))
    scheduler.add(rows_of(spec("b", priority=1)))
    clock.advance(1e6)
    assert not step_of(scheduler).prefill


def test_rows_are_not_preempted_where_the_request_would_still_not_fit():
    scheduler = scheduler_of("priority", max_running=3)
    for name, priority in {"a": 5, "b": 0, "c": 5}.items():
        start(scheduler, spec(name, priority=priority))
    scheduler.add(rows_of(spec("wide", n=3)))
    assert not step_of(scheduler).prefill and scheduler._stats.num_preempted == 0
    scheduler.abort("b")
    work = step_of(scheduler)
    assert len(work.prefill) == 3 and sorted(work.drop) == ["a/0", "b/0", "c/0"]


def test_a_request_with_several_choices_preempts_only_the_rows_it_lacks():
    scheduler = scheduler_of("priority", max_running=3)
    start(scheduler, spec("a", priority=5))
    wide = rows_of(spec("wide", n=3, priority=1))
    scheduler.add(wide)
    step_of(scheduler)
    assert scheduler._stats.num_preempted == 1 and [row.state for row in wide] == [RowState.PREFILL] * 3


def test_an_urgent_request_does_not_take_a_free_row_that_the_head_of_the_queue_waits_for():
    clock = Clock()
    scheduler = scheduler_of("priority", clock, max_running=3)
    start(scheduler, spec("a", priority=0))
    scheduler.add(rows_of(spec("wide", n=3, priority=1)))
    clock.advance(60)
    scheduler.add(rows_of(spec("late", priority=0)))
    assert not step_of(scheduler).prefill and scheduler._stats.num_preempted == 0


def test_a_preempted_row_waits_at_the_head_of_its_priority():
    clock = Clock()
    scheduler = scheduler_of("priority", clock, max_running=1)
    [row] = start(scheduler, spec("a", priority=5))
    for name, priority in {"older equal": 5, "better": 4}.items():
        scheduler.add(rows_of(spec(name, priority=priority)))
    clock.advance(1)
    scheduler.preempt(row, "growth")
    assert row.state is RowState.WAITING and row.prompt.num_prefilled == 0
    order = [waiting.request_id for waiting in scheduler.queue.status(scheduler.budget.needs)]
    assert order == ["better", "a", "older equal"]


def test_tokens_of_a_preempted_row_from_the_step_before_are_ignored():
    scheduler = scheduler_of(max_running=2)
    [row] = start(scheduler, spec("a"))
    start(scheduler, spec("b"))
    scheduler.preempt(row, "growth")
    assert set(scheduler.update_decode({"a/0": out(9), "b/0": out(9)})) == {"b/0"}
    assert row.output_token_ids == [7]
    work = step_of(scheduler)
    assert work.drop == ["a/0"] and list(work.prefill) == [row], "it is dropped before it is prefilled again"
    assert row.num_tokens == len(row.prompt_token_ids) == 5
    finish_prefill(scheduler, [row])
    assert row.output_token_ids == [7, 7]


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_preempted_row_continues_without_repeated_or_lost_tokens(num_drafts):
    config = PRIORITY.model_copy(update={"prefill_chunk_tokens_busy": 16})
    runner = FakeRunner(num_drafts, accepts=lambda seed, position: position % 3 > 0)
    driver = Driver(runner, config)
    slow = [request("slow", 9, 60), request("wide", 7, 50)]
    urgent = {step: [request(f"urgent {step}", 0, 8)] for step in (6, 10, 30)}
    tokens = driver.run({0: slow, **urgent})
    for each in (*slow, *(r for rs in urgent.values() for r in rs)):
        assert tokens[each.request_id] == answer(each), each.request_id
    assert driver.core.stats.num_preempted >= 2
    assert set(driver.finish.values()) == {FinishReason.LENGTH} and not runner.rows


def test_a_preempted_row_can_be_aborted():
    scheduler = scheduler_of("priority", max_running=1)
    start(scheduler, spec("a", priority=5))
    scheduler.add(rows_of(spec("urgent")))
    step_of(scheduler)
    scheduler.abort("a")
    assert scheduler.num_waiting == 0 and step_of(scheduler).drop == []


def test_a_row_that_waited_long_is_not_preempted_for_a_while():
    for waited_s in (1.0, 6.0):
        clock = Clock()
        scheduler = scheduler_of("priority", clock, max_running=1, scheduler={"ageing_s": 5.0})
        start(scheduler, spec("first", priority=-1))
        low = rows_of(spec("low", priority=3))
        scheduler.add(low)
        clock.advance(waited_s)
        scheduler.abort("first")
        assert list(step_of(scheduler).prefill) == low
        finish_prefill(scheduler, low)
        scheduler.add(rows_of(spec("urgent")))
        assert bool(step_of(scheduler).prefill) == (waited_s < 5.0)
        clock.advance(5.0)
        assert step_of(scheduler).prefill[0].spec.request_id == "urgent", "but not for ever"


def test_a_row_that_was_preempted_is_not_preempted_again_at_once():
    clock = Clock()
    scheduler = scheduler_of("priority", clock, max_running=1, scheduler={"ageing_s": 5.0})
    [poor] = start(scheduler, spec("poor", priority=3))
    start(scheduler, spec("urgent"))
    assert poor.state is RowState.WAITING
    scheduler.abort("urgent")
    assert list(step_of(scheduler).prefill) == [poor]
    finish_prefill(scheduler, [poor])
    scheduler.add(rows_of(spec("urgent too")))
    assert not step_of(scheduler).prefill
    clock.advance(5.0)
    assert step_of(scheduler).prefill and scheduler._stats.num_preempted == 2


def test_a_low_priority_row_finishes_under_a_stream_of_urgent_requests_with_few_preemptions():
    clock = Clock()
    scheduler = scheduler_of("priority", clock, max_running=1, scheduler={"ageing_s": 2.0})
    [poor] = start(scheduler, spec("poor", priority=5, max_tokens=100))
    for second in range(300):
        scheduler.add(rows_of(spec(f"urgent {second}", max_tokens=11)))
        for _ in range(10):
            clock.advance(0.1)
            work = step_of(scheduler)
            scheduler.update_decode({row_id: out(8) for row_id in scheduler._running})
            if work.prefill:
                finish_prefill(scheduler, list(work.prefill))
    assert poor.state is RowState.FINISHED
    assert scheduler._stats.num_preempted <= 6


def test_answers_are_whole_and_rows_freed_after_random_arrivals_aborts_and_preemptions():
    for seed in range(5):
        rng = random.Random(seed)
        requests = [
            request(f"{seed}-{i}", rng.randint(0, 3), rng.randint(1, 30), rng.randint(1, 3), rng.randint(1, 60))
            for i in range(30)
        ]
        arrivals: dict[int, list[EngineRequest]] = {}
        for each in requests:
            arrivals.setdefault(rng.randint(0, 80), []).append(each)
        aborted = {rng.choice(requests).request_id for _ in range(6)}
        aborts = {rng.randint(0, 120): [request_id] for request_id in aborted}
        runner = FakeRunner(3, accepts=lambda seed, position: (seed + position) % 4 > 0)
        config = PRIORITY.model_copy(update={"max_running": 5, "prefill_chunk_tokens_busy": 16})
        driver = Driver(runner, config)
        tokens = driver.run(arrivals, aborts)
        for each in requests:
            for index in range(each.num_choices):
                name = f"{each.request_id}/{index}" if index else each.request_id
                whole = answer(each, index)
                if each.request_id in aborted:
                    assert tokens.get(name, []) == whole[: len(tokens.get(name, []))]
                else:
                    assert tokens[name] == whole
        assert driver.core.stats.num_preempted > 0
        assert not runner.rows and not runner.prompts and not driver.core.scheduler._rows
