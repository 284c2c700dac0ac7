"""Messages as clients send them, and their way through the parser and the app."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from deployments.http.anthropic.messages_wire import parse_messages
from deployments.http.parsed_request import ParsedRequest, ReadingRules
from deployments.requests import ChatRequest

RULES = ReadingRules("org/demo", frozenset({"image"}))
USER = {"role": "user", "content": "Hi"}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "org/demo", "max_tokens": 100, "messages": [USER], **fields}


def parsed(rules: ReadingRules = RULES, **fields: Any) -> ParsedRequest:
    return parse_messages(body(**fields), rules)


def request_of(*messages: dict[str, Any], **fields: Any) -> ChatRequest:
    """The ChatRequest of a body with these messages, or the least there can be."""
    return parsed(messages=list(messages) or [USER], **fields).request


def tool(name: str = "find", **fields: Any) -> dict[str, Any]:
    return {"name": name, "description": "Finds.", "input_schema": {"type": "object", "properties": {}}, **fields}


def events(stream: bytes) -> list[dict[str, Any]]:
    """The data of each event of a stream; its `event:` line names the data's type."""
    found = []
    for block in stream.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


@pytest.fixture
def create(send: Callable[..., httpx.Response]) -> Callable[..., httpx.Response]:
    """create(temperature=1): a request with these fields besides the least that is needed."""

    def create_one(
        path: str = "/v1/messages", app: Any = None, headers: dict[str, str] | None = None, **fields: Any
    ) -> httpx.Response:
        return send("POST", path, app=app, headers=headers or {}, content=json.dumps(body(**fields)))

    return create_one
