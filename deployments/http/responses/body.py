"""The wire model of a request to the Responses API, and its conversion to a ChatRequest."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from deployments.http.errors import shown
from deployments.http.fields import FieldRules, validate_body
from deployments.http.grammar import schema_grammar
from deployments.http.openai.grammar_wire import FORMAT_TAGS, JsonSchema, PlainFormat, format_tag
from deployments.http.openai.thinking_wire import Effort, from_effort
from deployments.http.parsed_request import ModelDefaults, ParsedRequest, ReadingRules
from deployments.http.response_store import StoreResponses
from deployments.http.responses.conversation import conversation
from deployments.http.responses.encoder import ResponsesEcho
from deployments.http.responses.items import Item, WireInput, added_tools, kept_items, left_out, references
from deployments.http.responses.tools import OfferedTools, WireToolChoice, WireTools, offered_tools, tool_choice
from deployments.http.wire import INT32_MAX, MAX_USER_CHARS, CacheSalt, Wire, choose, tag
from deployments.requests import ChatRequest, Route, Thinking
from engine.errors import InvalidRequest
from engine.protocol import GrammarSpec

SEALED_REASONING = "reasoning.encrypted_content"

KEEP_THOUGHTS = "preserve_thinking"
"""Variable of templates that can show the thoughts of all turns."""

MAX_KEY_CHARS = 1024
"""Characters of `prompt_cache_key` and of ids."""

FIELD_RULES = FieldRules(
    neutral={
        "background": (False,),
        "service_tier": ("auto", "default"),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    },
    hints={"truncation": ("auto",)},
    refused={
        "access_programs": "",
        "context_management": "",
        "conversation": "Send `previous_response_id`, or the whole conversation in `input`.",
        "image": "",
        "max_tool_calls": "It limits calls of built-in tools, which this server does not have.",
        "moderation": "",
        "prompt": "Send its text in `instructions` or `input`.",
    },
    informational=frozenset({"client_metadata", "prompt_cache_options", "prompt_cache_retention"}),
)
"""Rules for the fields that ResponsesBody does not have."""


class StreamOptions(Wire):
    """Options of a stream, whose events are never obfuscated."""

    include_obfuscation: Literal[False] | None = None


class SchemaFormat(JsonSchema):
    """The format of JSON that matches a schema, whose fields are not nested as in chat completions."""

    type: Literal["json_schema"]


TextFormat = Annotated[
    Annotated[PlainFormat, tag("plain")] | Annotated[SchemaFormat, tag("schema")],
    choose(format_tag, f"must be one of: {', '.join(FORMAT_TAGS)}", "type"),
]


class TextConfig(Wire):
    """The format of the answer; `verbosity` is a hint that is ignored."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(Wire):
    """Reasoning settings. A requested summary is the whole thought."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: Literal["standard"] | None = None


Label = Annotated[str, Field(max_length=512)]


class ResponsesBody(Wire):
    """A request to the Responses API.

    `user`, `safety_identifier`, `prompt_cache_key` and `metadata` change no token; the first two name the client for
    fair scheduling. `cache_salt` is vLLM's field, see GenerationBody.
    """

    model: str
    input: WireInput | None = None
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(min_length=1, max_length=MAX_KEY_CHARS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    max_output_tokens: int | None = Field(None, ge=-1, le=INT32_MAX)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    tools: WireTools | None = None
    tool_choice: WireToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: Annotated[list[str], Field(max_length=64, fail_fast=True)] | None = None
    metadata: Annotated[dict[Annotated[str, Field(max_length=64)], Label], Field(max_length=16)] | None = None
    user: str | None = Field(None, max_length=MAX_USER_CHARS)
    safety_identifier: str | None = Field(None, max_length=MAX_USER_CHARS)
    prompt_cache_key: str | None = Field(None, max_length=MAX_KEY_CHARS)
    cache_salt: CacheSalt | None = None

    @property
    def ceiling(self) -> int | None:
        return None if self.max_output_tokens == -1 else self.max_output_tokens

    @property
    def summary(self) -> str | None:
        return None if self.reasoning is None else self.reasoning.summary or self.reasoning.generate_summary


def parse_responses(raw: dict[str, Any], rules: ReadingRules) -> ParsedRequest:
    """Parse a request, see request_reader.PARSERS. One that needs stored items has no messages yet (`is_open`)."""
    body, ignored = validate_body(ResponsesBody, raw, FIELD_RULES, rules.unknown_fields)
    _check_together(body)
    rules.check_model(body.model)
    offered = offered_tools(body.tools, added_tools(body.input))
    fields = request_fields(body, offered)
    if _asks_for_all_thoughts(body) and KEEP_THOUGHTS in rules.model.template_variables:
        fields["template_kwargs"] = {KEEP_THOUGHTS: True}
    items = kept_items(body.input if body.input is not None else (), rules)
    echo = _echo(body, raw, offered, items, rules)
    messages, route = ((), Route.TEXT) if echo.is_open else conversation(items, body.instructions, rules)
    request = ChatRequest(request_id="", messages=messages, **fields)
    ignored += (*_ignored_hints(body, rules), *offered.not_offered, *left_out(body.input))
    return ParsedRequest(request, route, bool(body.stream), echo, ignored)


def _asks_for_all_thoughts(body: ResponsesBody) -> bool:
    return body.reasoning is not None and body.reasoning.context == "all_turns"


def _ignored_hints(body: ResponsesBody, rules: ReadingRules) -> tuple[str, ...]:
    hints = []
    if body.text is not None and body.text.verbosity in ("low", "high"):
        hints.append("text.verbosity")
    if _asks_for_all_thoughts(body) and KEEP_THOUGHTS not in rules.model.template_variables:
        hints.append("reasoning.context")
    if body.store and rules.store_responses == "off":
        hints.append("store")
    return tuple(hints)


def _check_together(body: ResponsesBody) -> None:
    """Check the rules that involve several fields. Raises InvalidRequest."""
    if body.input is None and body.previous_response_id is None:
        raise InvalidRequest("`input` is required.", "input")
    if body.max_output_tokens == 0:
        raise InvalidRequest("`max_output_tokens` is 0: it must be at least 1.", "max_output_tokens")
    for i, name in enumerate(body.include or ()):
        if name != SEALED_REASONING:
            path = f"include[{i}]"
            raise InvalidRequest(f"`{path}` is {shown(name)}: it may only be {json.dumps(SEALED_REASONING)}.", path)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("`stream_options` may only be sent with `stream`: true.", "stream_options")


def request_fields(body: ResponsesBody, offered: OfferedTools) -> dict[str, Any]:
    """Return the fields of a ChatRequest besides its messages. Raises InvalidRequest."""
    choice = tool_choice(body.tool_choice, offered)
    user = body.safety_identifier or body.user
    return {
        "max_tokens": body.ceiling,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "tools": offered.tools,
        "tool_choice": choice,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        # with a required tool call there is no text to which the format could apply
        "grammar": None if choice.mode == "required" else _grammar(body),
        "thinking": _thinking(body.reasoning),
        "tenant": body.cache_salt or "",
        "client": user or body.cache_salt or "",
    }


def _grammar(body: ResponsesBody) -> GrammarSpec | None:
    form = None if body.text is None else body.text.format
    if isinstance(form, SchemaFormat):
        return schema_grammar(form.schema_, "text.format")
    if form is not None and form.type == "json_object":
        return GrammarSpec("json_object", field="text.format")
    return None


def _thinking(reasoning: ReasoningConfig | None) -> Thinking | None:
    effort = None if reasoning is None else reasoning.effort
    return None if effort is None else from_effort(effort, "reasoning.effort")


def _echo(
    body: ResponsesBody, raw: dict[str, Any], offered: OfferedTools, items: Sequence[Item], rules: ReadingRules
) -> ResponsesEcho:
    stores = _stores(body, rules.store_responses)
    referenced = tuple(id for _, id in references(items))
    is_open = bool(referenced) or body.previous_response_id is not None
    return ResponsesEcho(
        settings=_settings(body, raw, rules.model, stores),
        instructions=body.instructions,
        items=json.dumps(items, ensure_ascii=False, separators=(",", ":")).encode() if stores or is_open else b"[]",
        previous_response_id=body.previous_response_id,
        references=referenced,
        stores=stores,
        namespaces=offered.namespaces,
        customs=offered.customs,
        shows_summary=body.summary is not None,
        seals_reasoning=SEALED_REASONING in (body.include or ()),
    )


def _stores(body: ResponsesBody, policy: StoreResponses) -> bool:
    """Return whether the response is stored; a request that says nothing continues as its conversation began."""
    if policy == "off" or body.store is not None:
        return policy != "off" and body.store is True
    return policy == "all" or body.previous_response_id is not None


def _settings(body: ResponsesBody, raw: dict[str, Any], model: ModelDefaults, stores: bool) -> dict[str, Any]:
    """Return the settings of the request that the response repeats."""
    return {
        "frequency_penalty": 0.0,
        "instructions": body.instructions,
        "max_tool_calls": None,
        "presence_penalty": 0.0,
        "prompt_cache_retention": None,
        "max_output_tokens": body.ceiling,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": body.summary},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": stores,
        "temperature": model.temperature if body.temperature is None else body.temperature,
        "text": {
            "format": (raw.get("text") or {}).get("format") or {"type": "text"},
            "verbosity": (body.text and body.text.verbosity) or "medium",
        },
        "tool_choice": raw.get("tool_choice") or "auto",
        "tools": raw.get("tools") or [],
        "top_logprobs": 0,
        "top_p": model.top_p if body.top_p is None else body.top_p,
        "truncation": raw.get("truncation") or "disabled",
        "user": body.user,
    }
