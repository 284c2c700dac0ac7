"""Ways to read a body of /v1/responses, and to send one."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from deployments.http.parsed_request import ParsedRequest, ReadingRules
from deployments.http.responses.body import parse_responses

RULES = ReadingRules("org/demo", frozenset({"image"}))


def parse(rules: ReadingRules = RULES, **fields: Any) -> ParsedRequest:
    return parse_responses({"model": "org/demo", "input": "Hi", **fields}, rules)


def messages_for(*items: Any, **fields: Any) -> list[Any]:
    return list(parse(input=list(items), **fields).request.messages)


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream. Each has its type in an `event:` line, and all are numbered."""
    events = []
    for block in text.strip().removesuffix("data: [DONE]").strip().split("\n\n"):
        head, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert head == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


@pytest.fixture
def respond(send: Callable[..., httpx.Response]) -> Callable[..., httpx.Response]:
    """respond(stream=True): a request for a response with these fields besides the least that is needed."""

    def create(app: FastAPI | None = None, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        body = {"model": "org/demo", "input": "Hi", **fields}
        return send("POST", "/v1/responses", app=app, headers=headers or {}, content=json.dumps(body))

    return create
