"""The API in front of a backend that says what a request leads one to expect, and what it answers to recorded clients.

Every delta comes in the same pieces each time, so the bytes of streams are always the same.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx

from deployments.http.app import create_app
from deployments.http.config import HttpConfig
from deployments.http.generation import TextDelta, ToolCall
from deployments.requests import ChatRequest, Route
from tests.deployments.http.conftest import FakeBackend, FakeGeneration, parts_of
from tests.e2e.clients.captured import Captured, Filling, fill
from tests.e2e.pictures import image_part, shape

BASE_URL = "http://127.0.0.1:8000"
PNG = image_part(shape("red", "circle"))["image_url"]["url"].partition(",")[2]
"""base64"""
HELLO = [{"role": "user", "content": "Hello!"}]


def script(request: ChatRequest) -> list[TextDelta]:
    """Return the deltas of every choice: a thought if it is asked for, text, and a call of the first tool, if any."""
    deltas = []
    for i in range(request.num_choices):
        if request.thinking is not None:
            thought = ("I am", " sure.")
            deltas += [TextDelta("", 2, index=i, reasoning=text, num_reasoning_tokens=2) for text in thought]
        deltas += [TextDelta(text, 1, index=i) for text in ("Good ", "", "mörning")]
        if request.tools:
            arguments = json.dumps({"path": "a.txt", "text": 'say "hi"\n'})
            call = ToolCall(f"call_{i:024x}", request.tools[0].name, arguments)
            deltas += [TextDelta("", 3, index=i, tool_calls=(part,)) for part in parts_of(call, 5, 20)]
        deltas.append(TextDelta("", 1, "tool_calls" if request.tools else "stop", index=i))
    return deltas


class ScriptedBackend(FakeBackend):
    model_name = "demo"

    async def start(self, request: ChatRequest, route: Route) -> FakeGeneration:
        self.script = script(request)
        return await super().start(request, route)


async def answers(requests: Sequence[Captured]) -> AsyncIterator[tuple[Captured, httpx.Response]]:
    """Yield the answer to each request, in order."""
    app = create_app(ScriptedBackend(), HttpConfig(), frozenset({"image"}))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=BASE_URL) as http:
        thought, sealed, response_id = await _of_this_server(http)
        for one in requests:
            filling = Filling(PNG, sealed if one.path == "/v1/responses" else thought, max_text_chars=12)
            yield one, await _answer(http, one, filling, response_id)


async def _of_this_server(http: httpx.AsyncClient) -> tuple[str, str, str]:
    """Return what only the server can make: a sealed thought of each dialect, and the id of a stored response."""
    thinking = {"thinking": {"type": "adaptive"}, "messages": HELLO}
    message = (await http.post("/v1/messages", json={"model": "demo", "max_tokens": 50, **thinking})).json()
    reasoning = {"reasoning": {"effort": "low"}, "include": ["reasoning.encrypted_content"]}
    response = (
        await http.post("/v1/responses", json={"model": "demo", "input": "Hello!", "store": True, **reasoning})
    ).json()
    sealed = next(item["encrypted_content"] for item in response["output"] if item["type"] == "reasoning")
    return message["content"][0]["signature"], sealed, response["id"]


async def _answer(http: httpx.AsyncClient, one: Captured, filling: Filling, response_id: str) -> httpx.Response:
    path = one.path.replace("orchard-demo", "demo")
    if one.body is None:
        return await http.request(one.method, path, params=one.query, headers=one.headers)
    body: dict[str, Any] = {**fill(one.body, filling), "model": "demo"}
    if "previous_response_id" in body:
        body["previous_response_id"] = response_id
    return await http.post(path, params=one.query, headers=one.headers, json=body)


def send(requests: Sequence[Captured]) -> list[tuple[Captured, httpx.Response]]:
    async def go() -> list[tuple[Captured, httpx.Response]]:
        return [pair async for pair in answers(requests)]

    return asyncio.run(go())
