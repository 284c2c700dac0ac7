"""One real server for all tests with the mark `server`."""

from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.e2e.server import ServeRun, serve_run


@pytest.fixture(scope="session")
def server() -> Iterator[ServeRun]:
    with serve_run() as server:
        server.wait_ready()
        yield server
        assert server.stop() == 0, server.output[-4000:]


@pytest.fixture(scope="session")
def base_url(server: ServeRun) -> str:
    return server.base_url


@pytest.fixture(scope="session")
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="session")
def http(base_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=base_url, timeout=120) as http:
        yield http
