"""The wire model of POST /api/chat, and its conversion to a ChatRequest."""

from typing import Annotated, Any

from pydantic import Field

from deployments.http.classify import classify
from deployments.http.fields import validate_body
from deployments.http.normalize import normalize
from deployments.http.ollama.generation_wire import FIELD_RULES, GenerationBody, GenerationEcho, generation_fields
from deployments.http.ollama.message_wire import OllamaMessage, Tools, canonical_messages, tools_of
from deployments.http.ollama.options_wire import split_options
from deployments.http.parsed_request import ParsedRequest, ReadingRules
from deployments.http.wire import MAX_MESSAGES
from deployments.requests import ChatRequest


class OllamaChatBody(GenerationBody):
    """A conversation; without messages the answer only says that the model is loaded."""

    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    tools: Tools | None = None


def parse_chat(raw: dict[str, Any], rules: ReadingRules) -> ParsedRequest:
    """Parse a request to /api/chat; see Dialect.bodies."""
    raw, ignored_options = split_options(raw, rules.unknown_fields)
    body, ignored = validate_body(OllamaChatBody, raw, FIELD_RULES, rules.unknown_fields)
    rules.check_model(body.model)
    canonical = canonical_messages(body.messages or (), rules)
    messages = normalize(canonical, rules.system_policy, rules.volatile_patterns, rules.keeps_late_system)
    tools = tools_of(body.tools or ())
    request = ChatRequest(request_id="", messages=messages, tools=tools, **generation_fields(body))
    echo = GenerationEcho(body.model, bool(body.logprobs), is_load=not messages)
    streams = body.stream is not False and not echo.is_load
    return ParsedRequest(request, classify(messages), streams, echo, (*ignored, *ignored_options))
