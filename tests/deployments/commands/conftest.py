"""The command `orchard` in this process, and the whole graph with the demo model behind a real HTTP server."""

import asyncio
import io
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from deployments.commands.program import main
from tests.deployments.demo_graph import DemoGraph

Orchard = Callable[..., tuple[int, str, str]]

START_TIMEOUT_S = 120.0
MAX_RUNNING = 2
"""Rows of the graph, so that a queue forms soon."""


@pytest.fixture
def orchard(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Orchard:
    """orchard(arguments, stdin=bytes): status, standard output and standard error, in an empty home folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("XDG_CONFIG_HOME", "ORCHARD_API_KEY"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: object, stdin: bytes | None = None) -> tuple[int, str, str]:
        with (tmp_path / "stdin").open("w+b") as file:
            file.write(stdin or b"")
            file.seek(0)
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(file))
            try:
                status = main([str(argument) for argument in arguments])
            except SystemExit as error:
                assert isinstance(error.code, int)
                status = error.code
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


class GraphServer:
    """The whole graph with the demo model, served over HTTP by a thread.

    Attributes:
        url: Its base URL.
        graph: None until it runs.
    """

    def __init__(self):
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.graph: DemoGraph | None = None
        self._server: uvicorn.Server | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        deadline = time.monotonic() + START_TIMEOUT_S
        while self._server is None or not self._server.started:
            assert time.monotonic() < deadline and self._thread.is_alive()
            time.sleep(0.02)

    def _run(self) -> None:
        self.graph = DemoGraph(max_running=MAX_RUNNING)
        config = uvicorn.Config(self.graph.graph.app, log_config=None, lifespan="off", ws="none")
        self._server = uvicorn.Server(config)
        self.graph.run(lambda: self._serve())
        self.graph.close()

    async def _serve(self) -> Any:
        assert self._server is not None
        await self._server.serve([self._socket])
        await asyncio.sleep(0)

    def stop(self) -> None:
        assert self._server is not None
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()


@pytest.fixture(scope="module")
def graph_server() -> Iterator[GraphServer]:
    server = GraphServer()
    yield server
    server.stop()
