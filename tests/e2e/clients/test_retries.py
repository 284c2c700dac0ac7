"""A full queue: the SDKs wait as long as Retry-After says, and are answered in the end."""

import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.clients.questions import CAPITAL, CAPITAL_QUESTION, MODEL
from tests.e2e.server import MAX_QUEUE, MAX_RUNNING, ServeRun
from tests.support.sse import completions_url, post

pytestmark = pytest.mark.server

QUESTION: Any = [{"role": "user", "content": CAPITAL_QUESTION}]
FILL_TIMEOUT_S = 60.0
NIGHT = "in the gate one SDK meets overload, and all refusals come from a scripted backend"


class FullQueue:
    """Requests that hold every row and every place in the queue until the SDK under test has been refused once."""

    def __init__(self, base_url: str):
        self.base_url = base_url
        self.refusals: list[int] = []
        """Retry-After of each, in seconds."""
        self._connections: list[socket.socket] = []

    def fill(self) -> None:
        url = completions_url(f"{self.base_url}/v1")
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Tell me a story."}], "stream": True}
        request = post(url, {**body, "min_tokens": 2000, "max_tokens": 2000, "temperature": 0})
        for _ in range(MAX_RUNNING + MAX_QUEUE):
            connection = socket.create_connection((url.hostname or "", url.port or 0))
            connection.sendall(request)
            self._connections.append(connection)
        deadline = time.monotonic() + FILL_TIMEOUT_S
        while (found := self._num_requests()) != (MAX_RUNNING, MAX_QUEUE):
            assert time.monotonic() < deadline, found
            time.sleep(0.02)

    def _num_requests(self) -> tuple[int, int]:
        status = httpx.get(f"{self.base_url}/v1/status", timeout=30).json()["engines"][0]["engine"]
        return status["num_running"], status["num_waiting"]

    def response_came(self, response: Any) -> None:
        """An event hook of the SDK's HTTP client."""
        if response.status_code == 429:
            self.refusals.append(int(response.headers["retry-after"]))
            self.leave()

    def leave(self) -> None:
        while self._connections:
            self._connections.pop().close()


@pytest.fixture
def full_queue(small_server: ServeRun) -> Iterator[FullQueue]:
    full = FullQueue(small_server.base_url)
    full.fill()
    yield full
    full.leave()


def test_openai_is_answered_behind_a_refusal(full_queue: FullQueue):
    import openai

    hooks: Any = {"response": [full_queue.response_came]}
    with openai.OpenAI(
        base_url=f"{full_queue.base_url}/v1",
        api_key="none",
        max_retries=5,
        http_client=openai.DefaultHttpxClient(event_hooks=hooks),
    ) as client:
        raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=QUESTION)
    assert raw.parse().choices[0].message.content == CAPITAL
    assert raw.retries_taken == len(full_queue.refusals) >= 1
    assert all(1 <= seconds <= 60 for seconds in full_queue.refusals)


@pytest.mark.night(NIGHT)
def test_anthropic_is_answered_behind_a_refusal(full_queue: FullQueue):
    import anthropic

    hooks: Any = {"response": [full_queue.response_came]}
    with anthropic.Anthropic(
        base_url=full_queue.base_url,
        api_key="none",
        max_retries=5,
        http_client=anthropic.DefaultHttpxClient(event_hooks=hooks),
    ) as client:
        raw = client.messages.with_raw_response.create(model=MODEL, max_tokens=50, messages=QUESTION)
    [block] = raw.parse().content
    assert block.type == "text" and block.text == CAPITAL
    assert raw.retries_taken == len(full_queue.refusals) >= 1


@pytest.mark.night(NIGHT)
def test_sdks_without_retries_raise_the_overload_error_of_the_server(full_queue: FullQueue):
    import anthropic
    import openai

    with (
        openai.OpenAI(base_url=f"{full_queue.base_url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.RateLimitError) as caught,
    ):
        client.chat.completions.create(model=MODEL, messages=QUESTION)
    assert caught.value.code == "overloaded"
    with (
        anthropic.Anthropic(base_url=full_queue.base_url, api_key="none", max_retries=0) as client,
        pytest.raises(anthropic.RateLimitError) as caught_by_anthropic,
    ):
        client.messages.create(model=MODEL, max_tokens=50, messages=QUESTION)
    body: Any = caught_by_anthropic.value.body
    assert body["error"]["type"] in ("rate_limit_error", "overloaded_error")
