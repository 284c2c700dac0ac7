"""What becomes of a generation that fails, and of one whose client leaves."""

import asyncio
import json

import pytest

from deployments.chat import TextDelta
from engine.protocol import EngineFailed


async def until(condition):
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


def test_a_generation_is_closed_when_it_is_over(chat, backend):
    for stream in (False, True):
        assert chat(stream=stream).status_code == 200
    assert [generation.num_closed for generation in backend.generations] == [1, 1]


@pytest.mark.parametrize(
    "script",
    [
        [EngineFailed("secret path")],
        [TextDelta("Hel", 1), RuntimeError("secret path")],
        [TextDelta("Hel", 1)],
        [TextDelta("Hel", 1, "error")],
        [TextDelta("Hel", 1, "abort")],
    ],
    ids=str,
)
def test_a_generation_that_fails_is_an_error_and_closed(chat, backend, script):
    backend.script = script
    whole = chat()
    assert whole.status_code == 500
    stream = chat(stream=True)
    assert stream.status_code == 200
    last = json.loads(stream.text.split("\n\n")[-2].removeprefix("data: "))
    assert last["error"].keys() == whole.json()["error"].keys() == {"message", "type", "param", "code"}
    assert stream.headers["x-request-id"] in last["error"]["message"]
    assert "[DONE]" not in stream.text
    assert 'finish_reason": "' not in stream.text
    assert "secret" not in whole.text + stream.text
    assert [generation.num_closed for generation in backend.generations] == [1, 1]


def test_tokens_are_sent_as_they_come(connect, backend):
    async def talk():
        gate = asyncio.Event()
        backend.script = [TextDelta("Hel", 1), gate, TextDelta("lo", 1, "stop")]
        connection = connect(stream=True)
        task = asyncio.create_task(connection.run())
        await until(lambda: b"Hel" in connection.body)
        assert b"[DONE]" not in connection.body
        gate.set()
        await task
        assert connection.body.endswith(b"data: [DONE]\n\n")
        assert connection.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}

    asyncio.run(talk())


@pytest.mark.parametrize("stream", [False, True])
def test_the_generation_is_closed_when_the_client_leaves_in_the_middle(connect, backend, stream):
    async def talk():
        backend.script = [TextDelta("Hel", 1), asyncio.Event()]
        connection = connect(stream=stream)
        task = asyncio.create_task(connection.run())
        await until(lambda: backend.generations and (not stream or b"Hel" in connection.body))
        connection.left.set()
        async with asyncio.timeout(1):
            await task
        assert backend.generations[0].num_closed == 1
        assert b"error" not in connection.body

    asyncio.run(talk())


@pytest.mark.parametrize("stream", [False, True])
def test_a_start_is_cancelled_when_the_client_leaves_before_the_first_token(connect, backend, stream):
    async def talk():
        backend.start_script = [asyncio.Event()]
        connection = connect(stream=stream)
        task = asyncio.create_task(connection.run())
        await until(lambda: backend.requests)
        connection.left.set()
        async with asyncio.timeout(1):
            await task
        assert backend.num_starts_cancelled == 1
        assert backend.generations == []
        assert connection.sent[0]["status"] == 499

    asyncio.run(talk())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["start", "generation"])
def test_a_server_that_cancels_the_request_frees_it_as_well(connect, backend, stream, phase):
    async def talk():
        if phase == "start":
            backend.start_script = [asyncio.Event()]
        else:
            backend.script = [TextDelta("Hel", 1), asyncio.Event()]
        task = asyncio.create_task(connect(stream=stream).run())
        await until(lambda: backend.requests and (phase == "start" or backend.generations))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert backend.num_starts_cancelled == (phase == "start")
        assert [generation.num_closed for generation in backend.generations] == [1] * (phase == "generation")

    asyncio.run(talk())


def test_a_connection_that_breaks_while_we_send_frees_the_row(connect, backend):
    async def talk():
        connection = connect(stream=True)
        sent = 0

        async def broken(message):
            nonlocal sent
            sent += 1
            if sent == 3:
                raise OSError("broken pipe")

        connection._send = broken
        await connection.run()
        assert backend.generations[0].num_closed == 1

    asyncio.run(talk())


def test_a_client_that_leaves_while_it_sends_the_body_starts_nothing(connect, backend):
    async def talk():
        connection = connect()
        connection._body_sent = True
        connection.left.set()
        await connection.run()
        assert backend.requests == []

    asyncio.run(talk())


def test_a_generation_that_cannot_be_closed_does_not_spoil_the_answer(chat, backend, caplog):
    start = backend.start

    async def broken():
        raise RuntimeError("no")

    async def start_unclosable(request, route):
        generation = await start(request, route)
        generation.aclose = broken
        return generation

    backend.start = start_unclosable
    for stream in (False, True):
        assert chat(stream=stream).status_code == 200
    assert "could not be closed" in caplog.text
