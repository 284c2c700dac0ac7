"""The wire model of POST /api/generate, and its conversion to a ChatRequest."""

from dataclasses import replace
from typing import Any

from deployments.http.classify import classify
from deployments.http.errors import shown
from deployments.http.fields import FieldRules, validate_body
from deployments.http.normalize import normalize
from deployments.http.ollama.generation_wire import (
    HINTS,
    INFORMATIONAL,
    NEUTRAL,
    GenerationBody,
    GenerationEcho,
    generation_fields,
)
from deployments.http.ollama.message_wire import Images, content_of
from deployments.http.ollama.options_wire import split_options
from deployments.http.parsed_request import ParsedRequest, ReadingRules
from deployments.requests import ChatRequest
from engine.errors import InvalidRequest
from engine.processing.message import Message

FIELD_RULES = FieldRules(
    neutral={**NEUTRAL, "suffix": ("",), "template": ("",), "context": ([],)},
    hints=HINTS,
    refused={"width": "", "height": "", "steps": ""},
    informational=INFORMATIONAL,
)

INSTEAD = {
    "suffix": "This server fills no gaps in a text.",
    "template": "The model's own template is used; send a finished prompt with `raw`: true.",
    "context": "Send the conversation as `messages` to /api/chat.",
}
"""Field that is refused unless it is empty, to a sentence with the alternative."""


class OllamaGenerateBody(GenerationBody):
    """One prompt, which is a message of the user or, with `raw`, the prompt as it is.

    Without a prompt the answer only says that the model is loaded.
    """

    prompt: str | None = None
    system: str | None = None
    images: Images | None = None
    raw: bool | None = None


def parse_generate(raw: dict[str, Any], rules: ReadingRules) -> ParsedRequest:
    """Parse a request to /api/generate; see Dialect.bodies."""
    for name, instead in INSTEAD.items():
        if raw.get(name):
            raise InvalidRequest(f"`{name}` is {shown(raw[name])}, which is not supported. {instead}", name)
    raw, ignored_options = split_options(raw, rules.unknown_fields)
    body, ignored = validate_body(OllamaGenerateBody, raw, FIELD_RULES, rules.unknown_fields)
    rules.check_model(body.model)
    echo = GenerationEcho(body.model, bool(body.logprobs), is_load=not body.prompt and not body.images)
    request = _raw_request(body) if body.raw else _chat_request(body, rules)
    streams = body.stream is not False and not echo.is_load
    return ParsedRequest(request, classify(request.messages), streams, echo, (*ignored, *ignored_options))


def _chat_request(body: OllamaGenerateBody, rules: ReadingRules) -> ChatRequest:
    content = content_of(body.prompt or "", body.images, "images", rules)
    system: list[Message] = [{"role": "system", "content": body.system}] if body.system else []
    canonical: list[Message] = [*system, {"role": "user", "content": content}]
    messages = normalize(canonical, rules.system_policy, rules.volatile_patterns, rules.keeps_late_system)
    return ChatRequest(request_id="", messages=messages, **generation_fields(body))


def _raw_request(body: OllamaGenerateBody) -> ChatRequest:
    """Return the request of a raw prompt. Raises InvalidRequest for a field that only a template can honour."""
    for name, value in (("system", body.system), ("images", body.images), ("think", body.think)):
        if value:
            raise InvalidRequest(f"`{name}` may not be sent with `raw`: true, which takes the prompt as it is.", name)
    request = ChatRequest(request_id="", messages=(), raw_prompt=body.prompt or "", **generation_fields(body))
    return replace(request, thinking=None)
