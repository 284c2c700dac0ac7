"""Quotes and bookings through AsyncEngine: refusals, and bookings that end when their requests arrive."""

import asyncio
from dataclasses import replace

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.placement import ConversationKeys, Question, Quote
from engine.protocol import EngineRequest
from tests.engine.test_async_engine import CountingRunner, collect, request, run

KEYS = ConversationKeys(1, 2, (3,))


def question(request_id: str = "r", num_tokens: int = 3, **fields) -> Question:
    return replace(Question(request_id, KEYS, num_tokens), **fields)


def keyed(request_id: str, max_tokens: int = 10) -> EngineRequest:
    return replace(request(request_id, max_tokens), keys=KEYS)


def test_idle_engine_quotes_no_wait():
    async def test(engine):
        quote = engine.quote(question())
        assert quote.refusal is None and quote.wait_s == quote.slowdown_s == quote.crowding_s == 0
        assert await collect(engine, keyed("r")) == list(range(10)), "a request without a booking is served, too"

    run(test)


def test_refusals_say_why():
    async def test(engine):
        assert engine.quote(question(num_tokens=2_000)).refusal == "context"
        assert engine.quote(question(num_tokens=1_001)).refusal is None, "the number of tokens is an estimate"
        assert engine.quote(question(has_images=True)).refusal == "media"
        assert engine.quote(question(num_choices=4)).refusal == "queue_full"
        assert engine.book(question(num_choices=4)) == Quote(refusal="queue_full")
        await engine.drain(1.0)
        assert engine.quote(question()).refusal == "draining"

    run(test, max_running=2, max_queue=1)


def test_engine_that_loads_or_has_ended_is_not_ready():
    async def main() -> None:
        engine = AsyncEngine(EngineConfig(), lambda config, progress: CountingRunner())
        assert engine.quote(question()).refusal == "not_ready"
        await engine.wait_ready()
        assert engine.quote(question()).refusal is None
        await engine.shutdown()
        assert engine.book(question()) == Quote(refusal="not_ready")

    asyncio.run(main())


def test_bookings_fill_the_queue_until_their_requests_have_ended():
    async def test(engine):
        assert engine.book(question("a")) is None and engine.book(question("b")) is None
        assert engine.quote(question("c")).refusal == "queue_full"
        streams = [asyncio.ensure_future(collect(engine, keyed(name, 300))) for name in "ab"]
        await asyncio.sleep(0.05)
        assert engine.quote(question("c")).refusal == "queue_full", "each counts once, as a booking or as a stream"
        assert engine._thread.worker.quoter.num_booked == 0
        await asyncio.gather(*streams)
        assert engine.quote(question("c")).refusal is None
        assert engine._thread.worker.quoter.bookings.open() == []

    run(test, CountingRunner(step_s=0.002), max_running=1, max_queue=1)


def test_booking_of_a_request_that_is_given_up_before_it_arrives_ends():
    async def test(engine):
        assert engine.book(question("a")) is None
        stream = engine.generate(keyed("a"))
        task = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await stream.aclose()
        assert engine._thread.worker.quoter.bookings.open() == []

    run(test)
