"""SIGTERM while answers run: short ones end as they would, long ones are told why they end, new ones are refused."""

import json
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.server import DRAIN_S, ServeRun
from tests.e2e.test_serving import LONG

pytestmark = pytest.mark.server

EXIT_S = 120.0
SHORT, ENDLESS = 30, 20_000
"""Tokens. On two slow cores a dozen take a second, with three answers at once."""


class Client(threading.Thread):
    """One request whose answer has exactly so many tokens, if nothing comes between."""

    def __init__(self, base_url: str, num_tokens: int, stream: bool):
        super().__init__(daemon=True)
        self._url = f"{base_url}/v1/chat/completions"
        self._num_tokens = num_tokens
        self._stream = stream
        self.status = 0
        self.headers: httpx.Headers = httpx.Headers()
        self.lines: list[str] = []
        self.broke: Exception | None = None

    def run(self) -> None:
        messages = [{"role": "user", "content": LONG}]
        exactly = {"max_tokens": self._num_tokens, "min_tokens": self._num_tokens, "temperature": 0}
        body = {"model": "demo", "messages": messages, "stream": self._stream, **exactly}
        try:
            with httpx.stream("POST", self._url, json=body, timeout=EXIT_S) as response:
                self.status, self.headers = response.status_code, response.headers
                for line in response.iter_lines():
                    self.lines.append(line)
        except httpx.HTTPError as error:
            self.broke = error

    @property
    def events(self) -> list[str]:
        return [line.removeprefix("data: ") for line in self.lines if line and not line.startswith(":")]

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.events[-1])["error"]


def poll(condition: Callable[[], bool], timeout_s: float, explain: Callable[[], Any]) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.05)


def refusal_of(server: ServeRun) -> httpx.Response:
    """Return the response to a new client as soon as the server accepts no more requests."""
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    with httpx.Client(base_url=server.base_url, timeout=EXIT_S) as http:
        deadline = time.monotonic() + DRAIN_S
        while (response := http.post("/v1/chat/completions", json=body)).status_code == 200:
            assert time.monotonic() < deadline, server.output[-4000:]
        assert http.get("/health/ready").status_code == 503
        (ingress,) = http.get("/v1/status").json()["ingress"]
        assert ingress["is_draining"] and ingress["num_in_flight"] >= 1 and ingress["num_refused"] >= 1
    return response


def num_running(server: ServeRun) -> int:
    return httpx.get(f"{server.base_url}/v1/status", timeout=EXIT_S).json()["num_running"]


def test_sigterm_gives_running_answers_the_drain_time_and_refuses_new_requests(small_server: ServeRun):
    server = small_server
    processes = psutil.Process(server.process.pid).children(recursive=True)
    assert len(processes) > 4
    short = Client(server.base_url, SHORT, stream=True)
    endless = Client(server.base_url, ENDLESS, stream=True)
    whole = Client(server.base_url, ENDLESS, stream=False)
    whole.start()
    poll(lambda: num_running(server) == 1, 60, lambda: "the answer that is not streamed does not run")
    for client in (short, endless):
        client.start()
    poll(lambda: len(short.lines) > 8 and len(endless.lines) > 8, 60, lambda: (short.lines, endless.lines))
    server.process.send_signal(signal.SIGTERM)  # Ctrl-C: every other server of these tests
    refused = refusal_of(server)
    assert not short.events[-1].startswith('{"error"')
    for client in (short, endless, whole):
        client.join(EXIT_S)
        assert not client.is_alive() and client.broke is None, (client.broke, server.output[-4000:])
    assert server.process.wait(EXIT_S) == 0, server.output[-4000:]
    poll(lambda: not any(map(psutil.pid_exists, [p.pid for p in processes])), 30, lambda: processes)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
    assert int(refused.headers["retry-after"]) >= 1
    check_answers(short, endless, whole)


def check_answers(short: Client, endless: Client, whole: Client) -> None:
    assert short.events[-1] == "[DONE]"
    assert json.loads(short.events[-2])["choices"][0]["finish_reason"] == "length"
    late = f"The server is shutting down; the request did not finish within {DRAIN_S:g} s"
    for client, status in ((endless, 200), (whole, 503)):
        assert (client.status, client.error["code"]) == (status, "unavailable")
        assert late in client.error["message"]
    assert endless.error["retry_after_s"] >= 1 and int(whole.headers["retry-after"]) >= 1
