"""The order of requests among clients, waiting limits, and the errors about them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.core.virtual_token_counter import MAX_IDLE_CLIENTS, VirtualTokenCounter
from engine.protocol import EngineRequest, FinishReason, SamplingParams
from tests.engine.core.rows import admitted, out, rows_of, scheduler_of, spec, start, step_of
from tests.support.clock import Clock
from tests.support.driver import Driver
from tests.support.fake_runner import FakeRunner, answer


def of(client: str, name: str, **more: Any) -> EngineRequest:
    return replace(spec(name, **more), client=client)


def test_waiting_clients_are_served_in_turns_regardless_of_arrival_order():
    scheduler = scheduler_of(max_running=1)
    for i in range(6):
        scheduler.add(rows_of(of("crowd", f"crowd{i}")))
    for i in range(2):
        scheduler.add(rows_of(of("single", f"single{i}")))
    assert admitted(scheduler)[:4] == ["crowd0", "single0", "crowd1", "single1"]


def test_a_client_that_has_received_fewer_tokens_is_served_first():
    scheduler = scheduler_of(max_running=3)
    [row] = start(scheduler, of("greedy", "a"))
    start(scheduler, of("modest", "b"))
    scheduler.update_decode({row.id: out(*range(3, 13))})
    for name in ("greedy", "modest"):
        scheduler.add(rows_of(of(name, name)))
    assert admitted(scheduler) == ["modest", "greedy"]


def test_a_preempted_row_goes_first_only_after_it_has_waited_long():
    clock = Clock()
    scheduler = scheduler_of(clock=clock, max_running=2)
    [row] = start(scheduler, of("greedy", "begun"))
    start(scheduler, of("modest", "other"))
    scheduler.update_decode({row.id: out(*range(3, 13))})
    scheduler.preempt(row, "growth")
    scheduler.add(rows_of(of("modest", "new")))
    assert [one.request_id for one in scheduler.queue.status(scheduler.budget.needs)] == ["new", "begun"]
    clock.advance(6)
    assert [one.request_id for one in scheduler.queue.status(scheduler.budget.needs)] == ["begun", "new"]


def test_a_new_or_returning_client_starts_level_with_the_active_clients():
    shares = VirtualTokenCounter()
    shares.opened("early", 1)
    shares.charge("early", num_output_tokens=1000)
    shares.opened("late", 1)
    assert shares.served("late") == shares.served("early") == 2000
    shares.charge("early", num_prompt_tokens=10)
    shares.closed("late")
    shares.opened("late", 1)
    assert shares.served("late") == 2010
    shares.closed("early")
    shares.closed("late")
    assert shares.num_active == 0 and shares.served("early") == 0


def test_idle_clients_are_forgotten_beyond_a_limit():
    shares = VirtualTokenCounter()
    shares.opened("stays", 1)
    for i in range(3 * MAX_IDLE_CLIENTS):
        shares.opened(str(i), 1)
        shares.closed(str(i))
    assert len(shares._served) <= MAX_IDLE_CLIENTS + 1


@pytest.mark.parametrize("fairness", ["client", "off"])
def test_a_single_client_is_served_in_the_order_of_the_policy(fairness):
    scheduler = scheduler_of(scheduler={"fairness": fairness})
    for name in "abc":
        scheduler.add(rows_of(of("one", name)))
    assert admitted(scheduler) == ["a", "b", "c"]


def test_priority_comes_before_fairness():
    scheduler = scheduler_of("priority", max_running=1)
    for client, name, priority in (("a", "a0", 0), ("a", "a1", 0), ("b", "b", 1)):
        scheduler.add(rows_of(of(client, name, priority=priority)))
    assert admitted(scheduler) == ["a0", "a1", "b"]


def test_a_client_with_all_rows_is_preempted_for_a_client_that_waits_long():
    clock = Clock()
    scheduler = scheduler_of(clock=clock, max_running=4)
    rows = [start(scheduler, of("hog", f"h{i}"))[0] for i in range(4)]
    scheduler.add(rows_of(of("other", "o")))
    assert not step_of(scheduler).prefill, "not at once"
    clock.advance(6)
    work = step_of(scheduler)
    assert [row.spec.request_id for row in work.prefill] == ["o"] and work.drop == [rows[-1].id]


def test_rows_are_not_preempted_for_more_than_a_fair_share_or_when_fairness_is_off():
    for fairness, held in (("client", 2), ("off", 0)):
        clock = Clock()
        scheduler = scheduler_of(clock=clock, max_running=4, scheduler={"fairness": fairness})
        for i in range(4):
            start(scheduler, of("other" if i < held else "hog", f"r{i}"))
        scheduler.add(rows_of(of("other", "more")))
        clock.advance(6)
        assert not step_of(scheduler).prefill and scheduler._stats.num_preempted == 0


def test_clients_that_preempt_one_another_get_their_own_tokens():
    clock = Clock()
    config = EngineConfig.model_validate({"max_running": 3, "scheduler": {"ageing_s": 0.5}})
    driver = Driver(FakeRunner(), config, clock)
    prompt = np.arange(8, dtype=np.int32)
    requests = [
        EngineRequest(f"{client}{i}", prompt, SamplingParams(40, seed=i + 10 * ord(client)), (), client=client)
        for client, count in (("a", 8), ("b", 3), ("c", 1))
        for i in range(count)
    ]
    for request in requests:
        driver.core.add_request(request)
    while driver.core.has_work:
        clock.advance(0.1)
        driver.core.step()
    assert {r.request_id: driver.tokens[r.request_id] for r in requests} == {r.request_id: answer(r) for r in requests}
    assert driver.core.stats.num_preempted > 0


def test_a_request_that_has_not_started_expires_after_the_queue_timeout():
    clock = Clock()
    scheduler = scheduler_of(clock=clock, max_running=2, scheduler={"queue_timeout_s": 10})
    [row] = start(scheduler, spec("running", n=1))
    scheduler.add(rows_of(spec("wide", n=2)))
    clock.advance(9)
    scheduler.add(rows_of(spec("late", n=2)))
    assert step_of(scheduler).failed == {} and scheduler.num_waiting == 2
    clock.advance(1)
    ended = step_of(scheduler).failed
    assert set(ended) == {"wide/0", "wide/1"} and scheduler.num_waiting == 1 and scheduler._stats.num_expired == 2
    for chunk in ended.values():
        assert chunk.finish_reason is FinishReason.EXPIRED and chunk.retry_after_s
        assert chunk.error == "waited 10 s in the queue; the limit is 10 s (queue_timeout_s)"
    scheduler.abort("wide")
    assert scheduler._stats.num_aborted == 0
    scheduler.preempt(row, "growth")
    clock.advance(1000)
    assert set(step_of(scheduler).failed) == {"late/0", "late/1"}, "who has begun to answer may wait for ever"


def test_the_queue_reports_positions_and_expected_waits():
    clock = Clock()
    scheduler = scheduler_of(clock=clock, max_running=1)
    for name in "abcd":
        scheduler.add(rows_of(spec(name)))
    first = scheduler.queue.status(scheduler.budget.needs)[0]
    assert first.expected_wait_s is None, "no request has left the queue yet"
    for _ in range(2):
        [row] = step_of(scheduler).prefill
        scheduler.abort(row.spec.request_id)
        clock.advance(4)
    shown = scheduler.queue.status(scheduler.budget.needs)
    assert [(one.request_id, one.position, one.waited_s) for one in shown] == [("c", 1, 8.0), ("d", 2, 8.0)]
    assert [one.expected_wait_s for one in shown] == [4.0, 8.0] and scheduler.expected_wait_s() == 12.0
    for name in "cd":
        scheduler.abort(name)
    assert scheduler.queue.status(scheduler.budget.needs) == () and scheduler.expected_wait_s() == 0.0
