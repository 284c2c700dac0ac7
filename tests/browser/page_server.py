"""PageServer: a real HTTP server for the browser, in a thread of the test, with three apps behind one port.

| path | app |
|---|---|
| `/` | the whole graph with the demo model |
| `/keyed/` | the same graph with API keys |
| `/scripted/` | a backend that answers as a test says |

The last two have a path prefix, which is removed as by a gateway.
"""

import asyncio
import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.http.app import create_app
from deployments.http.config import HttpConfig
from tests.deployments.demo_graph import DemoGraph
from tests.deployments.http.conftest import FakeBackend
from tests.e2e.server import free_port

START_TIMEOUT_S = 120.0
WAIT_S = 60.0
ADMIN, ANN = "key-of-the-administrator", "key-of-ann"
IMAGES = frozenset({"image"})


class PageServer:
    """The server; it runs until `close`.

    Attributes:
        scripted: The backend of `/scripted/`.
        url: Without a slash at the end.
    """

    def __init__(self, folder: Path):
        self.scripted = FakeBackend()
        self.paths = Counter[str]()
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._keys = folder / "keys.json"
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._is_up.wait(START_TIMEOUT_S)

    def _run(self) -> None:
        self.house = DemoGraph(is_warm=True, prefix_cache={"enabled": True})
        self._app = self._make_app()
        try:
            self.house.run(self._serve)
        finally:
            self.house.close()

    def _make_app(self) -> ASGIApp:
        keys = [("root", ADMIN, True), ("ann", ANN, False)]
        self._keys.write_text(json.dumps([_entry(*key) for key in keys]))
        self._keys.chmod(0o600)
        keyed = create_app(self.ingress, HttpConfig(api_keys_file=str(self._keys)), IMAGES)
        scripted = create_app(self.scripted, HttpConfig(), IMAGES)
        return _Prefixes(self.house.graph.app, {"/keyed": keyed, "/scripted": scripted}, self.paths)

    @property
    def ingress(self) -> Any:
        return self.house.graph.replicas["ingress"]

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        await self._listen()
        self._is_up.set()
        await self._end.wait()
        await self._hang_up()

    async def _listen(self) -> None:
        config = uvicorn.Config(self._app, "127.0.0.1", self._port, log_level="warning", lifespan="off")
        self._server = uvicorn.Server(config)
        self._listening = asyncio.ensure_future(self._server.serve())
        while not self._server.started:
            await asyncio.sleep(0.01)

    async def _hang_up(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        for connection in list(self._server.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await self._listening

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the server's loop and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(START_TIMEOUT_S)

    def run_soon(self, work: Callable[[], None]) -> None:
        """Call a function in the server's loop."""
        self._loop.call_soon_threadsafe(work)

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait until something is true in the server."""
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, "this has not become true"
            time.sleep(0.01)

    def num_connections(self, path: str) -> int:
        """Return how many requests for a path are being answered."""
        return self.paths[path]

    def go_away(self) -> None:
        """Close the port and all connections, as when the process ends."""
        self.call(self._hang_up())

    def come_back(self) -> None:
        self.call(self._listen())

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(START_TIMEOUT_S)


class _Prefixes:
    """Hands requests below a prefix to its app, without the prefix. Counts those that are being answered by path."""

    def __init__(self, app: FastAPI, others: dict[str, FastAPI], paths: Counter[str]):
        self._app = app
        self._others = others
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._paths[scope["path"]] += 1
        try:
            await self._pass(scope, receive, send)
        finally:
            self._paths[scope["path"]] -= 1

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        for prefix, app in self._others.items():
            if scope["path"].startswith(prefix + "/"):
                path = scope["path"].removeprefix(prefix)
                return await app({**scope, "path": path, "raw_path": path.encode()}, receive, send)
        await self._app(scope, receive, send)


def _entry(name: str, key: str, is_administrative: bool) -> dict[str, Any]:
    hash_ = "sha256:" + hashlib.sha256(key.encode()).hexdigest()
    return {"hash": hash_, "name": name, "is_administrative": is_administrative}
