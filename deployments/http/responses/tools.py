"""The wire models of tools and tool choices of the Responses API, and the tools that the model is offered."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from deployments.http.custom_tool import InputGrammar, TextFormat, custom_tool
from deployments.http.errors import shown
from deployments.http.openai.tool_wire import ToolName, check_choice, check_kind, choice_form
from deployments.http.wire import MAX_TOOLS, OpenWire, choose, tag, tag_among
from deployments.requests import Tool, ToolChoice
from engine.errors import InvalidRequest


class FunctionTool(OpenWire):
    """The name, description and parameters of a function."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None  # offered at once: tool_search, which would load it, is not offered


class GrammarFormat(InputGrammar):
    """A grammar of the input of a custom tool."""

    type: Literal["grammar"]


InputFormat = Annotated[
    Annotated[TextFormat, tag("text")] | Annotated[GrammarFormat, tag("grammar")],
    choose(tag_among("text", "grammar"), "must be one of: text, grammar", "type"),
]


class CustomTool(OpenWire):
    """A tool that takes one text."""

    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: InputFormat | None = None
    defer_loading: bool | None = None


InnerTool = Annotated[
    Annotated[FunctionTool, tag("function")] | Annotated[CustomTool, tag("custom")],
    choose(tag_among("function", "custom"), "must be one of: function, custom", "type"),
]


class NamespaceTool(OpenWire):
    """Functions and custom tools whose calls are returned with the name of their namespace."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: Annotated[list[InnerTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class OtherTool(OpenWire):
    """A tool of OpenAI's own servers: accepted because clients always send some, but never offered to the model."""

    type: str


MAX_NAMED = 16
"""Most tools and fields without effect whose names are returned."""

OTHER_TOOLS = (
    *("web_search", "web_search_2025_08_26", "web_search_preview", "file_search", "tool_search", "mcp"),
    *("image_generation", "code_interpreter", "computer_use_preview", "computer", "local_shell", "shell"),
    *("apply_patch", "programmatic_tool_calling"),
)
_TOOL_TAGS = {
    "function": "function",
    "custom": "custom",
    "namespace": "namespace",
    **dict.fromkeys(OTHER_TOOLS, "other"),
}


def _tool_tag(tool: Any) -> str | None:
    kind = tool.get("type") if isinstance(tool, dict) else "function"
    return _TOOL_TAGS.get(kind) if isinstance(kind, str) else None


WireTool = Annotated[
    Annotated[FunctionTool, tag("function")]
    | Annotated[CustomTool, tag("custom")]
    | Annotated[NamespaceTool, tag("namespace")]
    | Annotated[OtherTool, tag("other")],
    choose(_tool_tag, f"must be one of: function, custom, namespace, {', '.join(OTHER_TOOLS)}", "type"),
]
WireTools = Annotated[list[WireTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


def _allowed_kind(kind: str) -> str:
    if kind not in _TOOL_TAGS:
        raise PydanticCustomError("tool_type", "must be one of: {kinds}", {"kinds": ", ".join(_TOOL_TAGS)})
    return kind


class NamedChoice(OpenWire):
    """A function or custom tool that must be called."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class AllowedTool(OpenWire):
    """A function or custom tool, all tools of a namespace, or a tool that is not offered, which is ignored."""

    type: Annotated[str, AfterValidator(_allowed_kind)]
    name: str | None = None
    namespace: str | None = None


class AllowedChoice(OpenWire):
    """The tools that may be called, or one of which must be called with mode `required`."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


WireToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], tag("mode")]
    | Annotated[NamedChoice, tag("function")]
    | Annotated[NamedChoice, tag("custom")]
    | Annotated[AllowedChoice, tag("allowed_tools")],
    choose(
        choice_form,
        'must be "none", "auto", "required" or an object of the type "function", "custom" or "allowed_tools"; other '
        "tools are not supported",
    ),
]


@dataclass(frozen=True)
class OfferedTools:
    """The tools of a request that the model is offered."""

    tools: tuple[Tool, ...] = ()
    namespaces: tuple[tuple[str, str, str], ...] = ()
    """For each tool of a namespace: its name for the model, its namespace, its own name."""
    customs: frozenset[str] = frozenset()
    """Names for the model of the tools that take one text."""
    not_offered: tuple[str, ...] = ()
    """Tools and fields that are accepted without effect, such as `tools[3] (web_search)`."""


