"""One real server for most tests with the mark `server`, and a small one that is killed and stopped."""

import gc
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.server import (
    DRAIN_S,
    MAX_QUEUE,
    MAX_RUNNING,
    ORCHARD_SERVE,
    SCORING_DEADLINE_S,
    SPARSE_THRESHOLD,
    RunningServer,
    Server,
    ServeRun,
    serve_run,
    wait_for_late,
)
from tests.schedule.groups import place_of


@pytest.fixture(scope="module", autouse=True)
def close_what_clients_left_open() -> Iterator[None]:
    """Some SDKs leave sockets to the garbage collector, whose warning would fail whatever test runs then."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


FAILING_STEP = Path(__file__).parent / "failing_step"
"""Makes the steps of test_logs fail, and no other ones."""

_running: list[Server] = []


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End servers behind their last tests: an idle one takes a third of a core from those that start next."""
    place, next_place = (test and place_of(test.nodeid.partition("::")[0]) for test in (item, nextitem))
    while _running and place != next_place:
        _running.pop().stop()


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The server that runs already, if .ci/run has named one: the one that README's first command has started."""
    if named := os.environ.get("ORCHARD_SERVER"):
        wait_for_late(named.partition(" ")[0])
        _running.append(running := RunningServer(named))
        yield running
        return
    with serve_run() as server:
        server.wait_complete()
        _running.append(server)
        yield server
        assert server.stop() == 0, server.output[-4000:]


@pytest.fixture(scope="session")
def small_server() -> Iterator[ServeRun]:
    """For the tests that kill its engine or its scorer, and then for the one that stops it: `test_stopping` is last.

    Started by `orchard serve`; the other one by `serve run`.
    """

    def make_it_small(config: dict[str, Any]) -> None:
        args = config["applications"][0]["args"]
        args["engine"].update(max_running=MAX_RUNNING, max_queue=MAX_QUEUE)
        args["spec_prefill"].update(threshold_tokens=SPARSE_THRESHOLD, deadline_s=SCORING_DEADLINE_S)
        args["drain_timeout_s"] = DRAIN_S

    with serve_run(make_it_small, {"PYTHONPATH": str(FAILING_STEP)}, ORCHARD_SERVE) as server:
        server.wait_complete()
        _running.append(server)
        yield server
        assert server.stop() == 0, server.output[-4000:]


@pytest.fixture(scope="session")
def base_url(server: Server) -> str:
    return server.base_url


@pytest.fixture(scope="session")
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="session")
def http(base_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=base_url, timeout=120) as http:
        yield http
