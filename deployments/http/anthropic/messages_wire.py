"""The wire model of Anthropic's Messages and count_tokens, and its conversion to a ChatRequest.

`MessagesBody` has the honoured fields, `FIELD_RULES` the known but unsupported ones; see http/fields.py.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from deployments.http.anthropic.block_wire import (
    ImageBlock,
    ServerToolBlock,
    Texts,
    ToolChange,
    ToolReference,
    WireMessage,
)
from deployments.http.anthropic.conversation import all_blocks, conversation
from deployments.http.anthropic.phrases import NOT_PERMITTED, ThreadsUnsupported, from_validation, wrong
from deployments.http.classify import classify
from deployments.http.effort import EFFORT_BUDGETS, template_level
from deployments.http.errors import shown
from deployments.http.fields import FieldRules, split_fields
from deployments.http.grammar import schema_grammar
from deployments.http.normalize import normalize
from deployments.http.parsed_request import ParsedRequest, ReadingRules
from deployments.http.wire import (
    INT32_MAX,
    MAX_MESSAGES,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_TOOLS,
    MAX_USER_CHARS,
    OpenWire,
    Wire,
    choose,
    tag,
)
from deployments.requests import ChatRequest, Message, Thinking, Tool, ToolChoice
from engine.errors import InvalidRequest
from engine.protocol import GrammarSpec

MAX_NAMED = 16
"""Most edits, tools and blocks without effect whose names are returned."""
_EDIT = re.compile(r"(?:clear_tool_uses|clear_thinking|compact)_20[0-9]{6}")
KEEP_ALL_THINKING = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}

FIELD_RULES = FieldRules(
    neutral={
        "thread": (),
        "context_management": ({}, {"edits": []}, KEEP_ALL_THINKING),
        "service_tier": ("auto", "standard_only"),
        "speed": ("standard",),
        "mcp_servers": ([],),
        "fallbacks": ([],),
        "safeguards": (),
        "container": (),
        "compaction": (),
        "inference_geo": (),
        "diagnostics": (),
        "billing_policy": (),
        "user_profile_id": (),
        "workspace_id": (),
    }
)

Effort = Literal["low", "medium", "high", "xhigh", "max"]


class WireTool(OpenWire):
    """A tool definition. `eager_input_streaming` has no effect, as calls are sent when they are complete."""

    type: Literal["custom"] | None = None
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    defer_loading: bool | None = None
    input_examples: list[dict[str, Any]] | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class ServerTool(OpenWire):
    """A tool that Anthropic's servers run, which has a version and no schema; it is never offered to the model."""

    type: str
    name: str


