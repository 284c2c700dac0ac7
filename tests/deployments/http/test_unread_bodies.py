"""How many request bodies may arrive at once, how many bytes, how slowly, and from one address."""

import asyncio
import json
from collections.abc import Coroutine
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from starlette.requests import ClientDisconnect

from deployments.http.errors import BodyTooLarge, BodyTooSlow
from deployments.http.unread_bodies import BodyLimits, UnreadBodies, UnreadBody, read_body
from engine.errors import Overloaded
from tests.support.clock import Clock


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await work

    asyncio.run(bounded())


def scope(host: str | None = None, length: int | None = None) -> Any:
    headers = [] if length is None else [(b"content-length", str(length).encode())]
    return {"type": "http", "headers": headers, "client": (host, 1) if host else None}


def message(body: bytes, more: bool = True) -> Any:
    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": more}

    return receive


async def silent() -> Any:
    await asyncio.Event().wait()


def entered(stack: ExitStack, bodies: UnreadBodies, host: str | None = None, length: int | None = None) -> UnreadBody:
    return stack.enter_context(bodies.enter(scope(host, length)))


def test_body_beyond_the_limit_is_refused_until_another_body_is_complete():
    async def go() -> None:
        bodies = UnreadBodies(BodyLimits(max_bodies=2), Clock())
        with ExitStack() as stack:
            first, _ = entered(stack, bodies), entered(stack, bodies)
            with pytest.raises(Overloaded, match=r"2 request bodies .* the limits are 2 bodies .*max_unread_bodies"):
                entered(stack, bodies)
            await first.receive(message(b"{}", more=False))
            entered(stack, bodies)
            assert bodies.status()["num_unread"] == 2
        assert bodies.status() == {"num_unread": 0, "unread_bytes": 0}

    run(go())


def test_announced_bytes_are_reserved_at_once_and_unannounced_bytes_on_arrival():
    async def go() -> None:
        bodies = UnreadBodies(BodyLimits(max_bytes=100), Clock())
        with ExitStack() as stack:
            entered(stack, bodies, length=60)
            with pytest.raises(Overloaded, match=r"one with 50 bytes or more .* and 100 bytes"):
                entered(stack, bodies, length=50)
            unknown = entered(stack, bodies)
            await unknown.receive(message(b"x" * 40))
            assert bodies.status() == {"num_unread": 2, "unread_bytes": 100}
            with pytest.raises(Overloaded):
                await unknown.receive(message(b"x"))

    run(go())


def test_slow_body_is_displaced_by_a_new_body_and_a_quick_body_is_not():
    async def go() -> None:
        clock = Clock()
        bodies = UnreadBodies(BodyLimits(max_bodies=3, min_bytes_per_s=10), clock)
        with ExitStack() as stack:
            quick, slow, slower = (entered(stack, bodies) for _ in range(3))
            for body, num_bytes in ((quick, 100), (slow, 10), (slower, 1)):
                await body.receive(message(b"x" * num_bytes))
            with pytest.raises(Overloaded):
                entered(stack, bodies)  # all are too young to tell
            clock.advance(2)
            for displaced in (slower, slow):
                entered(stack, bodies)
                with pytest.raises(BodyTooSlow):
                    await displaced.receive(message(b"x"))
            clock.advance(0.5)
            with pytest.raises(Overloaded):
                entered(stack, bodies)
            await quick.receive(message(b"x"))
            assert bodies.status()["num_unread"] == 3

    run(go())


def test_displaced_body_fails_as_too_slow_while_waiting_for_data():
    async def go() -> None:
        clock = Clock()
        bodies = UnreadBodies(BodyLimits(max_bodies=1), clock)
        with ExitStack() as stack:
            waiting = asyncio.ensure_future(entered(stack, bodies).receive(silent))
            await asyncio.sleep(0)
            clock.advance(2)
            entered(stack, bodies)
            with pytest.raises(BodyTooSlow, match=r"0 bytes in 2.0 s; the minimum is 65536 bytes per second"):
                await waiting

    run(go())


def test_client_address_is_limited_to_its_share_and_loopback_is_not():
    async def go() -> None:
        bodies = UnreadBodies(BodyLimits(max_bodies=8, max_bytes=800), Clock())
        with ExitStack() as stack:
            for _ in range(2):
                entered(stack, bodies, "10.0.0.1", 10)
            with pytest.raises(
                Overloaded, match=r"2 request bodies with 20 bytes from one address .*max_share_per_addr"
            ):
                entered(stack, bodies, "10.0.0.1", 10)
            entered(stack, bodies, "10.0.0.2", 190)
            with pytest.raises(Overloaded, match="200 bytes from one address"):
                entered(stack, bodies, "10.0.0.2", 20)
            entered(stack, bodies, "2001:db8::1", 1)
            entered(stack, bodies, "2001:db8::2", 1)
            with pytest.raises(Overloaded, match="from one address"):
                entered(stack, bodies, "2001:db8::3", 1)
            for _ in range(3):
                entered(stack, bodies, "127.0.0.1", 10)
            assert bodies.status()["num_unread"] == 8

    run(go())


