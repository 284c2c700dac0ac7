"""GET /metrics of an app: its counters are those of its clients, to the last token."""

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from deployments.http.dialects import DIALECTS
from deployments.http.figures import LIMITS
from deployments.http.generation import TextDelta
from deployments.http.response_counter import APIS, api_of
from engine.errors import EngineFailed, Overloaded, QueueTimeout, Unavailable
from tests.deployments.http.conftest import Connection, FakeBackend

ADMIN, ANN, BOB = "key-of-the-administrator", "key-of-ann", "key-of-bob"
KNOWN = {**APIS, **DIALECTS.apis}
MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = {"model": "org/demo", "messages": MESSAGES}
USAGE = {"include_usage": True}
NO_REFUSALS = {(limit,): 0 for limit in LIMITS}

Counts = dict[str, dict[tuple[str, ...], float]]


class Client:
    """Sends requests, and counts what it gets as a client can."""

    def __init__(self, app: FastAPI):
        self.app = app
        self.statuses: Counter[tuple[str, str]] = Counter()
        self.errors: Counter[tuple[str, str]] = Counter()
        self.answers: Counter[str] = Counter()
        self.tokens: Counter[tuple[str, str]] = Counter()

    def scrape(self, key: str = "") -> Counts:
        return counters(self._send("GET", "/metrics", key).text)

    def ask(self, path: str, body: Any, key: str = "", name: str = "none") -> httpx.Response:
        """Send a request, and count its answer for the key of this name."""
        response = self._send("POST", path, key, body)
        self.statuses[api_of(path, KNOWN), str(response.status_code)] += 1
        sent = _events(response.text) if _is_stream(response) else [response.json()]
        for one in sent:
            if one.get("error") is not None:
                self._count_error(response, one["error"])
                return response
        self.answers[name] += 1
        for kind, num in _usage(sent).items():
            self.tokens[name, kind] += num
        return response

    def _count_error(self, response: httpx.Response, error: dict[str, Any]) -> None:
        status = str(response.status_code)
        if _is_stream(response):
            status = "503" if error["code"] == "unavailable" else "500"
        self.errors[status, error["code"] or error["type"]] += 1

    def _send(self, method: str, path: str, key: str, body: Any = None) -> httpx.Response:
        async def talk() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, client=("10.0.0.7", 5000) if key else ("127.0.0.1", 123))
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as http:
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                return await http.request(method, path, headers=headers, json=body)

        return asyncio.run(talk())


def _events(text: str) -> list[Any]:
    """Return the data of all server-sent events but the closing `[DONE]`."""
    sent = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(data) for data in sent if data != "[DONE]"]


def _is_stream(response: httpx.Response) -> bool:
    return response.headers.get("content-type", "").startswith("text/event-stream")


def _usage(sent: list[Any]) -> dict[str, int]:
    """Return the last usage in an answer of any dialect."""
    found = [usage for one in sent for usage in (one.get("usage"), (one.get("response") or {}).get("usage")) if usage]
    started = [one["message"]["usage"] for one in sent if one.get("type") == "message_start"]
    usage = {**(started[0] if started else {}), **(found[-1] if found else {})}
    if "cache_read_input_tokens" in usage:
        cached = usage["cache_read_input_tokens"]
        return {"prompt": usage["input_tokens"] + cached, "cached": cached, "completion": usage["output_tokens"]}
    if "input_tokens" in usage:
        cached = usage["input_tokens_details"]["cached_tokens"]
        return {"prompt": usage["input_tokens"], "cached": cached, "completion": usage["output_tokens"]}
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    prompt, completion = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    return {"prompt": prompt, "cached": cached, "completion": completion}


def counters(text: str) -> Counts:
    """Return the counters by name and the values of their labels, without the model."""
    found: Counts = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values = tuple(value for name, value in sample.labels.items() if name not in ("model_name", "engine"))
            found.setdefault(family.name, {})[values] = sample.value
    return found


@pytest.fixture
def client(make_app: Callable[..., FastAPI]) -> Client:
    return Client(make_app())


def assert_equal(client: Client, counts: Counts) -> None:
    assert counts.get("orchard:http_responses", {}) == client.statuses
    assert counts.get("orchard:http_errors", {}) == client.errors
    assert counts.get("orchard:key_answers", {}) == {(name,): num for name, num in client.answers.items()}
    assert counts.get("orchard:key_tokens", {}) == client.tokens


def test_counters_are_those_of_the_clients(client: Client, backend: FakeBackend):
    two = [TextDelta("a", 2, "stop", 0), TextDelta("b", 3, "length", 1)]
    client.ask("/v1/chat/completions", CHAT)
    client.ask("/v1/chat/completions", CHAT | {"stream": True, "stream_options": USAGE})
    client.ask("/v1/responses", {"model": "org/demo", "input": "Hi"})
    client.ask("/v1/responses", {"model": "org/demo", "input": "Hi", "stream": True})
    client.ask("/v1/messages", CHAT | {"max_tokens": 9})
    client.ask("/v1/messages", CHAT | {"max_tokens": 9, "stream": True})
    client.ask("/v1/completions", {"model": "org/demo", "prompt": "Hi"})
    client.ask("/v1/completions", {"model": "org/demo", "prompt": "Hi", "stream": True, "stream_options": USAGE})
    client.ask("/v1/embeddings", {"model": "org/demo", "input": ["Hi", "there"]})
    client.ask("/v1/rerank", {"model": "org/demo", "query": "Hi", "documents": ["there"]})
    client.ask("/score", {"model": "org/demo", "text_1": "Hi", "text_2": "there"})
    client.ask("/tokenize", {"model": "org/demo", "prompt": "Hi"})
    backend.script = two
    client.ask("/v1/chat/completions", CHAT | {"n": 2})
    client.ask("/v1/chat/completions", CHAT | {"n": 2, "stream": True, "stream_options": USAGE})
    assert client.tokens["none", "completion"] == 8 * 4 + 2 * 5
    assert_equal(client, client.scrape())
    assert_equal(client, client.scrape())  # a scrape does not count itself


