"""How many requests there may be at once, how long until there is room, and how one, or all, are ended."""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.http.in_flight import InFlight, InFlightRequest, Pace
from engine import retry_after
from engine.errors import Cancelled, InvalidRequest, Overloaded, Unavailable
from tests.support.clock import Clock


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await work

    asyncio.run(bounded())


def room(limit: int = 4, max_choices: int = 4, clock: Clock | None = None) -> InFlight:
    return InFlight(lambda: limit, max_choices, clock or Clock())


@contextmanager
def running(
    requests: InFlight, completion_id: str, num_choices: int = 1, request_id: str = ""
) -> Iterator[InFlightRequest]:
    """A request whose body has been read."""
    with requests.enter(request_id) as entry:
        requests.set_choices(entry, completion_id, num_choices)
        yield entry


# --- how long until there is room ----------------------------------------------------------------------------------


def test_retry_time_follows_the_recent_rate_of_finished_choices():
    clock = Clock()
    pace = Pace(clock)
    for _ in range(5):
        clock.advance(2)
        pace.ended(2)
    assert pace.seconds_until(1) == pytest.approx(1)
    assert pace.seconds_until(20) == pytest.approx(20)


def test_choices_finished_long_ago_do_not_count_in_the_rate():
    clock = Clock()
    pace = Pace(clock)
    pace.ended(1000)
    clock.advance(31)
    for _ in range(3):
        pace.ended(1)
    assert pace.seconds_until(1) == pytest.approx(10)


def test_number_of_recorded_ends_is_bounded_by_the_averaging_window():
    """Also if requests are always in flight and none is refused."""
    clock = Clock()
    pace = Pace(clock)
    for _ in range(3000):
        clock.advance(0.1)
        pace.ended(1)
    assert len(pace._ends) <= 301
    assert pace.seconds_until(50) == pytest.approx(5, rel=0.01)


def test_retry_time_before_the_first_end_is_the_time_waited_so_far_per_choice():
    clock = Clock()
    pace = Pace(clock)
    clock.advance(8)
    assert pace.seconds_until(1) == pytest.approx(8)
    assert pace.seconds_until(2) == pytest.approx(16)


def test_rate_of_finished_choices_starts_anew_after_the_server_was_idle():
    clock = Clock()
    pace = Pace(clock)
    clock.advance(3)
    pace.ended(300)
    pace.begin()
    clock.advance(4)
    assert pace.seconds_until(1) == pytest.approx(4)


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 128)), max_size=30), st.integers(1, 10**6))
def test_retry_after_of_a_full_server_is_between_a_second_and_a_minute(ends: list[tuple[float, int]], num_over: int):
    clock = Clock()
    pace = Pace(clock)
    for later_s, num_choices in ends:
        clock.advance(later_s)
        pace.ended(num_choices)
    assert retry_after.MIN_S <= pace.seconds_until(num_over) <= retry_after.MAX_S
    assert pace.seconds_until(num_over) <= pace.seconds_until(num_over + 1)


# --- how many there may be -----------------------------------------------------------------------------------------


def test_choice_beyond_the_limit_is_refused_until_running_choices_finish():
    async def go() -> None:
        clock = Clock()
        requests = room(4, clock=clock)
        with running(requests, "a"), running(requests, "b", 2):
            clock.advance(6)
            with requests.enter("c") as entry:
                with pytest.raises(Overloaded, match=r"3 choices .* 2 more .* the limit is 4, max_running") as refused:
                    requests.set_choices(entry, "c", 2)
                assert refused.value.retry_after_s == pytest.approx(6)
                with (
                    running(requests, "d"),
                    pytest.raises(Overloaded, match=r"4 choices .* 1 more .* the limit is 4, max"),
                ):
                    requests.enter("e").__enter__()
            assert requests.status() == {"num_in_flight": 3, "num_refused": 2, "is_draining": False}
        with running(requests, "c", 4):
            assert requests.status()["num_in_flight"] == 4
        assert requests.status() == {"num_in_flight": 0, "num_refused": 2, "is_draining": False}

    run(go())


def test_capacity_follows_the_limit_of_the_engines():
    async def go() -> None:
        limit = 1
        requests = InFlight(lambda: limit, 1)
        with running(requests, "a"):
            with pytest.raises(Overloaded):
                requests.enter("b").__enter__()
            limit = 2
            with running(requests, "b"):
                limit = 1
                with pytest.raises(Overloaded):
                    requests.enter("c").__enter__()

    run(go())


def test_request_counts_as_in_flight_only_after_its_body_has_been_read():
    async def go() -> None:
        requests = room(1)
        with requests.enter("slow") as slow:
            with running(requests, "quick"), pytest.raises(Overloaded):
                requests.set_choices(slow, "slow", 1)
            requests.set_choices(slow, "slow", 1)
            assert requests.status()["num_in_flight"] == 1

    run(go())


def test_client_address_is_limited_to_its_share_of_the_capacity():
    async def go() -> None:
        requests = InFlight(lambda: 8, 8, Clock(), max_share_per_address=0.25)
        with requests.enter("a", "10.0.0.1") as entry:
            requests.set_choices(entry, "a", 2)
            with pytest.raises(
                Overloaded, match=r"2 choices for this address .* is 2, 0.25 of 8 \(http.max_share_per_addr"
            ):
                requests.enter("b", "10.0.0.1").__enter__()
            with requests.enter("c", "10.0.0.2") as other:
                requests.set_choices(other, "c", 4)  # the first request of an address may be larger than its share
            with running(requests, "local", 6):
                assert requests.status() == {"num_in_flight": 8, "num_refused": 1, "is_draining": False}

    run(go())