@dataclass(frozen=True)
class _SentTool:
    """A function or custom tool, and where it is in the request."""

    path: str
    wire: FunctionTool | CustomTool
    namespace: str | None = None

    @property
    def tool(self) -> Tool:
        wire, name = self.wire, full_name(self.wire.name, self.namespace)
        if isinstance(wire, FunctionTool):
            return Tool(name, wire.description, wire.parameters, bool(wire.strict))
        grammar = wire.format if isinstance(wire.format, GrammarFormat) else None
        return custom_tool(name, wire.description, grammar, f"{self.path}.format")


def offered_tools(sent: Sequence[Any] | None, added: Sequence[tuple[str, Sequence[Any]]] = ()) -> OfferedTools:
    """Convert the tools of a request.

    Args:
        sent: The field `tools`.
        added: (path, tools) of each item that adds tools; these replace earlier ones of the same name.

    Raises:
        InvalidRequest: Two tools of one list have the same name, or a grammar is not supported.
    """
    tools: dict[str, Tool] = {}
    namespaces: dict[str, tuple[str, str, str]] = {}
    customs: set[str] = set()
    not_offered: list[str] = []
    for path, wires in (("tools", sent or ()), *added):
        seen: set[str] = set()
        not_offered += [f"{path}[{i}] ({wire.type})" for i, wire in enumerate(wires) if isinstance(wire, OtherTool)]
        for one in _sent_tools(wires, path):
            tool, name = one.tool, one.wire.name
            if tool.name in seen:
                path = f"{one.path}.name"
                raise InvalidRequest(f"`{path}` is {shown(name)}: an earlier tool has this name.", path)
            seen.add(tool.name)
            tools[tool.name] = tool
            (customs.add if isinstance(one.wire, CustomTool) else customs.discard)(tool.name)
            if one.namespace is not None:
                namespaces[tool.name] = tool.name, one.namespace, name
            if one.wire.defer_loading:
                not_offered.append(f"{one.path}.defer_loading")
    return OfferedTools(
        tuple(tools.values()), tuple(namespaces.values()), frozenset(customs), tuple(not_offered[:MAX_NAMED])
    )


def full_name(name: str, namespace: str | None) -> str:
    """Return the name under which the model sees a tool of a namespace."""
    return name if namespace is None else f"{namespace}.{name}"


def _sent_tools(wires: Sequence[Any], path: str) -> Iterator[_SentTool]:
    for i, wire in enumerate(wires):
        if isinstance(wire, NamespaceTool):
            for j, inner in enumerate(wire.tools):
                yield _SentTool(f"{path}[{i}].tools[{j}]", inner, wire.name)
        elif not isinstance(wire, OtherTool):
            yield _SentTool(f"{path}[{i}]", wire)


def tool_choice(sent: Any, offered: OfferedTools) -> ToolChoice:
    """Convert a wire choice. Raises InvalidRequest if it names an unknown tool, or requires a call without tools."""
    choice = _choice(sent, offered)
    if choice.mode == "required" and not offered.tools and offered.not_offered:
        raise InvalidRequest(
            f"`tool_choice` requires a tool call, but this server cannot call {offered.not_offered[0]}.", "tool_choice"
        )
    return check_choice(choice, offered.tools)


def _choice(sent: Any, offered: OfferedTools) -> ToolChoice:
    match sent:
        case None:
            return ToolChoice()
        case str():
            return ToolChoice(sent)  # type: ignore[arg-type]
        case NamedChoice():
            return ToolChoice("required", (_named(sent, offered),))
    names = tuple(name for tool in sent.tools for name in _allowed_names(tool, offered))
    if not names and sent.mode == "required":
        raise InvalidRequest(
            f"`tool_choice` requires a tool call, but this server cannot call {sent.tools[0].type}.", "tool_choice"
        )
    return ToolChoice(sent.mode, names) if names else ToolChoice("none")


def _allowed_names(allowed: AllowedTool, offered: OfferedTools) -> Iterator[str]:
    if allowed.type in ("function", "custom"):
        yield _named(allowed, offered)
    elif allowed.type == "namespace":
        yield from (full for full, namespace, _ in offered.namespaces if namespace == allowed.name)


def _named(one: NamedChoice | AllowedTool, offered: OfferedTools) -> str:
    """Return the name of a tool for the model. Raises InvalidRequest if it has another type."""
    name = full_name(one.name or "", one.namespace)
    if name in {tool.name for tool in offered.tools}:
        check_kind(one.type, name, offered.customs)
    return name
