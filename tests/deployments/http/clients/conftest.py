"""Unmodified SDKs against the real HTTP API over a scripted backend: they need the server's bytes, not a model.

Tests import the SDKs inside functions, as together these take ten seconds of CPU time to import.
"""

import base64
import gc
import importlib
import os
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import uvicorn

from deployments.http.app import create_app
from deployments.http.config import HttpConfig
from tests.deployments.http.clients.scripted import ScriptedBackend
from tests.e2e.pictures import image_part, shape
from tests.support.sdks.offline import OFFLINE

if TYPE_CHECKING:
    import anthropic
    import openai

os.environ.update(OFFLINE)

START_TIMEOUT_S = 60.0
KEEP_ALIVE_S = 600
"""An idle connection outlives the imports between two tests."""


class ServerThread:
    """The HTTP API of a scripted backend on a free port of loopback, served by uvicorn in a thread."""

    def __init__(self, http: HttpConfig | None = None, backend: ScriptedBackend | None = None):
        self.backend = backend or ScriptedBackend()
        app = create_app(self.backend, http or HttpConfig(), frozenset({"image"}))
        config = uvicorn.Config(app, log_config=None, lifespan="off", ws="none", timeout_keep_alive=KEEP_ALIVE_S)
        self._server = uvicorn.Server(config)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)
        self.base_url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def start(self) -> None:
        self._thread.start()
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._server.started:
            assert time.monotonic() < deadline and self._thread.is_alive()
            time.sleep(0.01)

    def stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()
        self._socket.close()


@pytest.fixture(scope="session")
def server() -> Iterator[ServerThread]:
    server = ServerThread()
    server.start()
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def backend(server: ServerThread) -> ScriptedBackend:
    server.backend.forget()
    return server.backend


@pytest.fixture(scope="session")
def base_url(server: ServerThread) -> str:
    return server.base_url


@pytest.fixture(scope="session")
def client(base_url: str) -> "Iterator[openai.OpenAI]":
    import openai

    with openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def claude(base_url: str) -> "Iterator[anthropic.Anthropic]":
    import anthropic

    with anthropic.Anthropic(base_url=base_url, api_key="none", max_retries=0, timeout=60) as claude:
        yield claude


@pytest.fixture(scope="session")
def red_circle() -> str:
    """A data: URL."""
    return image_part(shape("red", "circle"))["image_url"]["url"]


@pytest.fixture(scope="session")
def red_circle_png(red_circle: str) -> bytes:
    return base64.b64decode(red_circle.partition(",")[2])


@pytest.fixture(scope="module", autouse=True)
def sdks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Import the SDKs that a file names in SDKS, and close what they have left open when its tests have ended.

    No garbage is collected during the imports, and later collections leave out what was imported: see pytest_collection
    in tests/conftest.py. The sockets that SDKs leave to the garbage collector would fail whatever test runs then.
    """
    gc.disable()
    try:
        for name in request.module.SDKS:
            importlib.import_module(name)
    finally:
        gc.enable()
    gc.collect()
    gc.freeze()
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
