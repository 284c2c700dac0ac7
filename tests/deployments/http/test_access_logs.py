"""No text of a prompt or an answer, and no key, is logged: by any route, any logger, on any level."""

import asyncio
import hashlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.routing import Route

from deployments.http import status_stream
from deployments.http.generation import TextDelta
from deployments.http.request_reader import MAX_INLINE_BYTES
from engine.errors import EngineFailed, InvalidRequest, Overloaded, Unavailable

PROMPT, ANSWER = "xylophone-prompt", "xylophone-answer"
KEY, WRONG_KEY = "xylophone-key", "xylophone-wrong-key"
MARK = "xylophone"

MESSAGES = [{"role": "user", "content": PROMPT}]
BODIES: dict[str, Any] = {
    "chat": {"model": "org/demo", "messages": MESSAGES, "user": PROMPT, "cache_salt": PROMPT},
    "stream": {"model": "org/demo", "messages": MESSAGES, "stream": True},
    "messages": {"model": "org/demo", "max_tokens": 9, "system": PROMPT, "messages": MESSAGES},
    "prompt": {"model": "org/demo", "prompt": PROMPT, "input": PROMPT, "instructions": PROMPT},
    "tools": {"model": "org/demo", "messages": MESSAGES, "tools": [{"type": "function", "function": {"name": PROMPT}}]},
    "wrong type": {"model": "org/demo", "messages": PROMPT, "input": {"text": PROMPT}},
    "wrong value": {"model": "org/demo", "messages": [{"role": PROMPT, "content": PROMPT}], "temperature": PROMPT},
    "unknown field": {"model": "org/demo", "messages": MESSAGES, PROMPT: PROMPT},
    "unknown model": {"model": PROMPT, "messages": MESSAGES, "prompt": PROMPT, "input": PROMPT},
    "image": {
        "model": "org/demo",
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"data:,{PROMPT}"}}]}],
    },
}
RAW = {
    "no JSON": f'{{"messages": "{PROMPT}',
    "no object": json.dumps([PROMPT]),
    "no text": PROMPT.encode() + b"\xff\xfe",
    "too large": json.dumps({**BODIES["chat"], "padding": "x" * MAX_INLINE_BYTES * 2}),
}
ENDS = {
    "answered": [TextDelta(ANSWER, 1), TextDelta(ANSWER, 1, "stop")],
    "failed": [TextDelta(ANSWER, 1), EngineFailed("the device is gone")],
    "broken": [TextDelta(ANSWER, 1), RuntimeError("index out of range")],
    "unfinished": [TextDelta(ANSWER, 1)],
}
STARTS = [
    EngineFailed("no device"),
    Unavailable("no engine", 1.0),
    Overloaded("full", 1.0),
    InvalidRequest("x"),
    OSError(),
]


