"""A request is in flight from its headers on: while its body comes it takes up room, and can be ended."""

import asyncio
import json

import pytest

from deployments.http.generation import TextDelta
from engine.errors import Overloaded


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


def sending(connect, config=None):
    """A connection of which half of the body is there, and its task."""
    connection = connect({"x-request-id": "mine"}, config)
    connection.is_slow = True
    return connection, asyncio.create_task(connection.run())


def error_of(connection):
    return connection.status, json.loads(connection.body)["error"]["code"]


def test_full_server_refuses_a_request_without_reading_its_body(connect, backend):
    async def talk():
        backend.capacity = 0
        connection = connect()
        await connection.run()
        assert error_of(connection) == (429, "overloaded")
        assert connection.num_received == 0

    asyncio.run(talk())


def test_unread_request_takes_no_capacity_from_a_complete_request(connect, backend):
    async def talk():
        backend.capacity = 1
        slow, task = sending(connect)
        await until(lambda: slow.num_received == 2)
        assert backend.in_flight.status()["num_in_flight"] == 0
        other = connect()
        await other.run()
        assert other.status == 200
        slow.goes_on.set()
        await task
        assert slow.status == 200 and len(backend.requests) == 2
        assert backend.in_flight.status()["num_in_flight"] == 0

    asyncio.run(talk())


@pytest.mark.parametrize(
    ("end", "status", "code"),
    [("cancel", 499, "request_cancelled"), ("drain", 503, "unavailable"), ("time", 408, "request_timeout")],
)
def test_unread_request_ends_by_cancel_drain_or_timeout(connect, backend, end, status, code):
    async def talk():
        config = {"body_grace_s": 0.05, "min_body_bytes_per_s": 10**9} if end == "time" else {}
        connection, task = sending(connect, config=config)
        await until(lambda: connection.num_received == 2)
        async with asyncio.timeout(60):
            if end == "cancel":
                assert await backend.cancel("mine")
            elif end == "drain":
                await backend.in_flight.drain(600)
            await task
        assert error_of(connection) == (status, code)
        retry_after = dict(connection.sent[0]["headers"]).get(b"retry-after")
        assert retry_after == (b"5" if end == "drain" else None)
        named = "arrived too slowly" in json.loads(connection.body)["error"]["message"]
        assert named == (end == "time")
        assert backend.requests == []
        assert backend.in_flight.status()["num_in_flight"] == 0

    asyncio.run(talk())


def test_client_that_disconnects_while_sending_its_body_leaves_no_request_in_flight(connect, backend):
    async def talk():
        connection, task = sending(connect)
        await until(lambda: connection.num_received == 2)
        connection.left.set()
        async with asyncio.timeout(60):
            await task
        assert connection.status == 499 and backend.requests == []
        assert backend.in_flight.status()["num_in_flight"] == 0

    asyncio.run(talk())


@pytest.mark.parametrize("fault", ["start", "generation", "body"])
def test_error_response_on_its_way_cannot_be_cancelled(connect, backend, fault):
    """As little as any other that is on its way: who cancels it is told the truth."""

    async def talk():
        connection = connect({"x-request-id": "mine"}, **({"top_p": 3} if fault == "body" else {}))
        if fault == "start":
            backend.start_script = [Overloaded("full", 3.0)]
        elif fault == "generation":
            backend.script = [TextDelta("Hel", 1), Overloaded("full", 3.0)]
        send, cancelled = connection._send, []

        async def cancel_first(message):
            cancelled.append(await backend.cancel("mine"))
            await send(message)

        connection._send = cancel_first
        await connection.run()
        assert connection.status == (400 if fault == "body" else 429)
        assert cancelled and not any(cancelled)

    asyncio.run(talk())
