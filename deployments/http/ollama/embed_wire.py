"""The wire models of POST /api/embed and /api/embeddings, and their conversion to an EmbedRequest."""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from deployments.http.fields import FieldRules, validate_body
from deployments.http.ollama.options_wire import OllamaOptions, split_options
from deployments.http.parsed_request import ParsedRequest, ReadingRules
from deployments.http.wire import INT32_MAX, STRING_OR_ARRAY, Wire, tag
from deployments.requests import ChatRequest, EmbedRequest, Route

MAX_INPUTS = 2048
"""Texts of one request."""

FIELD_RULES = FieldRules(
    neutral={"truncate": (False,)}, hints={"truncate": (True,)}, informational=frozenset({"keep_alive"})
)

Texts = Annotated[
    Annotated[str, tag("string")]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True), tag("array")],
    STRING_OR_ARRAY,
]


class OllamaEmbedBody(Wire):
    """Texts to embed. `options` are accepted as in chat, and change no embedding."""

    model: Annotated[str, Field(min_length=1)]
    input: Texts
    dimensions: int | None = Field(None, ge=1, le=INT32_MAX)
    options: OllamaOptions | None = None


class OllamaEmbeddingsBody(Wire):
    """One text to embed, as older clients send it."""

    model: Annotated[str, Field(min_length=1)]
    prompt: str
    options: OllamaOptions | None = None


@dataclass(frozen=True)
class EmbedEcho:
    """An embedding request, and what its answer depends on."""

    wanted: EmbedRequest
    model: str
    """The name by which the client asked for the model."""


def parse_embed(raw: dict[str, Any], rules: ReadingRules) -> ParsedRequest:
    """Parse a request to /api/embed; see Dialect.bodies."""
    body, ignored = _validated(OllamaEmbedBody, raw, rules)
    texts = (body.input,) if isinstance(body.input, str) else tuple(body.input)
    fields = ("input",) if isinstance(body.input, str) else tuple(f"input[{i}]" for i in range(len(texts)))
    return _parsed(body.model, EmbedRequest("", texts, fields, num_dimensions=body.dimensions), ignored)


def parse_embeddings(raw: dict[str, Any], rules: ReadingRules) -> ParsedRequest:
    """Parse a request to /api/embeddings; see Dialect.bodies."""
    body, ignored = _validated(OllamaEmbeddingsBody, raw, rules)
    return _parsed(body.model, EmbedRequest("", (body.prompt,), ("prompt",)), ignored)


def _validated(model: Any, raw: dict[str, Any], rules: ReadingRules) -> tuple[Any, tuple[str, ...]]:
    raw, ignored_options = split_options(raw, rules.unknown_fields)
    body, ignored = validate_body(model, raw, FIELD_RULES, rules.unknown_fields)
    rules.check_model(body.model)
    sent = tuple(f"options.{name}" for name in raw.get("options") or ())
    return body, (*ignored, *sent, *ignored_options)


def _parsed(model: str, wanted: EmbedRequest, ignored: tuple[str, ...]) -> ParsedRequest:
    return ParsedRequest(ChatRequest("", ()), Route.TEXT, False, EmbedEcho(wanted, model), ignored)