def _tool_tag(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return "server" if isinstance(kind, str) and _SERVER_TOOL.fullmatch(kind) else "custom"


_SERVER_TOOL = re.compile(r"(?:web_search|web_fetch|code_execution|advisor|tool_search_tool_(?:regex|bm25))_20[0-9]{6}")
AnyTool = Annotated[
    Annotated[WireTool, tag("custom")] | Annotated[ServerTool, tag("server")],
    choose(_tool_tag, "Input should be 'custom'", "type"),
]


class WireToolChoice(OpenWire):
    """Which tools the model may or must call; `name` is the tool of type `tool`."""

    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class WireThinking(OpenWire):
    """Thinking settings. With `display: omitted` the answer has no text of the thought, otherwise all of it."""

    type: Literal["adaptive", "enabled", "disabled"]
    budget_tokens: int | None = Field(None, ge=1, le=INT32_MAX)
    display: Literal["omitted", "summarized", "updates"] | None = None


class JsonFormat(OpenWire):
    """A JSON schema that the text of the answer must match."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Wire):
    """The effort of thinking, and the format of the answer."""

    effort: Effort | None = None
    format: JsonFormat | None = None


class Metadata(OpenWire):
    """Metadata of a request; other keys than `user_id` are dropped."""

    user_id: str | None = Field(None, max_length=MAX_USER_CHARS)


StopSequence = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


class MessagesBody(Wire):
    """A request for a message.

    `metadata.user_id` names the client for fair scheduling; only its digest is kept. `cache_control` has no effect, as
    the prefix cache needs no hints.
    """

    model: str
    messages: Annotated[list[WireMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: Texts | None = None
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: WireToolChoice | None = None
    thinking: WireThinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None
    cache_control: dict[str, Any] | None = None
    metadata: Metadata | None = None
    max_tokens: int | None = Field(None, ge=1, le=INT32_MAX)
    stop_sequences: Annotated[list[StopSequence], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=INT32_MAX)


@dataclass(frozen=True)
class MessagesEcho:
    """The fields of the request's body that its answer depends on."""

    omits_thinking: bool = False
    """Whether thinking blocks have only a signature and no text."""


def parse_messages(raw: dict[str, Any], rules: ReadingRules) -> ParsedRequest:
    """Parse a request for a message; see request_reader.PARSERS."""
    if raw.get("max_tokens") is None:
        raise wrong("max_tokens", "Field required")
    return parse_count_tokens(raw, rules)


def parse_count_tokens(raw: dict[str, Any], rules: ReadingRules) -> ParsedRequest:
    """Parse a request to count tokens, in which `max_tokens` may be missing; see request_reader.PARSERS."""
    honoured, ignored = _split(*_without_edits(raw), rules)
    try:
        body = MessagesBody.model_validate(honoured)
    except ValidationError as error:
        raise from_validation(error) from None
    rules.check_model(body.model)
    _check_media(body, rules)
    request = _chat_request(body, rules)
    omits = body.thinking is not None and body.thinking.display == "omitted"
    ignored += tuple(_left_out(body))
    return ParsedRequest(request, classify(request.messages), bool(body.stream), MessagesEcho(omits), ignored)


def _without_edits(raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return the body without edits of the context, which would only shorten it, and their names."""
    edits = raw.get("context_management")
    edits = edits.get("edits") if isinstance(edits, dict) and set(edits) == {"edits"} else None
    if not isinstance(edits, list) or raw["context_management"] == KEEP_ALL_THINKING:
        return raw, ()
    kinds = [edit.get("type") if isinstance(edit, dict) else None for edit in edits[:MAX_NAMED]]
    if not edits or not all(isinstance(kind, str) and _EDIT.fullmatch(kind) for kind in kinds):
        return raw, ()
    names = tuple(f"context_management.edits.{i} ({kind})" for i, kind in enumerate(kinds))
    return {name: value for name, value in raw.items() if name != "context_management"}, names


def _left_out(body: MessagesBody) -> Iterator[str]:
    """Yield the names of tools and blocks of Anthropic's servers, such as `tools.0 (web_search_20250305)`."""
    tools = ((f"tools.{i}", tool) for i, tool in enumerate(body.tools or ()))
    every = chain(tools, all_blocks(body.messages))
    others = (f"{path} ({one.type})" for path, one in every if isinstance(one, ServerTool | ServerToolBlock))
    yield from islice(others, MAX_NAMED)


def _split(
    raw: Mapping[str, Any], named: tuple[str, ...], rules: ReadingRules
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Split the fields as `split_fields`, with Anthropic's phrase in errors, on which clients drop the field."""
    if raw.get("thread") is not None:
        raise ThreadsUnsupported
    try:
        honoured, ignored = split_fields(raw, MessagesBody.model_fields, FIELD_RULES, rules.unknown_fields)
        return honoured, (*named, *ignored)
    except InvalidRequest as error:
        if error.field is None:
            raise
        raise wrong(error.field, f"{NOT_PERMITTED}. {error.message}") from None


def _check_media(body: MessagesBody, rules: ReadingRules) -> None:
    if "image" in rules.media_kinds:
        return
    for path, block in all_blocks(body.messages):
        if isinstance(block, ImageBlock):
            raise wrong(path, f"This block is image input, but the model accepts only: {rules.accepted_input}.")


def _chat_request(body: MessagesBody, rules: ReadingRules) -> ChatRequest:
    known = _tools(body)
    usable = _usable_tools(body, known)
    choice, is_parallel = _tool_choice(body, usable)
    listed = list(conversation(body.system, body.messages, known))
    last = f"messages.{len(body.messages) - 1}"
    prefill = _prefill(listed, last)
    if prefill == "":
        listed.pop()
    messages = normalize(listed, "inline", rules.volatile_patterns, rules.keeps_late_system)
    messages = tuple(message for message in messages if message["role"] != "system" or message["content"])
    if not messages:
        raise wrong("messages", "at least one message must have content")
    request = ChatRequest(
        request_id="",
        messages=messages,
        max_tokens=body.max_tokens,
        stop=tuple(body.stop_sequences or ()),
        grammar=_grammar(body),
        client=_client(body.metadata),
        tools=usable,
        tool_choice=choice,
        parallel_tool_calls=is_parallel,
        thinking=_thinking(body),
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=0 if body.top_k == -1 else body.top_k,
    )
    return _continued(request, last) if prefill else request


def _client(metadata: Metadata | None) -> str:
    if metadata is None or not metadata.user_id:
        return ""
    return hashlib.sha256(metadata.user_id.encode()).hexdigest()


def _tools(body: MessagesBody) -> dict[str, Tool]:
    """Return all tools of the body by name, in order."""
    tools: dict[str, Tool] = {}
    for i, tool in enumerate(body.tools or ()):
        if isinstance(tool, ServerTool):
            continue
        if tool.name in tools:
            raise wrong(f"tools.{i}.name", f"Tool names must be unique (received {shown(tool.name)} again)")
        if tool.input_schema.get("type", "object") != "object":
            kind = shown(tool.input_schema["type"])
            raise wrong(f"tools.{i}.input_schema.type", f"Input should be 'object' (received {kind})")
        tools[tool.name] = Tool(
            tool.name, _description(tool), tool.input_schema, bool(tool.strict), bool(tool.defer_loading)
        )
    return tools


def _description(tool: WireTool) -> str | None:
    if not tool.input_examples:
        return tool.description
    examples = "\n".join(json.dumps(example, ensure_ascii=False) for example in tool.input_examples)
    return f"{tool.description or ''}\n\nExamples of its input:\n{examples}".strip()


def _usable_tools(body: MessagesBody, known: Mapping[str, Tool]) -> tuple[Tool, ...]:
    """Return the tools except deferred ones that no message references, which the model does not see."""
    referenced, removed = set(), set()
    for path, block in all_blocks(body.messages):
        if isinstance(block, ToolReference):
            name, field = block.tool_name, f"{path}.tool_name"
        elif isinstance(block, ToolChange):
            name, field = block.tool.name, f"{path}.tool.name"
        else:
            continue
        if name not in known:
            raise wrong(field, f"Tool reference {shown(name)} not found in `tools`")
        is_removal = isinstance(block, ToolChange) and block.type == "tool_removal"
        (removed.add if is_removal else removed.discard)(name)
        referenced.add(name)
    usable = (tool for tool in known.values() if not tool.is_deferred or tool.name in referenced)
    return tuple(tool for tool in usable if tool.name not in removed)


def _tool_choice(body: MessagesBody, usable: tuple[Tool, ...]) -> tuple[ToolChoice, bool]:
    """Return the tool choice, and whether an answer may have several calls."""
    asked = body.tool_choice
    if asked is None:
        return ToolChoice(), True
    is_parallel = not asked.disable_parallel_tool_use
    if asked.type in ("auto", "none"):
        return ToolChoice("none" if asked.type == "none" else "auto"), is_parallel
    if not usable:
        raise wrong("tool_choice.type", f"{shown(asked.type)} requires at least one callable tool in `tools`")
    if asked.type == "any":
        return ToolChoice("required"), is_parallel
    if asked.name is None:
        raise wrong("tool_choice.name", "Field required")
    if asked.name not in {tool.name for tool in usable}:
        raise wrong("tool_choice.name", f"Tool {shown(asked.name)} not found in `tools`, or deferred and not loaded")
    return ToolChoice("required", (asked.name,)), is_parallel


def _thinking(body: MessagesBody) -> Thinking | None:
    """Convert the thinking settings. An effort alone means adaptive thinking; budget_tokens overrides its budget."""
    asked = body.thinking
    effort = None if body.output_config is None else body.output_config.effort
    if asked is not None and asked.type == "disabled":
        return Thinking("off", field="thinking.type")
    if asked is None and effort is None:
        return None
    budget = None if effort is None else EFFORT_BUDGETS[effort]
    of_template = None if effort is None else template_level(effort)
    if asked is None:
        return Thinking("auto", budget, of_template, "output_config.effort")
    if asked.type == "adaptive":
        return Thinking("auto", budget, of_template, "thinking.type")
    return Thinking("on", asked.budget_tokens or budget, of_template, "thinking.type")


def _grammar(body: MessagesBody) -> GrammarSpec | None:
    inner = None if body.output_config is None else body.output_config.format
    if inner is not None and body.output_format is not None:
        raise wrong("output_format", "This field and `output_config.format` may not be sent together: send one of them")
    form = inner or body.output_format
    if form is None:
        return None
    field = f"output_{'config.format' if inner else 'format'}.schema"
    return schema_grammar(form.schema_, field)


def _prefill(messages: list[Message], path: str) -> str | None:
    """Return the text of a final assistant message, which the answer continues; None if the last message is not one."""
    last = messages[-1]
    if last["role"] != "assistant":
        return None
    if last.get("tool_calls"):
        raise wrong(path, "tool_use ids were found without tool_result blocks immediately after")
    text: str = last["content"]
    if not text and "reasoning_content" in last:
        raise wrong(path, "The final assistant message has no text to continue")
    if text != text.rstrip():
        raise wrong(path, "final assistant content cannot end with trailing whitespace")
    return text


def _continued(request: ChatRequest, path: str) -> ChatRequest:
    """Return the request with the answer continuing the final message, without a thought."""
    if request.grammar is not None:
        raise wrong(path, f"A final assistant message cannot be continued with `{request.grammar.field}`")
    if request.thinking is not None and request.thinking.mode == "on":
        raise wrong(path, "A final assistant message cannot be continued while `thinking` is enabled")
    thinking = None if request.thinking is None else replace(request.thinking, mode="off", budget=None)
    return replace(request, thinking=thinking, continue_final_message=True)
