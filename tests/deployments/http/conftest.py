"""A backend that says what it is told to, and two ways to talk to the app in front of it."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from deployments.http.app import create_app
from deployments.http.backend import HAND_OVER_S
from deployments.http.config import HttpConfig
from deployments.http.errors import NodeNotFound
from deployments.http.figures import HttpFigures
from deployments.http.generation import TextDelta, ToolCall
from deployments.http.in_flight import InFlight
from deployments.http.timeline import RequestTimeline, Timelines
from deployments.metrics.catalog import METRICS
from deployments.metrics.node_figures import IngressFigures, NodeFigures
from deployments.metrics.text_format import text_of
from deployments.requests import ChatRequest, Embeddings, EmbedRequest, Route, ScoreRequest, Scores, SpecPrefillReport
from engine.errors import InvalidRequest
from engine.placement import TakenOver


class FakeGeneration:
    num_prompt_tokens = 7
    num_cached_tokens = 5
    num_skipped_tokens = 3
    node_ids = ()
    context_limited = False
    left_open: tuple[str, ...] = ()

    def __init__(self, script: list[Any], spec_prefill: SpecPrefillReport | None = None):
        self.spec_prefill = spec_prefill
        self._script = script
        self.num_closed = 0

    async def __aiter__(self) -> AsyncIterator[TextDelta]:
        for step in self._script:
            if isinstance(step, Exception):
                raise step
            if isinstance(step, asyncio.Event):
                await step.wait()
            else:
                yield step

    async def aclose(self) -> None:
        await asyncio.sleep(0)
        self.num_closed += 1


class FakeBackend:
    """script: deltas to yield, errors to raise, events to wait for. `start` runs start_script in the same way."""

    model_name = "org/demo"
    max_context_tokens = 4096

    def __init__(self):
        self.script: list[Any] = [TextDelta("Hel", 1), TextDelta("", 1), TextDelta("lo", 2, "stop")]
        self.start_script: list[Any] = []
        self.spec_prefill: SpecPrefillReport | None = None
        self.unready: str | None = None
        self.requests: list[tuple[ChatRequest, Route]] = []
        self.embeds: list[EmbedRequest] = []
        self.scores: list[ScoreRequest] = []
        self.generations: list[FakeGeneration] = []
        self.num_starts_cancelled = 0
        self.num_entries = 4
        self.drained = {"node-1": False}
        self.capacity = 256
        self.in_flight = InFlight(lambda: self.capacity, max_choices=128)
        self.timelines = Timelines()
        self.figures = HttpFigures()

    async def timeline(self, id: str) -> RequestTimeline | None:
        return self.timelines.find(id)

    async def start(self, request: ChatRequest, route: Route) -> FakeGeneration:
        self.requests.append((request, route))
        try:
            async for _ in FakeGeneration(self.start_script):
                pass
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            self.num_starts_cancelled += 1
            raise
        self.generations.append(FakeGeneration(self.script, self.spec_prefill))
        return self.generations[-1]

    async def embed(self, request: EmbedRequest) -> Embeddings:
        """Text i has the vector (i, 1, 0); one token per character or token id."""
        self.embeds.append(request)
        async for _ in FakeGeneration(self.start_script):
            pass
        vectors = tuple(np.array([i, 1, 0], "<f4").tobytes() for i in range(len(request.prompts)))
        return Embeddings(vectors, sum(map(len, request.prompts)))

    async def score(self, request: ScoreRequest) -> Scores:
        """A document with n characters has the score n / 10; one token per character."""
        self.scores.append(request)
        async for _ in FakeGeneration(self.start_script):
            pass
        values = tuple(len(document) / 10 for document in request.documents)
        return Scores(values, sum(map(len, (*request.queries, *request.documents))))

    async def count_tokens(self, request: ChatRequest, route: Route) -> int:
        self.requests.append((request, route))
        async for _ in FakeGeneration(self.start_script):
            pass
        return 11

    async def token_ids(self, request: ChatRequest, route: Route) -> list[int]:
        """The characters of a raw prompt or of all texts; a picture is one token more."""
        self.requests.append((request, route))
        async for _ in FakeGeneration(self.start_script):
            pass
        prompt = request.raw_prompt
        text = prompt if isinstance(prompt, str) else "".join(str(message["content"]) for message in request.messages)
        return [ord(character) for character in text] + [0] * (route is Route.MLLM)

    async def text_of(self, token_ids: Sequence[int], field: str) -> str:
        for i, token_id in enumerate(token_ids):
            if token_id >= 0x110000:
                raise InvalidRequest(f"The token id at index {i} is {token_id}.", field)
        return "".join(map(chr, token_ids))

    async def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        return [chr(token_id) for token_id in token_ids]

    async def cancel(self, request_id: str) -> bool:
        return self.in_flight.cancel(request_id)

    async def status(self) -> dict[str, Any]:
        return {"num_running": 3}

    async def metrics(self, shows_names: bool) -> bytes:
        """Those of a node whose engine does not answer."""
        http = self.figures if shows_names else self.figures.without_names()
        return text_of(METRICS, NodeFigures(model=self.model_name, ingress=IngressFigures(http=http)))

    async def cache_status(self) -> dict[str, Any]:
        return {"totals": {"entries": self.num_entries}}

    async def clear_cache(self) -> dict[str, Any]:
        num_entries, self.num_entries = self.num_entries, 0
        return {"cleared": {"entries": num_entries}}

    async def drain_node(self, node_id: str, deadline_s: float = HAND_OVER_S) -> TakenOver:
        if node_id not in self.drained:
            raise NodeNotFound(node_id)
        self.drained[node_id] = True
        return TakenOver(3, 2, 5, 10**6, deadline_s, {"deadline": 1})

    async def undo_drain(self, node_id: str) -> None:
        if node_id not in self.drained:
            raise NodeNotFound(node_id)
        self.drained[node_id] = False

    async def not_started(self) -> str | None:
        return await self.not_ready()

    async def not_ready(self) -> str | None:
        return self.unready


class Connection:
    """One raw ASGI request: the app sees its client leave when `left` is set. With `is_slow` only the first half of the
    body comes, the second one when `goes_on` is set."""

    def __init__(self, app: FastAPI, body: dict[str, Any] | bytes, headers: dict[str, str]):
        self.app = app
        self.client: tuple[str, int] | None = None
        self.path = "/v1/chat/completions"
        self._headers = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        self._body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._body_sent = False
        self.is_slow = False
        self.num_received = 0
        self.goes_on = asyncio.Event()
        self.left = asyncio.Event()
        self.sent: list[Any] = []

    async def run(self) -> None:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), *self._headers],
            "client": self.client,
        }
        await self.app(scope, self._receive, self._send)

    async def _receive(self) -> Any:
        self.num_received += 1
        if self.is_slow and self.num_received == 1:
            half = len(self._body) // 2
            first, self._body = self._body[:half], self._body[half:]
            return {"type": "http.request", "body": first, "more_body": True}
        if self.is_slow:
            await self._until_it_goes_on_or_leaves()
        if not self._body_sent and not self.left.is_set():
            self._body_sent = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _until_it_goes_on_or_leaves(self) -> None:
        waits = [asyncio.ensure_future(event.wait()) for event in (self.goes_on, self.left)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        return self.sent[0]["status"]

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


def assert_refused(response: Any, backend: FakeBackend, param: str, named: list[str]) -> None:
    """A 400 that names the field and these values, and nothing has begun."""
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, None)
    for value in [param, *named]:
        assert value in error["message"]
    assert backend.requests == []


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def make_app(backend: FakeBackend) -> Callable[..., FastAPI]:
    def make(media_kinds: frozenset[str] = frozenset({"image"}), converters: Any = None, **config: Any) -> FastAPI:
        return create_app(backend, HttpConfig(**config), media_kinds, converters=converters)

    return make


@pytest.fixture
def send(make_app: Callable[..., FastAPI]) -> Callable[..., httpx.Response]:
    """send(method, path, app=..., **what httpx takes)."""

    def send_one(method: str, path: str, app: FastAPI | None = None, **kwargs: Any) -> httpx.Response:
        async def talk() -> httpx.Response:
            transport = httpx.ASGITransport(app or make_app())
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                headers = {"Content-Type": "application/json", **kwargs.pop("headers", {})}
                return await client.request(method, path, headers=headers, **kwargs)

        return asyncio.run(talk())

    return send_one


@pytest.fixture
def chat(send: Callable[..., httpx.Response]) -> Callable[..., httpx.Response]:
    """chat(temperature=3): a completion request with these fields besides the least that is needed."""

    def complete(app: FastAPI | None = None, **fields: Any) -> httpx.Response:
        body = {"model": "org/demo", "messages": [{"role": "user", "content": "Hi"}], **fields}
        return send("POST", "/v1/chat/completions", app=app, content=json.dumps(body))

    return complete


@pytest.fixture
def connect(make_app: Callable[..., FastAPI]) -> Callable[..., Connection]:
    def connection(
        headers: dict[str, str] | None = None,
        config: dict[str, Any] | None = None,
        app: FastAPI | None = None,
        **fields: Any,
    ) -> Connection:
        body = {"model": "org/demo", "messages": [{"role": "user", "content": "Hi"}], **fields}
        return Connection(app or make_app(**(config or {})), body, headers or {})

    return connection


def parts_of(call: ToolCall, *borders: int, is_cut_off: bool = False) -> list[ToolCall]:
    """A call in parts that end at these characters of its arguments, if not in an escape; cut off: without the last."""
    places = {border % (len(call.arguments) + 1) for border in borders} | {0, len(call.arguments)}
    ends = sorted(at for at in places if (len(call.arguments[:at]) - len(call.arguments[:at].rstrip("\\"))) % 2 == 0)
    texts = [call.arguments[a:b] for a, b in pairwise(ends)] or [""]
    last = len(texts) - 1
    parts = [replace(call, arguments=text, is_first=i == 0, is_last=i == last) for i, text in enumerate(texts)]
    return (
        [replace(part, is_last=False) for part in parts[:-1] or [replace(call, arguments="")]] if is_cut_off else parts
    )