def test_request_for_more_choices_than_max_running_is_invalid():
    async def go() -> None:
        requests = room(limit=100, max_choices=4)
        with (
            requests.enter("a") as entry,
            pytest.raises(InvalidRequest, match=r"n is 5; it must be between 1 and 4 \(max_running\)"),
        ):
            requests.set_choices(entry, "a", 5)

    run(go())


def test_failed_request_frees_its_capacity():
    async def go() -> None:
        requests = room(4)
        with pytest.raises(ZeroDivisionError), running(requests, "a", 4):
            raise ZeroDivisionError
        with pytest.raises(ZeroDivisionError), requests.enter("b"):
            raise ZeroDivisionError
        with running(requests, "c", 4):
            assert requests.status()["num_in_flight"] == 4

    run(go())


def test_retry_time_counts_finished_answers_and_no_refused_requests():
    """Not from requests that were refused when they had been read."""

    async def go() -> None:
        clock = Clock()
        requests = room(8, clock=clock)
        with running(requests, "long"):
            for _ in range(4):
                with running(requests, "short"):
                    clock.advance(5)
                with requests.enter("junk"):
                    pass
            assert requests._pace.seconds_until(1) == pytest.approx(5)

    run(go())


def test_idle_hour_does_not_count_in_the_retry_time():
    async def go() -> None:
        clock = Clock()
        requests = room(1, clock=clock)
        with running(requests, "early"):
            clock.advance(1)
        clock.advance(3600)
        with running(requests, "late"):
            clock.advance(3)
            assert requests._pace.seconds_until(1) == pytest.approx(3)

    run(go())


# --- how one is ended ----------------------------------------------------------------------------------------------


def test_cancel_by_id_ends_all_requests_with_the_id_and_no_other_request():
    async def go() -> None:
        requests = room()
        with (
            running(requests, "1", request_id="x") as one,
            requests.enter("x") as two,
            running(requests, "3", request_id="y") as three,
        ):
            assert requests.cancel("x")
            assert isinstance(one.cancelled.result(), Cancelled)
            assert isinstance(two.cancelled.result(), Cancelled)
            assert not three.cancelled.done()
            assert requests.cancel("3") and three.cancelled.done()

    run(go())


def test_unknown_cancelled_answered_or_finished_request_cannot_be_cancelled():
    async def go() -> None:
        requests = room()
        with running(requests, "a"), running(requests, "b") as answered:
            assert not requests.cancel("c")
            assert requests.cancel("a")
            assert not requests.cancel("a")
            answered.mark_complete()
            assert not requests.cancel("b")
            assert not answered.cancelled.done()
        assert not requests.cancel("a")

    run(go())


# --- how all are ended ---------------------------------------------------------------------------------------------


def test_draining_server_refuses_requests_and_is_drained_with_its_last_answer():
    async def go() -> None:
        requests = room()
        with running(requests, "a") as entry:
            draining = asyncio.ensure_future(requests.drain(60))
            await asyncio.sleep(0)
            with pytest.raises(Unavailable, match="shutting down") as refused:
                requests.enter("b").__enter__()
            assert refused.value.retry_after_s >= 1
            assert requests.status() == {"num_in_flight": 1, "num_refused": 1, "is_draining": True}
            assert not entry.cancelled.done() and not draining.done()
        await draining

    run(go())


def test_drain_ends_requests_whose_body_is_still_being_sent():
    async def go() -> None:
        requests = room()
        with requests.enter("sending") as entry:
            draining = asyncio.ensure_future(requests.drain(60))
            error = await entry.cancelled
            assert isinstance(error, Unavailable) and "accepts no new requests" in error.message
            with pytest.raises(Unavailable):
                requests.set_choices(entry, "just there", 1)
        await draining
        assert requests.status()["num_refused"] == 2

    run(go())


def test_answer_that_outlasts_the_drain_is_ended_with_the_reason():
    async def go() -> None:
        requests = room()
        draining = None
        with running(requests, "a") as entry, running(requests, "b") as answered:
            answered.mark_complete()
            draining = asyncio.ensure_future(requests.drain(0.05))
            error = await entry.cancelled
            assert isinstance(error, Unavailable)
            assert "shutting down; the request did not finish within 0.05 s" in error.message
            assert not draining.done() and not answered.cancelled.done()
        await draining

    run(go())


def test_repeated_drain_waits_for_the_first_drain():
    async def go() -> None:
        requests = room()
        with running(requests, "a") as entry:
            first = asyncio.ensure_future(requests.drain(60))
            await asyncio.sleep(0)
            second = asyncio.ensure_future(requests.drain(0))
            third = asyncio.ensure_future(requests.drain(0))
            await asyncio.sleep(0.02)
            third.cancel()
            assert not second.done() and not entry.cancelled.done()
        await first
        await second

    run(go())


def test_idle_server_is_drained_at_once():
    run(room().drain(60))
