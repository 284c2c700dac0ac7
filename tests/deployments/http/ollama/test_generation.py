"""/api/chat and /api/generate over HTTP: streams, whole answers, errors in the dialect's words, cancellation."""

import asyncio
import json
from typing import Any

import pytest

from deployments.http.context import IGNORED_HEADER
from deployments.http.figures import KeyUsage
from deployments.http.generation import TextDelta
from deployments.requests import Route
from engine.errors import ContextLengthExceeded, EngineFailed, InvalidRequest, Overloaded, Unavailable
from tests.deployments.http.ollama.conftest import HI, lines

PATHS = pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
KEYED = {"api_keys": ["sha256:" + "0" * 64]}


def text_of(part: dict[str, Any]) -> str:
    return part["response"] if "response" in part else part["message"]["content"]


@PATHS
def test_an_answer_is_a_stream_of_lines_unless_the_client_refuses_it(ask, backend, path):
    response = ask(path, model="org/demo:latest", options={"num_ctx": 4096, "num_predict": 50}, keep_alive="5m", foo=1)
    assert response.status_code == 200 and response.headers["content-type"] == "application/x-ndjson"
    assert response.headers[IGNORED_HEADER] == "foo, options.num_ctx"
    *parts, end = lines(response.content)
    assert "".join(map(text_of, parts)) == "Hello" and text_of(end) == ""
    assert {part["model"] for part in (*parts, end)} == {"org/demo:latest"}
    assert (end["done"], end["done_reason"], end["prompt_eval_count"], end["eval_count"]) == (True, "stop", 7, 4)
    [(request, route)] = backend.requests
    assert (request.max_tokens, route, list(request.messages)) == (50, Route.TEXT, [HI])
    whole = ask(path, stream=False)
    assert whole.headers["content-type"] == "application/json" and "x-orchard-timing" in whole.headers
    assert text_of(whole.json()) == "Hello" and whole.json()["done"] is True


@PATHS
def test_durations_are_whole_nanoseconds_within_the_request(ask, path):
    found = ask(path, stream=False).json()
    total = found["total_duration"]
    for name in ("load_duration", "prompt_eval_duration", "eval_duration"):
        assert type(found[name]) is int and 0 <= found[name] <= total, name
    assert 0 < total < 600 * 10**9


@PATHS
def test_an_answer_is_counted_and_has_a_timeline(ask, backend, path):
    response = ask(path, headers={"x-request-id": "req-1"})
    assert response.headers["x-request-id"] == "req-1"
    timeline = backend.timelines.find("req-1")
    assert timeline is not None and (timeline.path, timeline.status) == (path, 200)
    assert timeline.answer_id.startswith("ollama-")
    assert list(backend.figures.usage.values()) == [KeyUsage(1, 7, 5, 4)]
    name = "ollama_chat" if path == "/api/chat" else "ollama_generate"
    assert backend.figures.responses == {(name, 200): 1}


@PATHS
def test_a_request_without_a_prompt_says_that_the_model_is_loaded(ask, backend, path):
    for keep_alive in (0, "10m"):
        response = ask(path, messages=[], prompt="", keep_alive=keep_alive)
        assert response.headers["content-type"] == "application/json"
        assert (response.json()["done"], response.json()["done_reason"]) == (True, "load")
        assert text_of(response.json()) == ""
    assert backend.requests == []
    backend.unready = "The engine is being loaded."
    assert ask(path, messages=[], prompt="").status_code == 503


@PATHS
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (InvalidRequest("`messages[0].images[0]` is no image.", "messages[0].images[0]"), 400, "is no image"),
        (ContextLengthExceeded(90, 20, 100), 400, "100 tokens"),
        (Overloaded("256 requests are waiting.", 1.2), 429, "256 requests are waiting."),
        (Unavailable("The engine was lost.", 1.2), 503, "The engine was lost."),
        (EngineFailed("0x7f42"), 500, "req-1"),
    ],
)
def test_an_error_before_the_first_token_is_one_sentence(ask, backend, path, stream, error, status, message):
    backend.start_script = [error]
    response = ask(path, stream=stream, headers={"x-request-id": "req-1"})
    assert response.status_code == status and response.headers["content-type"] == "application/json"
    assert response.json().keys() == {"error"} and message in response.json()["error"]
    assert response.headers.get("retry-after") == ("2" if status in (429, 503) else None)


@PATHS
def test_an_error_after_the_first_token_is_the_last_line(ask, backend, path):
    backend.script = [TextDelta("Hel", 1), Unavailable("The engine was lost.", 1.2)]
    first, last = lines(ask(path).content)
    assert text_of(first) == "Hel" and last == {"error": "The engine was lost.", "retry_after_s": 2}


