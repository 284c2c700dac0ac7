"""AnswerResponse: failed and cancelled generations, and clients that disconnect."""

import asyncio
import json

import pytest

from deployments.http.generation import TextDelta
from engine.errors import EngineFailed, Unavailable


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


def test_finished_generation_is_closed(chat, backend):
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


def test_tokens_are_sent_before_the_answer_is_complete(connect, backend):
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
def test_generation_is_closed_when_its_client_disconnects_midway(connect, backend, stream):
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
def test_start_is_cancelled_when_its_client_disconnects_before_the_first_token(connect, backend, stream):
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
def test_task_cancelled_by_the_server_closes_its_start_or_generation(connect, backend, stream, phase):
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


def test_connection_that_breaks_while_sending_closes_the_generation(connect, backend):
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


def test_client_that_disconnects_while_sending_its_body_starts_no_request(connect, backend):
    async def talk():
        connection = connect()
        connection._body_sent = True
        connection.left.set()
        await connection.run()
        assert backend.requests == []

    asyncio.run(talk())


LEFT = {
    "body": "while its body was read; it was not started",
    "start": "before its first token; it was ended",
    "generation": "after 1 tokens of its answer; the rest is not generated",
}


@pytest.mark.parametrize("is_cancelled", [False, True], ids=["disconnect", "cancelled by Serve's proxy"])
@pytest.mark.parametrize("phase", LEFT)
def test_the_line_of_a_client_that_leaves_says_what_was_done(connect, backend, caplog, phase, is_cancelled):
    async def talk():
        backend.start_script = [asyncio.Event()] if phase == "start" else []
        backend.script = [TextDelta("Hel", 1), asyncio.Event()]
        connection = connect(stream=True)
        connection._body_sent = phase == "body"
        task = asyncio.create_task(connection.run())
        await until(
            lambda: phase == "body" or (b"Hel" in connection.body if phase == "generation" else backend.requests)
        )
        await asyncio.sleep(0.05)
        if is_cancelled:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            connection.left.set()
            await task

    caplog.set_level("INFO", "orchard.http")
    asyncio.run(talk())
    (said,) = [message for message in caplog.messages if "disconnected" in message]
    assert said.startswith("request ") and said.endswith(f"; the client disconnected {LEFT[phase]}")


def test_failure_to_close_a_generation_is_logged_and_leaves_the_answer_intact(chat, backend, caplog):
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


def last_event(connection):
    return json.loads(connection.body.split(b"\n\n")[-2].removeprefix(b"data: "))


@pytest.mark.parametrize("stream", [False, True])
def test_request_cancelled_before_its_first_token_ends_with_status_499(connect, backend, stream):
    async def talk():
        backend.start_script = [asyncio.Event()]
        connection = connect({"x-request-id": "mine"}, stream=stream)
        task = asyncio.create_task(connection.run())
        await until(lambda: backend.requests)
        assert backend.in_flight.cancel("mine")
        async with asyncio.timeout(60):
            await task
        assert (connection.status, json.loads(connection.body)["error"]["code"]) == (499, "request_cancelled")
        assert backend.num_starts_cancelled == 1
        assert backend.generations == []

    asyncio.run(talk())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by", ["completion", "header"])
def test_answer_cancelled_midway_ends_with_request_cancelled_and_closes_its_generation(connect, backend, stream, by):
    async def talk():
        backend.script = [TextDelta("Hel", 1), asyncio.Event()]
        connection = connect({"x-request-id": "mine"}, stream=stream)
        task = asyncio.create_task(connection.run())
        await until(lambda: backend.generations and (not stream or b"Hel" in connection.body))
        assert backend.in_flight.cancel("mine" if by == "header" else backend.requests[0][0].request_id)
        assert not backend.in_flight.cancel("mine")
        async with asyncio.timeout(60):
            await task
        assert backend.generations[0].num_closed == 1
        if stream:
            assert connection.status == 200
            assert last_event(connection)["error"]["code"] == "request_cancelled"
            assert b"[DONE]" not in connection.body
            assert connection.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
        else:
            assert (connection.status, json.loads(connection.body)["error"]["code"]) == (499, "request_cancelled")

    asyncio.run(talk())


