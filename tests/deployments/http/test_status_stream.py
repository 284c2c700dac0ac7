"""GET /v1/status/stream: the figures of the status as events, for as long as its client stays."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI

from deployments.http import status_stream
from deployments.http.event_stream import COMMENT
from deployments.http.status_stream import MAX_STREAMS, PATH
from tests.deployments.http.conftest import FakeBackend

LOCAL, REMOTE = ("127.0.0.1", 1), ("10.0.0.7", 5000)


class Watcher:
    """One open stream; `leave` closes its connection."""

    def __init__(self, app: FastAPI, method: str = "GET", client: Any = LOCAL):
        self.sent: list[Any] = []
        self._left = asyncio.Event()
        self._scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": PATH,
            "raw_path": PATH.encode(), "query_string": b"", "headers": [(b"host", b"127.0.0.1")], "client": client,
        }  # fmt: skip
        self._app = app
        self._has_asked = False
        self.task = asyncio.ensure_future(self._talk())

    async def _talk(self) -> None:
        await self._app(self._scope, self._receive, self._send)

    async def _receive(self) -> Any:
        if not self._has_asked:
            self._has_asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    @property
    def events(self) -> list[tuple[str, dict[str, Any]]]:
        blocks = [block.split("\n") for block in self.body.decode().split("\n\n") if block.startswith("event: ")]
        return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]

    async def has(self, condition: Callable[["Watcher"], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition(self):
                await asyncio.sleep(0.001)

    async def leave(self) -> None:
        self._left.set()
        async with asyncio.timeout(60):
            await self.task


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_stream, "PERIOD_S", 0.01)


@pytest.fixture
def figures(backend: FakeBackend) -> dict[str, Any]:
    """The body of /v1/status, which a test may change."""
    page = {
        "model": "org/demo",
        "num_running": 3,
        "engines": [{"node_id": "abc"}],
        "config": {"x": "secret"},
        "text": [],
    }

    async def status() -> dict[str, Any]:
        return dict(page)

    backend.status = status  # type: ignore[method-assign]
    return page


def test_first_event_has_everything_and_further_ones_what_has_changed(make_app: Any, figures: Any):
    async def talk() -> None:
        watcher = Watcher(make_app())
        await watcher.has(lambda one: len(one.events) == 1)
        figures["num_running"] = 4
        await watcher.has(lambda one: len(one.events) == 2)
        await asyncio.sleep(0.05)  # nothing changes, nothing is sent
        await watcher.leave()
        (first, whole), (second, change) = watcher.events
        assert (first, second) == ("status", "change")
        assert whole["num_running"] == 3 and whole["engines"] == [{"node_id": "abc"}]
        assert (whole["is_administrative"], whole["key"]) == (True, None)
        assert whole["answers"] == {"errors": {}, "refusals": {}, "keys": {}}
        assert change == {"num_running": 4}
        assert "secret" not in watcher.body.decode() and "text" not in whole

    asyncio.run(talk())


def test_other_clients_see_only_figures_as_in_the_status(make_app: Any, figures: Any, backend: FakeBackend):
    async def talk() -> None:
        from deployments.http.figures import KeyUsage

        backend.figures.answered("ann", KeyUsage(1, 10, 5, 2))
        watcher = Watcher(make_app(open=True), client=REMOTE)
        await watcher.has(lambda one: len(one.events) == 1)
        await watcher.leave()
        [(_, whole)] = watcher.events
        assert whole["is_administrative"] is False and whole["num_running"] == 3
        assert "abc" not in watcher.body.decode() and "ann" not in watcher.body.decode()
        assert whole["answers"]["keys"]["all"]["num_answers"] == 1

    asyncio.run(talk())


def test_a_silent_stream_sends_comments(make_app: Any, figures: Any):
    async def talk() -> None:
        watcher = Watcher(make_app(stream_comment_s=0.02))
        await watcher.has(lambda one: one.body.count(COMMENT) >= 2)
        await watcher.leave()
        assert len(watcher.events) == 1

    asyncio.run(talk())


def test_stream_ends_when_the_server_shuts_down_and_after_its_time(
    make_app: Any, figures: Any, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
):
    async def ends(watcher: Watcher) -> None:
        async with asyncio.timeout(60):
            await watcher.task
        assert watcher.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}

    async def talk() -> None:
        app = make_app()
        watcher = Watcher(app)
        await watcher.has(lambda one: len(one.events) == 1)
        assert not watcher.task.done()
        with monkeypatch.context() as patch:
            patch.setattr(status_stream, "MAX_STREAM_S", 0.05)
            await ends(Watcher(app))
        await backend.in_flight.drain(0)
        await ends(watcher)

    asyncio.run(talk())


def test_streams_are_bounded_and_those_that_end_make_room(make_app: Any, figures: Any):
    async def talk() -> None:
        app = make_app()
        watchers = [Watcher(app) for _ in range(MAX_STREAMS)]
        for watcher in watchers:
            await watcher.has(lambda one: len(one.events) == 1)
        refused = Watcher(app)
        await refused.task
        assert refused.sent[0]["status"] == 429 and b"the limit is 32" in refused.body
        assert b"retry-after" in dict(refused.sent[0]["headers"])
        await watchers.pop().leave()
        watchers.append(Watcher(app))
        await watchers[-1].has(lambda one: len(one.events) == 1)
        for watcher in watchers:
            await watcher.leave()

    asyncio.run(talk())


def test_head_ends_at_once(make_app: Any, figures: Any):
    async def talk() -> None:
        watcher = Watcher(make_app(), method="HEAD")
        async with asyncio.timeout(60):
            await watcher.task
        assert (watcher.sent[0]["status"], watcher.body) == (200, b"")

    asyncio.run(talk())