@PATHS
def test_an_unknown_model_is_not_found_in_ollamas_words(ask, path):
    response = ask(path, model="llama3.2")
    assert response.status_code == 404
    assert response.json() == {"error": "model 'llama3.2' not found: this server serves 'org/demo'"}


def test_errors_of_every_kind_are_in_the_dialect(send, make_app, ask):
    def said(response: Any, status: int) -> str:
        assert response.status_code == status and response.json().keys() == {"error"}, response.text
        return response.json()["error"]

    assert "not valid JSON" in said(send("POST", "/api/chat", content=b"{"), 400)
    assert "application/json" in said(
        send("POST", "/api/chat", content=b"{}", headers={"Content-Type": "text/plain"}), 415
    )
    assert "`options.top_p` is 3" in said(ask("/api/chat", options={"top_p": 3}), 400)
    assert "API key" in said(ask("/api/chat", app=make_app(**KEYED)), 401)
    assert "evil.example" in said(ask("/api/chat", headers={"Host": "evil.example"}), 403)
    assert "does not exist" in said(send("GET", "/api/chat"), 405)
    assert "Did you mean /api/chat?" in said(send("GET", "/api/chats"), 404)
    too_large = send("POST", "/api/chat", app=make_app(max_body_bytes=1024), content=b" " * 1025)
    assert "1024" in said(too_large, 413)


def test_a_browser_may_read_answers_of_an_allowed_origin(ask, make_app):
    origin = "app://obsidian.md"
    app = make_app(allowed_origins=[origin])
    assert ask("/api/chat", app=app, headers={"Origin": origin}).headers["access-control-allow-origin"] == origin
    assert ask("/api/chat", app=app, headers={"Origin": "https://evil.example"}).status_code == 403


def test_a_large_body_is_read_in_a_process(ask, backend):
    assert ask("/api/chat", messages=[{"role": "user", "content": "x" * 300_000}]).status_code == 200
    assert len(backend.requests) == 1


@PATHS
def test_a_stream_that_waits_sends_lines_without_output(connect, backend, path):
    async def talk() -> bytes:
        gate = asyncio.Event()
        backend.start_script = [gate]
        connection = connect(config={"stream_comment_s": 0.05}, prompt="Hi")
        connection.path = path
        task = asyncio.create_task(connection.run())
        async with asyncio.timeout(60):
            while connection.body.count(b"\n") < 2:
                await asyncio.sleep(0.001)
        gate.set()
        await task
        return connection.body

    *parts, end = lines(asyncio.run(talk()))
    assert text_of(parts[0]) == text_of(parts[1]) == "" and parts[0]["done"] is False
    assert "".join(map(text_of, parts)) == "Hello" and end["done"] is True


@PATHS
def test_a_client_that_disconnects_ends_its_answer(connect, backend, path):
    async def talk() -> None:
        backend.script = [TextDelta("Hel", 1), asyncio.Event()]
        connection = connect(prompt="Hi")
        connection.path = path
        task = asyncio.create_task(connection.run())
        async with asyncio.timeout(60):
            while len(connection.sent) < 2:
                await asyncio.sleep(0.001)
            connection.left.set()
            await task

    asyncio.run(talk())
    assert backend.generations[0].num_closed == 1
    assert backend.in_flight.status()["num_in_flight"] == 0


@PATHS
def test_an_answer_is_cancelled_by_its_request_id(connect, send, backend, make_app, path):
    async def talk():
        backend.script = [TextDelta("Hel", 1), asyncio.Event()]
        app = make_app()
        connection = connect({"x-request-id": "mine"}, app=app, prompt="Hi")
        connection.path = path
        task = asyncio.create_task(connection.run())
        async with asyncio.timeout(60):
            while len(connection.sent) < 2:
                await asyncio.sleep(0.001)
        response = await asyncio.to_thread(send, "POST", f"{path}/mine/cancel", app=app)
        await task
        return response, connection.body

    response, stream = asyncio.run(talk())
    assert response.json() == {"id": "mine", "cancelled": True}
    assert lines(stream)[-1] == {"error": "The request was cancelled."}
    missing = send("POST", f"{path}/other/cancel")
    assert missing.status_code == 404 and "other" in missing.json()["error"]


def test_bodies_of_the_documentation_are_accepted(send):
    body = json.dumps({"model": "org/demo", "prompt": "Hi", "stream": False, "options": {"seed": 1, "num_thread": 8}})
    assert send("POST", "/api/generate", content=body).status_code == 200
