"""No body below the size limit holds up the event loop, and with it the token streams of all other requests.

What is measured is the processor time that the loop's thread takes between two turns of a task that is always ready:
other processes of the machine do not change it.
"""

import asyncio
import gc
import time
from typing import Any

import pytest
from fastapi import FastAPI

from deployments.http import request_reader
from tests.deployments.http.conftest import Connection
from tests.deployments.http.worst_bodies import LIMIT, WORST_BODIES, parts_of

MAX_LAG_S = 0.05
NUM_TRIES = 3


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


@pytest.fixture
def freeze_garbage() -> Any:
    """A collection looks at all objects of the tests, which a server does not have."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("name", WORST_BODIES)
def test_no_body_blocks_the_event_loop(make_app, freeze_garbage, name: str):
    body = WORST_BODIES[name]()
    assert len(body) <= LIMIT

    async def talk() -> None:
        app, lags = make_app(), []
        await lag_of(app, b"{}")
        for _ in range(NUM_TRIES):
            lag, connection = await lag_of(app, body)
            assert connection.status in (200, 400, 404), connection.body
            lags.append(lag)
            if lag < MAX_LAG_S:
                return
        pytest.fail(f"{len(body)} bytes held up the loop for {min(lags) * 1000:.0f} ms")

    asyncio.run(talk())


def test_lag_measurement_detects_a_body_read_on_the_event_loop(make_app, freeze_garbage, monkeypatch):
    monkeypatch.setattr(request_reader, "MAX_INLINE_BYTES", LIMIT)
    monkeypatch.setattr(request_reader, "MAX_INLINE_MARKS", LIMIT)

    async def talk() -> None:
        lag, _ = await lag_of(make_app(), parts_of(b"[]", 200_000))
        assert lag > MAX_LAG_S

    asyncio.run(talk())
