"""Who runs when: pure, no model."""

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.core.batch import PrefillOutput
from engine.core.request import Request, RequestState
from engine.core.scheduler import Scheduler
from engine.core.stats import Stats
from engine.protocol import EngineRequest, FinishReason, SamplingParams

STOP = 2


def request(request_id: str, num_prompt: int = 4, max_tokens: int = 3) -> Request:
    return Request(
        EngineRequest(request_id, np.zeros(num_prompt, np.int32), SamplingParams(max_tokens), stop_token_ids=(STOP,))
    )


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler(EngineConfig(max_running=2, prefill_chunk_tokens=100, prefill_chunk_tokens_busy=20), Stats())


def start(scheduler: Scheduler, new: Request) -> None:
    """Through the queue and its whole prefill, to a row with one token."""
    scheduler.add(new)
    while new.state in (RequestState.WAITING, RequestState.PREFILL):
        work = scheduler.schedule()
        assert work.prefill is new
        scheduler.update_prefill(new, PrefillOutput(new.num_prompt_tokens, first_token=7))


def test_first_come_first_served_one_prompt_at_a_time(scheduler):
    a, b = request("a"), request("b")
    scheduler.add(a)
    scheduler.add(b)
    assert scheduler.schedule().prefill is a
    scheduler.update_prefill(a, PrefillOutput(2))
    assert scheduler.schedule().prefill is a, "until it is done"
    scheduler.update_prefill(a, PrefillOutput(2, first_token=7))
    assert scheduler.schedule().prefill is b


def test_chunks_are_small_while_rows_decode_and_large_while_none_does(scheduler):
    a, b = request("a"), request("b")
    scheduler.add(a)
    work = scheduler.schedule()
    assert (work.decode, work.max_prefill_tokens) == (False, 100)
    scheduler.update_prefill(a, PrefillOutput(4, first_token=7))
    scheduler.add(b)
    work = scheduler.schedule()
    assert (work.decode, work.prefill, work.max_prefill_tokens) == (True, b, 20)


def test_a_full_batch_keeps_the_next_request_waiting_until_a_row_leaves(scheduler):
    a, b, c = request("a"), request("b"), request("c")
    start(scheduler, a)
    start(scheduler, b)
    scheduler.add(c)
    assert scheduler.schedule().prefill is None
    assert scheduler.num_waiting == 1
    scheduler.abort("a")
    work = scheduler.schedule()
    assert work.drop == ["a"] and work.prefill is c


def test_a_stop_token_ends_the_row_and_is_not_given_out(scheduler):
    a = request("a")
    start(scheduler, a)
    chunk = scheduler.update_decode({"a": (STOP,)})["a"]
    assert chunk.token_ids == () and chunk.finish_reason is FinishReason.STOP
    assert scheduler.schedule().drop == ["a"]


def test_tokens_after_the_end_are_not_given_out(scheduler):
    a, b = request("a", max_tokens=3), request("b", max_tokens=9)
    start(scheduler, a)
    start(scheduler, b)
    chunks = scheduler.update_decode({"a": (5, 6, 8), "b": (5, STOP, 6)})
    assert chunks["a"].token_ids == (5, 6) and chunks["a"].finish_reason is FinishReason.LENGTH
    assert chunks["b"].token_ids == (5,) and chunks["b"].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("when", ["waiting", "prefill", "running"])
def test_an_aborted_request_is_gone_wherever_it_is(scheduler, when):
    a, b = request("a"), request("b")
    if when == "running":
        start(scheduler, a)
    elif when == "prefill":
        scheduler.add(a)
        scheduler.schedule()
    else:
        scheduler.add(b)
        scheduler.schedule()
        scheduler.add(a)
    scheduler.abort("a")
    scheduler.abort("a")
    scheduler.abort("never heard of")
    work = scheduler.schedule()
    assert work.drop == ([] if when == "waiting" else ["a"])
    assert work.prefill is not a and scheduler.num_waiting == 0
    assert scheduler.update_decode({"a": (7,)}) == {}, "a token that was on its way is dropped"


def test_without_work_there_is_none(scheduler):
    assert not scheduler.has_work
    start(scheduler, request("a", max_tokens=1))
    assert scheduler.has_work, "the row must still be dropped"
    scheduler.schedule()
    assert not scheduler.has_work
