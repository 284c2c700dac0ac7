"""The wire model of POST /api/show."""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from deployments.http.fields import FieldRules, validate_body
from deployments.http.parsed_request import ParsedRequest, ReadingRules
from deployments.http.wire import Wire
from deployments.requests import ChatRequest, Route
from engine.errors import InvalidRequest

FIELD_RULES = FieldRules(informational=frozenset({"verbose", "options", "system", "template"}))


class OllamaShowBody(Wire):
    """The name of a model; `name` is that of older clients."""

    model: Annotated[str, Field(min_length=1)] | None = None
    name: Annotated[str, Field(min_length=1)] | None = None


@dataclass(frozen=True)
class ShowEcho:
    """Fields of the request that the answer depends on."""

    model: str
    """The name by which the client asked for the model."""


def parse_show(raw: dict[str, Any], rules: ReadingRules) -> ParsedRequest:
    """Parse a request to /api/show; see Dialect.bodies."""
    body, ignored = validate_body(OllamaShowBody, raw, FIELD_RULES, rules.unknown_fields)
    if (asked := body.model or body.name) is None:
        raise InvalidRequest("`model` is required.", "model")
    rules.check_model(asked)
    return ParsedRequest(ChatRequest("", ()), Route.TEXT, False, ShowEcho(asked), ignored)
