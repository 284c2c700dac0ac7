"""Comments in a stream that has nothing to send, and errors that come after one."""

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from deployments.http.event_stream import COMMENT
from deployments.http.generation import TextDelta
from engine.errors import Overloaded

SOON = {"stream_comment_s": 0.05}


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


def events_of(body: bytes) -> list[Any]:
    blocks = [block for block in body.split(b"\n\n") if block and not block.startswith(b":")]
    return [block.removeprefix(b"data: ") for block in blocks]


def test_a_stream_that_waits_for_its_first_token_sends_comments(connect: Any, backend: Any):
    async def talk() -> None:
        gate = asyncio.Event()
        backend.start_script = [gate]
        connection = connect(config=SOON, stream=True)
        task = asyncio.create_task(connection.run())
        await until(lambda: connection.body.count(COMMENT) >= 2)
        assert connection.status == 200 and backend.generations == []
        gate.set()
        await task
        assert events_of(connection.body)[-1] == b"[DONE]"
        assert [message["type"] for message in connection.sent].count("http.response.start") == 1

    asyncio.run(talk())


def test_a_stream_that_pauses_sends_comments_between_its_tokens(connect: Any, backend: Any):
    async def talk() -> None:
        gate = asyncio.Event()
        backend.script = [TextDelta("Hel", 1), gate, TextDelta("lo", 1, "stop")]
        connection = connect(config=SOON, stream=True)
        task = asyncio.create_task(connection.run())
        await until(lambda: connection.body.count(COMMENT) >= 2)
        assert b"Hel" in connection.body and b'"lo"' not in connection.body
        gate.set()
        await task
        texts = [
            json.loads(event)["choices"][0]["delta"].get("content", "") for event in events_of(connection.body)[:-1]
        ]
        assert "".join(texts) == "Hello"
        assert connection.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}

    asyncio.run(talk())


@pytest.mark.parametrize("stream", [True, False])
def test_quick_streams_and_unstreamed_answers_have_no_comments(chat: Any, connect: Any, backend: Any, stream: bool):
    assert ":waiting" not in chat(stream=stream).text.replace(" ", "")

    async def talk() -> None:
        gate = asyncio.Event()
        backend.script = [gate, TextDelta("Hello", 1, "stop")]
        connection = connect(config=SOON if not stream else None, stream=stream)
        task = asyncio.create_task(connection.run())
        await until(lambda: len(backend.generations) == 2)
        await asyncio.sleep(0.2)
        gate.set()
        await task
        assert COMMENT not in connection.body and connection.status == 200

    asyncio.run(talk())


@pytest.mark.parametrize("end", ["error", "cancel", "leave"])
def test_error_or_cancellation_after_the_first_comment_is_an_event_of_the_stream(connect: Any, backend: Any, end: str):
    async def talk() -> None:
        gate = asyncio.Event()
        backend.start_script = [gate, Overloaded("The queue is full.", 3.0)]
        connection = connect({"x-request-id": "mine"}, config=SOON, stream=True)
        task = asyncio.create_task(connection.run())
        await until(lambda: COMMENT in connection.body)
        if end == "error":
            gate.set()
        elif end == "cancel":
            assert await backend.cancel("mine")
        else:
            connection.left.set()
        async with asyncio.timeout(60):
            await task
        assert connection.status == 200
        errors = [json.loads(event)["error"] for event in events_of(connection.body)]
        if end == "leave":
            assert errors == []
        else:
            code, retry_after_s = ("overloaded", 3) if end == "error" else ("request_cancelled", None)
            assert [(error["code"], error.get("retry_after_s")) for error in errors] == [(code, retry_after_s)]
        assert backend.num_starts_cancelled == (end != "error")
        assert backend.in_flight.status()["num_in_flight"] == 0

    asyncio.run(talk())


def test_an_error_before_the_first_comment_has_its_own_status(connect: Any, backend: Any):
    async def talk() -> None:
        backend.start_script = [Overloaded("The queue is full.", 3.0)]
        connection = connect(stream=True)
        await connection.run()
        assert connection.status == 429

    asyncio.run(talk())


def test_the_openai_client_does_not_see_the_comments(connect: Any, backend: Any):
    """Its own decoder reads what was sent."""

    async def talk() -> None:
        first, second = asyncio.Event(), asyncio.Event()
        backend.start_script = [first]
        backend.script = [TextDelta("Hel", 1), second, TextDelta("lo", 1, "stop")]
        connection = connect(config=SOON, stream=True)
        task = asyncio.create_task(connection.run())
        for gate in (first, second):
            before = connection.body.count(COMMENT)
            await until(lambda before=before: connection.body.count(COMMENT) > before)
            gate.set()
        await task
        headers = {"content-type": "text/event-stream"}
        transport = httpx.MockTransport(lambda request: httpx.Response(200, headers=headers, content=connection.body))
        http: Any = httpx.AsyncClient(transport=transport)  # the package knows it by another name
        async with openai.AsyncOpenAI(api_key="x", base_url="http://127.0.0.1/v1", http_client=http) as client:
            messages: Any = [{"role": "user", "content": "Hi"}]
            stream = await client.chat.completions.create(model="org/demo", messages=messages, stream=True)
            texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(texts) == "Hello"

    asyncio.run(talk())
