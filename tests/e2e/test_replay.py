"""Recorded requests of real clients: each is answered, or refused by the name of a field that it would be dishonest to
accept."""

import base64
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from deployments.http.errors import InvalidRequest
from deployments.http.parsed_request import ReadingRules
from deployments.http.request_reader import read_request
from tests.e2e.clients.captured import Captured, Filling, distinct, fill, load
from tests.e2e.pictures import image_part, shape

REFUSED = {
    ("/v1/messages", "safeguards"): "asks the server to judge tool calls, which nothing here can",
    ("/v1/messages", "thread"): "sends the new message alone; without a store of threads it is nonsense",
}
"""Path and field (indices left out) -> why a 400 is the honest answer."""

MAX_TEXT_CHARS = 12
AT_ONCE = 4
MAX_ANSWER_TOKENS = 4
BUDGETS = {
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens"),
    "/v1/completions": ("max_tokens",),
    "/v1/messages": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
}
REAL_ENGINE = pytest.mark.night("the gate freezes the answers of a scripted backend to these requests")
DIALECTS: dict[str, Any] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
}

CAPTURED = load()


PNG = base64.b64decode(image_part(shape("red", "circle"))["image_url"]["url"].partition(",")[2])


def with_short_answer(body: dict[str, Any], path: str) -> dict[str, Any]:
    names = BUDGETS.get(path, ())
    lowered = {name: min(MAX_ANSWER_TOKENS, body[name]) for name in names if name in body}
    return {**body, **(lowered or dict.fromkeys(names[:1], MAX_ANSWER_TOKENS))}


def refused_field(path: str, error: dict[str, Any]) -> str:
    """The field that an error body names, without indices. Anthropic's dialect has it in front of the message."""
    field = error.get("param")
    if path.startswith("/v1/messages"):
        found = re.match(r"([\w.]+): ", error["message"])
        field = found[1] if found else None
    return re.sub(r"\.\d+(?=\.|$)", "[]", re.sub(r"\[\d+\]", "[]", field or ""))


class Replay:
    """Sends recorded requests to the server, with what must come from it: signatures and a stored response."""

    def __init__(self, http: httpx.Client, thought: str, sealed: str, response_id: str):
        png = base64.b64encode(PNG).decode()
        self._http = http
        self._fillings = {
            "/v1/messages": Filling(png, thought, MAX_TEXT_CHARS),
            "/v1/responses": Filling(png, sealed, MAX_TEXT_CHARS),
        }
        self._plain = Filling(png, "", MAX_TEXT_CHARS)
        self._response_id = response_id
        self.refused: dict[tuple[str, str], list[str]] = defaultdict(list)

    def problem(self, captured: Captured) -> str | None:
        """Why the answer to a request is not what it should be."""
        response = self._send(captured)
        if response.is_success:
            return None if "error" not in _last_event(response) else f"{captured.name}: {response.text[-300:]}"
        if response.status_code == 400:
            refusal = captured.path, refused_field(captured.path, response.json()["error"])
            if refusal in REFUSED:
                self.refused[refusal].append(captured.name)
                return None
        return f"{captured.name}: {response.status_code} {response.text[:300]}"

    def _send(self, captured: Captured) -> httpx.Response:
        path = captured.path.replace("orchard-demo", "demo")
        if captured.body is None:
            return self._http.request(captured.method, path, params=captured.query, headers=captured.headers)
        filled = fill(captured.body, self._fillings.get(captured.path, self._plain))
        body = {**with_short_answer(filled, captured.path), "model": "demo"}
        if "previous_response_id" in body:
            body["previous_response_id"] = self._response_id
        return self._http.post(path, params=captured.query, headers=captured.headers, json=body)


def _last_event(response: httpx.Response) -> Any:
    if not response.headers.get("content-type", "").startswith("text/event-stream"):
        return {}
    data = [
        line[5:] for line in response.text.splitlines() if line.startswith("data:") and line[5:].strip() != "[DONE]"
    ]
    return {key: value for key, value in json.loads(data[-1]).items() if key != "error" or value}


@pytest.fixture(scope="module")
def replay(http: httpx.Client) -> Iterator[Replay]:
    thinking = {"thinking": {"type": "adaptive"}, "messages": [{"role": "user", "content": "Hello!"}]}
    message = http.post("/v1/messages", json={"model": "demo", "max_tokens": 50, **thinking}).raise_for_status().json()
    reasoning = {"reasoning": {"effort": "low"}, "include": ["reasoning.encrypted_content"]}
    response = http.post(
        "/v1/responses", json={"model": "demo", "input": "Hello!", "store": True, **reasoning}
    ).raise_for_status()
    sealed = next(item["encrypted_content"] for item in response.json()["output"] if item["type"] == "reasoning")
    yield Replay(http, message["content"][0]["signature"], sealed, response.json()["id"])


@REAL_ENGINE
@pytest.mark.server
@pytest.mark.parametrize("client_name", sorted({captured.client for captured in CAPTURED}))
def test_recorded_requests_are_answered_or_refused_by_a_known_field(replay: Replay, client_name: str):
    with ThreadPoolExecutor(AT_ONCE) as pool:
        problems = [problem for problem in pool.map(replay.problem, distinct(client_name)) if problem is not None]
    assert not problems, "\n".join(problems)


@REAL_ENGINE
@pytest.mark.server
def test_each_field_listed_as_refused_occurs_in_a_recorded_request(replay: Replay):
    assert set(replay.refused) == set(REFUSED)


@pytest.mark.parametrize("path", DIALECTS)
def test_recorded_requests_of_full_length_are_read_or_refused_by_a_known_field(path: str):
    rules = ReadingRules("demo", frozenset({"image"}))
    filling = Filling(base64.b64encode(PNG).decode(), "c2lnbmF0dXJl")
    problems = []
    for captured in CAPTURED:
        if captured.path != path or captured.body is None:
            continue
        body = json.dumps({**fill(captured.body, filling), "model": "demo"}).encode()
        try:
            read_request(body, DIALECTS[path], rules)
        except InvalidRequest as refusal:
            field = re.sub(r"\[\d+\]", "[]", refusal.field or "")
            if (path, field) not in REFUSED:
                problems.append(f"{captured.name}: {refusal.field}: {refusal.message[:200]}")
    assert not problems, "\n".join(problems)