def test_a_stream_without_usage_counts_as_much_as_one_with_it(client: Client):
    client.ask("/v1/chat/completions", CHAT | {"stream": True})
    tokens = {kind: num for (_, kind), num in client.scrape()["orchard:key_tokens"].items()}
    assert tokens == {"prompt": 7, "cached": 5, "completion": 4}


def test_errors_are_counted_also_in_streams_that_had_begun(client: Client, backend: FakeBackend):
    client.ask("/v1/chat/completions", CHAT | {"temperature": "hot"})
    client.ask("/v1/chat/completions", {**CHAT, "model": "other"})
    client.ask("/v1/nothing", {})
    for error in (EngineFailed("broken"), Unavailable("away")):
        backend.script = [TextDelta("Hel", 1), error]
        client.ask("/v1/chat/completions", CHAT)
        client.ask("/v1/chat/completions", CHAT | {"stream": True, "stream_options": USAGE})
    assert sum(client.errors.values()) == 7
    assert not client.answers
    assert_equal(client, client.scrape())


def test_refusals_are_counted_by_the_limit(client: Client, backend: FakeBackend, make_app: Callable[..., FastAPI]):
    backend.capacity = 0
    assert client.scrape()["orchard:refusals"] == NO_REFUSALS, "a first refusal is a rise from 0"
    client.ask("/v1/chat/completions", CHAT)
    backend.capacity = 9
    for error in (Overloaded("images", 1.0, "image_memory_mb"), QueueTimeout("late", 1.0, "queue_timeout_s")):
        backend.start_script = [error]
        client.ask("/v1/chat/completions", CHAT)
    expected = {("max_queue",): 1, ("image_memory_mb",): 1, ("queue_timeout_s",): 1}
    counts = client.scrape()
    assert counts["orchard:refusals"] == NO_REFUSALS | expected
    assert_equal(client, counts)
    small = Client(make_app(max_body_bytes=1024))
    small.ask("/v1/chat/completions", CHAT | {"user": "x" * 1024})
    assert small.scrape()["orchard:refusals"] == NO_REFUSALS | expected | {("max_body_bytes",): 1}, "the same backend"


def test_a_client_that_leaves_gets_no_usage(client: Client, backend: FakeBackend):
    held = asyncio.Event()
    backend.script = [TextDelta("Hel", 1), held]

    async def leave() -> None:
        connection = Connection(client.app, CHAT | {"stream": True}, {"Host": "127.0.0.1"})
        running = asyncio.ensure_future(connection.run())
        while not connection.sent:
            await asyncio.sleep(0.01)
        connection.left.set()
        await running

    asyncio.run(leave())
    counts = client.scrape()
    assert counts["orchard:http_responses"] == {("chat", "200"): 1}
    assert not {"orchard:key_answers", "orchard:key_tokens", "orchard:http_errors"} & set(counts)


@pytest.fixture
def keyed(make_app: Callable[..., FastAPI], tmp_path: Path) -> Client:
    path = tmp_path / "keys.json"
    limits = {"root": {"is_administrative": True}, "ann": {"max_requests_per_minute": 2}, "bob": {}}
    hashes = [
        {"hash": "sha256:" + hashlib.sha256(key.encode()).hexdigest(), "name": name, **limits[name]}
        for key, name in ((ADMIN, "root"), (ANN, "ann"), (BOB, "bob"))
    ]
    path.write_text(json.dumps(hashes))
    path.chmod(0o600)
    return Client(make_app(api_keys_file=str(path)))


def test_tokens_are_counted_by_key_and_only_administrators_see_the_names(keyed: Client):
    for key, name in ((ANN, "ann"), (ANN, "ann"), (ANN, "ann"), (BOB, "bob")):
        keyed.ask("/v1/chat/completions", CHAT, key, name)
    assert keyed.answers == {"ann": 2, "bob": 1}, "the third one of Ann is refused"
    counts = keyed.scrape(ADMIN)
    assert_equal(keyed, counts)
    assert counts["orchard:refusals"] == NO_REFUSALS | {("max_requests_per_minute",): 1}
    text = keyed._send("GET", "/metrics", BOB).text
    assert "ann" not in text and "bob" not in text
    hidden = counters(text)
    assert hidden["orchard:key_answers"] == {("all",): 3}
    assert hidden["orchard:key_tokens"] == {("all", "prompt"): 21, ("all", "cached"): 15, ("all", "completion"): 12}
    assert hidden["orchard:http_responses"] == counts["orchard:http_responses"]


def test_a_scraper_needs_a_key_where_others_do(keyed: Client):
    refused = keyed._send("GET", "/metrics", "wrong")
    assert refused.status_code == 401
    assert keyed.scrape(ADMIN)["orchard:http_responses"] == {("other", "401"): 1}


def test_the_answer_is_prometheus_text(client: Client):
    response = client._send("GET", "/metrics", "")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"


@pytest.mark.parametrize(
    ("path", "api"),
    [
        ("/v1/chat/completions", "chat"),
        ("/v1/chat/completions/chatcmpl-1/cancel", "chat"),
        ("/v1/responses/resp_1", "responses"),
        ("/v1/messages/count_tokens", "messages"),
        ("/v1/tokenize", "tokenization"),
        ("/health/ready", "health"),
        ("/v1/chat", "other"),
        ("/", "other"),
        ("", "other"),
    ],
)
def test_paths_belong_to_apis(path: str, api: str):
    assert api_of(path, KNOWN) == api
