"""The wire model of a score request, as vLLM has it, and its conversion to a ScoreRequest."""

from typing import Annotated, Any

from deployments.http.fields import validate_body
from deployments.http.openai.scored_text_wire import (
    ScoredTexts,
    ScoringBody,
    TextObject,
    field_rules,
    text_of,
)
from deployments.http.parsed_request import ParsedRequest, ReadingRules
from deployments.http.wire import choose, tag
from deployments.requests import ChatRequest, Route, ScoreRequest
from engine.errors import InvalidRequest

_FIRST, _SECOND = "Send these texts as `text_1`.", "Send these texts as `text_2`."
FIELD_RULES = field_rules(
    neutral={"encoding_format": ("float",)},
    refused={"queries": _FIRST, "data_1": _FIRST, "documents": _SECOND, "items": _SECOND, "data_2": _SECOND},
)

_FORMS = {str: "string", dict: "object", list: "array"}
OneOrMore = Annotated[
    Annotated[str, tag("string")] | Annotated[TextObject, tag("object")] | Annotated[ScoredTexts, tag("array")],
    choose(lambda value: _FORMS.get(type(value)), "must be a string, an object with `text`, or an array of these"),
]


class ScoreBody(ScoringBody):
    """A score request: one text in `text_1` for all of `text_2`, or as many as these.

    `instruction` and `use_activation` are those of a rerank request.
    """

    text_1: OneOrMore
    text_2: OneOrMore


def parse_score(raw: dict[str, Any], rules: ReadingRules) -> ParsedRequest:
    """Parse a score request; see request_reader.PARSERS. The echo is the ScoreRequest."""
    body, ignored = validate_body(ScoreBody, raw, FIELD_RULES, rules.unknown_fields)
    rules.check_model(body.model)
    queries, query_fields = _texts(body.text_1, "text_1")
    documents, document_fields = _texts(body.text_2, "text_2")
    if len(queries) not in (1, len(documents)):
        raise InvalidRequest(
            f"`text_1` has {len(queries)} texts and `text_2` has {len(documents)}: `text_1` must have 1, or as many as "
            "`text_2`.",
            "text_1",
        )
    wanted = ScoreRequest(
        request_id="",
        queries=queries,
        documents=documents,
        query_fields=query_fields,
        document_fields=document_fields,
        is_search=False,
        has_activation=body.has_activation,
        instruction=body.instruction,
        client=body.client,
        priority=body.priority or 0,
    )
    return ParsedRequest(ChatRequest("", (), client=body.client), Route.TEXT, False, wanted, ignored)


def _texts(value: str | TextObject | list[Any], field: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the texts, and the client's field of each."""
    if not isinstance(value, list):
        return (text_of(value),), (field,)
    return tuple(map(text_of, value)), tuple(f"{field}[{index}]" for index in range(len(value)))
