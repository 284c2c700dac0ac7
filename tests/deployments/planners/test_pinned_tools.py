"""Tools of pinned prompts: the same tokens as in requests with these tools, in every dialect."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from deployments.args import AppArgs
from deployments.http.anthropic.messages_wire import parse_messages
from deployments.http.openai.chat_wire import parse_chat
from deployments.http.parsed_request import ParsedRequest, ReadingRules
from deployments.http.responses.body import parse_responses
from deployments.planners.prompt_planner import PromptPlanner
from engine.errors import EngineFailed
from engine.processing.pinned import pinned_requests

SYSTEM = "You are a forecaster."
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "weather", "description": "Tells the weather.", "parameters": SCHEMA}
CLOCK = {"name": "clock", "description": None, "strict": False}
TOOLS = [{"type": "function", "function": tool} for tool in (WEATHER, CLOCK)]
RULES = ReadingRules("demo", frozenset())


def pinning(*tools: dict[str, Any]) -> AppArgs:
    pinned = [{"system": SYSTEM, "tools": tools}]
    return AppArgs.model_validate({"engine": {"prefix_cache": {"pinned": pinned}}})


def chat() -> ParsedRequest:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "And tomorrow?"}]
    return parse_chat({"model": "demo", "messages": messages, "tools": TOOLS}, RULES)


def messages() -> ParsedRequest:
    tools = [
        {"name": "weather", "description": "Tells the weather.", "input_schema": SCHEMA},
        {"name": "clock", "input_schema": {"type": "object", "properties": {}}},
    ]
    turn = {"role": "user", "content": "And tomorrow?"}
    return parse_messages(
        {"model": "demo", "max_tokens": 5, "system": SYSTEM, "messages": [turn], "tools": tools}, RULES
    )


def responses() -> ParsedRequest:
    tools = [{"type": "function", **tool, "strict": False} for tool in (WEATHER, CLOCK)]
    return parse_responses({"model": "demo", "instructions": SYSTEM, "input": "And tomorrow?", "tools": tools}, RULES)


@pytest.mark.parametrize("parse", [chat, messages, responses])
def test_pinned_prompt_with_tools_is_the_beginning_of_requests_with_these_tools(parse: Callable[[], ParsedRequest]):
    args = pinning(*TOOLS)
    planner = PromptPlanner(args.engine)
    [pinned] = pinned_requests(args.engine.prefix_cache.pinned, planner.tokenizer)
    request = parse().request
    planned = asyncio.run(planner.engine_request(request, request.messages))
    num_tokens = pinned.boundaries[0].num_tokens
    assert planned.boundaries[0] == pinned.boundaries[0]
    assert planned.token_ids[:num_tokens].tolist() == pinned.token_ids[:num_tokens].tolist()
    assert planned.origin == pinned.origin and pinned.origin.tools


def test_pinned_tools_are_refused_with_their_path():
    with pytest.raises(ValidationError, match=r"pinned\.0\.tools\.1\.function\.name: must be 1 to 128 of"):
        pinning(TOOLS[0], {"type": "function", "function": {"name": "not a name"}})
    with pytest.raises(ValidationError, match=r"pinned\.0\.tools: .*'weather'"):
        pinning(TOOLS[0], TOOLS[0])


def test_pinned_tools_are_refused_with_a_template_that_ignores_them(monkeypatch: pytest.MonkeyPatch):
    args = pinning(*TOOLS)
    tokenizer = PromptPlanner(args.engine).tokenizer
    monkeypatch.setattr(tokenizer, "tool_format", None)
    with pytest.raises(EngineFailed, match=r"pinned\[0\]: the model's chat template does not support tools"):
        pinned_requests(args.engine.prefix_cache.pinned, tokenizer)