@pytest.mark.parametrize("stream", [False, True])
def test_answer_that_outlasts_the_drain_ends_with_an_error_and_a_retry_after(connect, backend, stream):
    async def talk():
        backend.script = [TextDelta("Hel", 1), asyncio.Event()]
        connection = connect(stream=stream)
        task = asyncio.create_task(connection.run())
        await until(lambda: backend.generations and (not stream or b"Hel" in connection.body))
        async with asyncio.timeout(60):
            await backend.in_flight.drain(0.05)
            await task
        assert backend.generations[0].num_closed == 1
        error = (last_event(connection) if stream else json.loads(connection.body))["error"]
        assert (connection.status, error["code"]) == (200 if stream else 503, "unavailable")
        assert "shutting down; the request did not finish within 0.05 s" in error["message"]
        if stream:
            assert error["retry_after_s"] >= 1
        else:
            assert int(dict(connection.sent[0]["headers"])[b"retry-after"]) >= 1

    asyncio.run(talk())


@pytest.mark.parametrize("stream", [False, True])
def test_complete_answer_is_not_changed_by_a_late_cancellation(connect, backend, stream):
    """Its last bytes are on their way when it is cancelled."""

    async def talk():
        connection = connect({"x-request-id": "mine"}, stream=stream)
        send, cancelled = connection._send, []

        async def cancel_at_the_end(message):
            if b"[DONE]" in message.get("body", b"") or b'"usage"' in message.get("body", b""):
                cancelled.append(backend.in_flight.cancel("mine"))
                await asyncio.sleep(0)
            await send(message)

        connection._send = cancel_at_the_end
        await connection.run()
        assert cancelled == [False]
        assert connection.status == 200
        assert b"error" not in connection.body
        assert connection.body.endswith(b"data: [DONE]\n\n" if stream else b"}")

    asyncio.run(talk())


def test_error_event_is_not_followed_by_a_cancellation_error(connect, backend):
    async def talk():
        backend.script = [TextDelta("Hel", 1), Unavailable("The engine was lost.", 3.0)]
        connection = connect({"x-request-id": "mine"}, stream=True)
        send = connection._send

        async def cancel_at_the_end(message):
            if b'"error"' in message.get("body", b""):
                assert not backend.in_flight.cancel("mine")
            await send(message)

        connection._send = cancel_at_the_end
        await connection.run()
        assert connection.body.count(b'"error"') == 1
        assert last_event(connection)["error"]["code"] == "unavailable"

    asyncio.run(talk())


def test_choices_of_a_request_count_as_in_flight_until_its_response_ends(connect, backend):
    async def talk():
        gate = asyncio.Event()
        backend.script = [TextDelta("Hel", 1), gate, TextDelta("lo", 1, "stop", index=1), TextDelta("", 0, "stop")]
        connection = connect(stream=True, n=2)
        task = asyncio.create_task(connection.run())
        await until(lambda: b"Hel" in connection.body)
        assert backend.in_flight.status()["num_in_flight"] == 2
        gate.set()
        await task
        assert backend.in_flight.status()["num_in_flight"] == 0

    asyncio.run(talk())


@pytest.mark.parametrize("phase", ["start", "generation"])
def test_request_of_a_disconnected_client_is_no_longer_in_flight(connect, backend, phase):
    async def talk():
        if phase == "start":
            backend.start_script = [asyncio.Event()]
        else:
            backend.script = [TextDelta("Hel", 1), asyncio.Event()]
        connection = connect()
        task = asyncio.create_task(connection.run())
        await until(lambda: backend.requests and (phase == "start" or backend.generations))
        assert backend.in_flight.status()["num_in_flight"] == 1
        connection.left.set()
        await task
        assert backend.in_flight.status()["num_in_flight"] == 0

    asyncio.run(talk())
