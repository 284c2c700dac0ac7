"""The servers that programs are run against: a real one with a model, and the HTTP API over a scripted backend."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deployments.http.config import HttpConfig
from tests.deployments.http.clients.conftest import ServerThread
from tests.deployments.http.clients.scripted import ScriptedBackend
from tests.e2e.programs.catalogue import SERVED_NAMES
from tests.e2e.server import serve_run
from tests.support import smollm2


@contextlib.contextmanager
def model_server(model: str, folder: Path) -> Iterator[str]:
    """Start the shipped configuration with the demo or with SmolLM2; yields its URL."""
    checkpoint = None if model == "demo" else smollm2.make(folder)

    def change(config: dict[str, Any]) -> None:
        args = config["applications"][0]["args"]
        args["http"] = {"served_model_names": [*SERVED_NAMES[1:]]}
        if checkpoint is not None:
            args["served_model_name"] = SERVED_NAMES[0]
            args["engine"]["model"] = str(checkpoint)
            args["spec_prefill"] = {"enabled": False}

    with serve_run(change) as server:
        server.wait_ready()
        yield server.base_url
        assert server.stop() == 0, server.output[-4000:]


@contextlib.contextmanager
def scripted_server(backend: ScriptedBackend | None = None) -> Iterator[str]:
    """Start the HTTP API in a thread; a backend that answers every question at once."""
    server = ServerThread(HttpConfig(served_model_names=SERVED_NAMES[1:]), backend)
    server.start()
    try:
        yield server.base_url
    finally:
        server.stop()