@pytest.fixture
def make(make_app: Any, tmp_path: Path) -> Any:
    def make_keyed(max_requests: int = 1000, **config: Any) -> FastAPI:
        path = tmp_path / "keys.json"
        entry = {"hash": "sha256:" + hashlib.sha256(KEY.encode()).hexdigest(), "name": "ann"}
        path.write_text(json.dumps([{**entry, "max_requests_per_minute": max_requests, "is_administrative": True}]))
        path.chmod(0o600)
        return make_app(api_keys_file=str(path), **config)

    return make_keyed


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Capture all loggers, also those that are made later or that have a level of their own."""
    named = [logging.getLogger(name) for name in logging.Logger.manager.loggerDict]
    levels = [(logger, logger.level) for logger in named if logger.level]
    for logger, _ in levels:
        logger.setLevel(logging.NOTSET)
    with caplog.at_level(logging.DEBUG):
        yield caplog
    for logger, level in levels:
        logger.setLevel(level)


def assert_silent(log: pytest.LogCaptureFixture) -> None:
    """Neither in what is written, tracebacks included, nor in what a structured handler could write."""
    written = log.text + "".join(repr(vars(record)) for record in log.records)
    said = [line for line in written.splitlines() if MARK in line]
    assert said == []


def routes(app: FastAPI) -> list[tuple[str, str]]:
    """Every method and path, with a text of a client in place of each parameter."""
    found = [
        (method, route.path_format.replace("{id}", MARK).replace("{model}", MARK).replace("{file}", MARK))
        for route in app.routes
        if isinstance(route, Route)
        for method in sorted((route.methods or set()) - {"HEAD"})
    ]
    return [*found, ("POST", "/v1/messages"), ("POST", "/nope"), ("PUT", "/v1/models")]


async def talk(app: FastAPI, requests: list[tuple[str, str, dict[str, str], Any]]) -> list[int]:
    transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        statuses = []
        for method, path, headers, body in requests:
            sent = {"Content-Type": "application/json", **headers}
            response = await http.request(method, path, headers=sent, content=body)
            statuses.append(response.status_code)
        return statuses


@pytest.fixture(autouse=True)
def _short_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_stream, "MAX_STREAM_S", 0.01)


@pytest.fixture(autouse=True)
def _only_the_servers_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """httpx, the client of these tests, logs the URLs that it asks for."""
    monkeypatch.setattr(logging.getLogger("httpx"), "disabled", True)


def test_listing_of_routes_contains_post_get_and_delete_routes(make: Any):
    assert {("POST", "/v1/chat/completions"), ("GET", f"/v1/models/{MARK}"), ("DELETE", "/v1/cache")} <= set(
        routes(make())
    )


@pytest.mark.parametrize("key", [{"Authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}, {"x-api-key": WRONG_KEY}, {}])
def test_no_route_logs_the_text_of_a_request(
    make: Any, backend: Any, log: pytest.LogCaptureFixture, key: dict[str, str]
):
    """Once by a key with an allowance for all requests, and once by one that is used up by the first."""
    backend.script = ENDS["answered"]
    bodies = [*map(json.dumps, BODIES.values()), *(RAW[name] for name in ("no JSON", "no object", "no text"))]
    requests = [(*route, key, body) for body in bodies for route in routes(make())]
    statuses = [status for app in (make(), make(max_requests=1)) for status in asyncio.run(talk(app, requests))]
    if WRONG_KEY in key.values() or not key:
        assert set(statuses) <= {200, 401, 404}  # files of the page need no key
    else:
        assert {200, 400, 404, 429} <= set(statuses)
    assert_silent(log)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("stream", [False, True])
def test_end_of_an_answer_is_logged_without_its_text(
    make: Any, backend: Any, log: pytest.LogCaptureFixture, end: str, stream: bool
):
    backend.script = ENDS[end]
    body = json.dumps({**BODIES["chat"], "stream": stream})
    asyncio.run(talk(make(), [("POST", "/v1/chat/completions", {"x-api-key": KEY}, body)]))
    assert len(backend.requests) == 1 and any(record.name.startswith("orchard") for record in log.records)
    assert_silent(log)


@pytest.mark.parametrize("error", STARTS, ids=lambda error: type(error).__name__)
def test_request_that_fails_to_start_is_logged_without_its_text(
    make: Any, backend: Any, log: pytest.LogCaptureFixture, error: Exception
):
    backend.start_script = [error]
    asyncio.run(talk(make(), [("POST", "/v1/chat/completions", {"x-api-key": KEY}, json.dumps(BODIES["chat"]))]))
    assert len(backend.requests) == 1
    assert_silent(log)


def test_large_or_refused_body_is_not_logged(
    make: Any, log: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
):
    request = ("POST", "/v1/chat/completions", {"x-api-key": KEY}, RAW["too large"])
    assert asyncio.run(talk(make(), [request]))[0] in (200, 400)
    assert asyncio.run(talk(make(max_body_bytes=2048), [request])) == [413]
    assert_silent(log)
    assert MARK not in "".join(capfd.readouterr())


def test_disconnect_of_a_client_is_logged_without_its_text(
    make: Any, connect: Any, backend: Any, log: pytest.LogCaptureFixture
):
    backend.script = [TextDelta(ANSWER, 1), asyncio.Event()]

    async def leave() -> None:
        connection = connect({"x-api-key": KEY}, app=make(), stream=True, user=PROMPT)
        running = asyncio.ensure_future(connection.run())
        while not connection.sent:
            await asyncio.sleep(0)
        connection.left.set()
        await running

    asyncio.run(leave())
    assert "the client disconnected" in log.text
    assert_silent(log)
