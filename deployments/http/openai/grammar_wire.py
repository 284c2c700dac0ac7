"""The wire models of structured output in OpenAI's dialects and of vLLM's fields, and their conversion to a grammar."""

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from deployments.http.grammar import schema_grammar, text_grammar
from deployments.http.wire import Wire, choose, tag
from engine.protocol import GrammarSpec

MAX_GUIDED_CHOICES = 10_000
MAX_NAME_CHARS = 512


class PlainFormat(Wire):
    """The format of free text, or of any JSON object."""

    type: Literal["text", "json_object"]


class JsonSchema(Wire):
    """A JSON schema, enforced whatever `strict` is. The model does not see `name` and `description`."""

    name: str | None = Field(None, max_length=MAX_NAME_CHARS)
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    description: str | None = None


class SchemaFormat(Wire):
    """The format of JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


def format_tag(value: Any) -> str | None:
    """Return the tag of a response format, also for the Responses API; None for an unknown one."""
    kind = value.get("type") if isinstance(value, dict) else "text"
    return FORMAT_TAGS.get(kind) if isinstance(kind, str) else None


def _nested(value: Any) -> Any:
    """Return a response format as OpenAI nests it, if a schema stands beside `type`, as in other servers' APIs."""
    if isinstance(value, dict) and value.get("type") in ("json_object", "json_schema") and "json_schema" not in value:
        beside = {name: part for name, part in value.items() if name != "type"}
        if isinstance(schema := beside.get("schema"), dict):
            kind = {"type": "object"} if value["type"] == "json_object" else {}
            return {"type": "json_schema", "json_schema": {**beside, "schema": {**kind, **schema}}}
    return value


FORMAT_TAGS = {"text": "plain", "json_object": "plain", "json_schema": "schema"}
ResponseFormat = Annotated[
    Annotated[PlainFormat, tag("plain")] | Annotated[SchemaFormat, tag("schema")],
    choose(format_tag, f"must be one of: {', '.join(FORMAT_TAGS)}", "type"),
    BeforeValidator(_nested),
]


GuidedChoice = Annotated[list[str], Field(min_length=1, max_length=MAX_GUIDED_CHOICES, fail_fast=True)]


class StructuredOutputs(Wire):
    """vLLM's field with the supported constraints, of which exactly one must be given."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = Field(None, min_length=1)
    choice: GuidedChoice | None = None
    json_object: bool | None = None


def grammar_of(
    form: PlainFormat | SchemaFormat | None,
    structured_outputs: StructuredOutputs | None,
    guided_json: dict[str, Any] | str | None,
    guided_regex: str | None,
    guided_choice: list[str] | None,
) -> GrammarSpec | None:
    """Return the grammar that one of these fields asks for. Raises InvalidRequest if it is too long."""
    asked = structured_outputs or StructuredOutputs.model_validate({})
    if isinstance(form, SchemaFormat):
        return schema_grammar(form.json_schema.schema_, "response_format.json_schema.schema")
    if form is not None and form.type == "json_object":
        return GrammarSpec("json_object", field="response_format")
    if asked.json_object:
        return GrammarSpec("json_object", field="structured_outputs.json_object")
    for schema, field in ((asked.json_, "structured_outputs.json"), (guided_json, "guided_json")):
        if schema is not None:
            return schema_grammar(schema, field)
    for regex, field in ((asked.regex, "structured_outputs.regex"), (guided_regex, "guided_regex")):
        if regex is not None:
            return text_grammar("regex", regex, field)
    for texts, field in ((asked.choice, "structured_outputs.choice"), (guided_choice, "guided_choice")):
        if texts is not None:
            literals = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
            return text_grammar("lark", f"%llguidance {{}}\nstart: {literals}\n", field)
    return None