def test_the_first_body_of_an_address_may_be_larger_than_its_share():
    async def go() -> None:
        bodies = UnreadBodies(BodyLimits(max_bytes=100, max_body_bytes=80), Clock())
        with ExitStack() as stack:
            entered(stack, bodies, "10.0.0.1", 80)
            with pytest.raises(BodyTooLarge):
                entered(stack, bodies, "10.0.0.1", 81)

    run(go())


def test_a_body_above_the_rate_floor_may_take_as_long_as_it_needs():
    async def go() -> None:
        clock = Clock()
        bodies = UnreadBodies(BodyLimits(grace_s=5, min_bytes_per_s=10), clock)

        async def receive() -> Any:
            nonlocal num_left
            clock.advance(1)
            num_left -= 1
            return {"type": "http.request", "body": b"x" * 11, "more_body": num_left > 0}

        num_left = 100
        assert await read_body(scope(), receive, bodies) == b"x" * 1100

    run(go())


def test_a_body_below_the_rate_floor_is_refused_after_the_grace():
    async def go() -> None:
        bodies = UnreadBodies(BodyLimits(grace_s=0.1, min_bytes_per_s=1000))
        sent = [b"x" * 20, b"x" * 20]

        async def receive() -> Any:
            if not sent:
                await silent()
            return {"type": "http.request", "body": sent.pop(), "more_body": True}

        with pytest.raises(BodyTooSlow, match="40 bytes in 0"):
            await read_body(scope(), receive, bodies)
        assert bodies.status()["num_unread"] == 0

    run(go())


@pytest.mark.parametrize("end", ["leave", "cancel"])
def test_disconnected_client_and_cancelled_read_free_the_place_of_the_body(end: str):
    async def go() -> None:
        bodies = UnreadBodies(BodyLimits())

        async def receive() -> Any:
            if end == "cancel":
                await silent()
            return {"type": "http.disconnect"}

        reading = asyncio.ensure_future(read_body(scope(), receive, bodies))
        await asyncio.sleep(0)
        if end == "cancel":
            await asyncio.sleep(0)
            reading.cancel()
        with pytest.raises(asyncio.CancelledError if end == "cancel" else ClientDisconnect):
            await reading
        assert bodies.status()["num_unread"] == 0

    run(go())


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"max_unread_bodies": 1}, "http.max_unread_bodies"),
        ({"max_unread_bytes": 2048, "max_body_bytes": 2048, "max_share_per_address": 1}, "2048 bytes"),
        ({"max_unread_bodies": 8, "max_share_per_address": 0.125}, "http.max_share_per_address"),
    ],
)
def test_the_configured_limits_hold_for_requests(connect: Any, backend: Any, config: dict[str, Any], named: str):
    async def go() -> None:
        slow = connect({"content-length": "1500"}, config)
        slow.is_slow, slow.client = True, ("10.0.0.1", 1)
        task = asyncio.ensure_future(slow.run())
        while slow.num_received < 2:
            await asyncio.sleep(0.001)
        other = connect({"content-length": "1500"}, app=slow.app)
        other.client = ("10.0.0.1", 2)
        await other.run()
        error = json.loads(other.body)["error"]
        assert (other.status, error["code"]) == (429, "overloaded")
        assert named in error["message"]
        slow.left.set()
        await task
        assert backend.requests == []

    run(go())


def test_max_unread_bytes_below_max_body_bytes_is_refused(make_app: Any):
    with pytest.raises(ValueError, match="max_unread_bytes is 2000: it must be at least max_body_bytes, 4000"):
        make_app(max_unread_bytes=2000, max_body_bytes=4000)


def test_body_one_byte_above_the_limit_is_a_413(send, make_app):
    app = make_app(max_body_bytes=1024)
    for num_bytes, status in [(1024, 400), (1025, 413)]:
        response = send("POST", "/v1/chat/completions", app=app, content=b" " * num_bytes)
        assert response.status_code == status
    assert "1025" in response.json()["error"]["message"]
    assert "1024" in response.json()["error"]["message"]
    assert response.headers["x-request-id"]


def test_a_body_without_a_length_is_stopped_when_it_passes_the_limit(make_app):
    num_sent = 0

    async def endless():
        nonlocal num_sent
        for _ in range(1000):
            num_sent += 512
            yield b" " * 512

    async def talk():
        transport = httpx.ASGITransport(make_app(max_body_bytes=1024))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            headers = {"Content-Type": "application/json"}
            return await client.post("/v1/chat/completions", content=endless(), headers=headers)

    response = asyncio.run(talk())
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"
    assert num_sent < 3000
