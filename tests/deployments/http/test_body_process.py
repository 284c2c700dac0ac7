"""No body below the size limit holds up the event loop, and with it the token streams of all other requests.

What is measured is the processor time that the loop's thread takes between two turns of a task that is always ready,
in multiples of what the loop's thread takes in the same run for the most expensive body that it parses itself.
"""

import asyncio
import gc
import time
from collections.abc import Iterator

import pytest
from fastapi import FastAPI

from deployments.http import request_reader
from deployments.http.app import create_app
from deployments.http.config import HttpConfig
from tests.deployments.http.conftest import Connection, FakeBackend
from tests.deployments.http.worst_bodies import LIMIT, WORST_BODIES, parts_of
from tests.support.night import some_at_night

INLINE_BODY = "8000 marks of messages"
GATE = (
    *("450 000 numbers as parts", "distinct system lines up to the limit", "lines that could be volatile"),
    *("500 000 marks", "the deepest nest", "a string that never ends", "400 000 unknown fields"),
    *("400 000 biases out of range", "80 000 text parts in 40 messages", "4096 messages with tool calls"),
    *("text of four bytes a character", "escaped pairs", "16 images", "control strings", "a schema of 400 000 values"),
    *("a long integer", "random bytes in base64", "250 kB of text parts", "8000 marks of messages", "1000 findings"),
    *("closing brackets", "bytes that are no UTF-8", "a long name of a field"),
)
MAX_RATIO = 10
NUM_TRIES = 12


async def lag_of(app: FastAPI, body: bytes) -> tuple[float, Connection]:
    """The longest turn of the loop while this request is answered, seconds of its thread."""
    connection = Connection(app, body, {})
    longest, last, is_over = 0.0, time.thread_time(), False

    def probe() -> None:
        nonlocal longest, last
        now = time.thread_time()
        longest, last = max(longest, now - last), now
        if not is_over:
            asyncio.get_running_loop().call_soon(probe)

    asyncio.get_running_loop().call_soon(probe)
    await connection.run()
    is_over = True
    await asyncio.sleep(0)
    return longest, connection


async def inline_lag(app: FastAPI) -> float:
    """The lag of a body that is parsed on the event loop, seconds of its thread: the median of three."""
    lags = [await lag_of(app, WORST_BODIES[INLINE_BODY]()) for _ in range(4)]  # the first compiles and imports
    return sorted(lag for lag, _ in lags[1:])[1]


@pytest.fixture(scope="module", autouse=True)
def freeze_garbage() -> None:
    """A collection looks at all objects of the tests, which a server does not have."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def shared_backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture(scope="module")
def shared_app(shared_backend: FakeBackend) -> FastAPI:
    """Its processes read one body after the other, as those of a server; to start one takes a second."""
    return create_app(shared_backend, HttpConfig(), frozenset({"image"}))


@pytest.mark.parametrize(
    "name", some_at_night(WORST_BODIES, GATE, "variants, in length and values, of the bodies in the gate")
)
def test_no_body_blocks_the_event_loop(
    shared_app: FastAPI, shared_backend: FakeBackend, loop: asyncio.Runner, name: str
):
    body = WORST_BODIES[name]()
    assert len(body) <= LIMIT

    async def talk() -> None:
        app, lags = shared_app, []
        limit_s = MAX_RATIO * await inline_lag(app)
        for _ in range(NUM_TRIES):
            lag, connection = await lag_of(app, body)
            assert connection.status in (200, 400, 404), connection.body
            lags.append(lag)
            if lag < limit_s:
                return
        lag_ms, limit_ms = min(lags) * 1000, limit_s * 1000
        pytest.fail(f"{len(body)} bytes held up the loop for {lag_ms:.0f} ms; the limit is {limit_ms:.0f} ms")

    loop.run(talk())
    shared_backend.requests.clear()


def test_lag_measurement_detects_a_body_read_on_the_event_loop(make_app, monkeypatch):
    monkeypatch.setattr(request_reader, "MAX_INLINE_BYTES", LIMIT)
    monkeypatch.setattr(request_reader, "MAX_INLINE_MARKS", LIMIT)

    async def talk() -> None:
        app = make_app()
        limit_s = MAX_RATIO * await inline_lag(app)
        lag, _ = await lag_of(app, parts_of(b"[]", 200_000))
        assert lag > limit_s

    asyncio.run(talk())
