"""Requests as Ollama's clients send them, and their way through the parsers and the app."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from deployments.http.ollama.chat_wire import parse_chat
from deployments.http.ollama.generate_wire import parse_generate
from deployments.http.parsed_request import ParsedRequest, ReadingRules
from deployments.requests import ChatRequest

RULES = ReadingRules("org/demo", frozenset({"image"}), aliases=frozenset({"gpt-5"}))
HI = {"role": "user", "content": "Hi"}


def parsed_chat(rules: ReadingRules = RULES, **fields: Any) -> ParsedRequest:
    return parse_chat({"model": "org/demo", "messages": [HI], **fields}, rules)


def parsed_prompt(rules: ReadingRules = RULES, **fields: Any) -> ParsedRequest:
    return parse_generate({"model": "org/demo", "prompt": "Hi", **fields}, rules)


def asked(**fields: Any) -> ChatRequest:
    return parsed_chat(**fields).request


def lines(content: bytes) -> list[dict[str, Any]]:
    """The lines of a stream; each is whole JSON and ends with a line break."""
    *found, rest = content.split(b"\n")
    assert rest == b"" and all(found)
    return [json.loads(line) for line in found]


@pytest.fixture
def ask(send: Callable[..., httpx.Response]) -> Callable[..., httpx.Response]:
    """ask("/api/chat", think=True): a right request to a route with these fields."""
    bodies: dict[str, dict[str, Any]] = {
        "/api/chat": {"messages": [HI]},
        "/api/generate": {"prompt": "Hi"},
        "/api/embed": {"input": "Hi"},
        "/api/embeddings": {"prompt": "Hi"},
        "/api/show": {},
    }

    def ask(path: str, app: Any = None, headers: Any = None, **fields: Any) -> httpx.Response:
        body = {"model": "org/demo", **bodies[path], **fields}
        return send("POST", path, app=app, content=json.dumps(body), headers=headers or {})

    return ask
