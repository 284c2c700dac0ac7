"""The wire models of tools and tool choices of the Responses API, and the tools that the model is offered."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from deployments.http.errors import shown
from deployments.http.openai.tool_wire import ToolName, check_choice, choice_form
from deployments.http.responses.conversation import full_name
from deployments.http.wire import MAX_TOOLS, OpenWire, choose, tag
from deployments.protocol import Tool, ToolChoice
from engine.protocol import InvalidRequest


class FunctionTool(OpenWire):
    """The name, description and parameters of a function."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Literal[False] | None = None  # tool_search, which would load it, is refused

    def tool(self, namespace: str | None = None) -> Tool:
        return Tool(full_name(self.name, namespace), self.description, self.parameters, bool(self.strict))


class NamespaceTool(OpenWire):
    """Functions whose calls are returned with the name of their namespace."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class OtherTool(OpenWire):
    """A tool of OpenAI's own servers: accepted because clients always send some, but never offered to the model."""

    type: str


OTHER_TOOLS = (
    *("web_search", "web_search_2025_08_26", "web_search_preview", "file_search", "tool_search", "mcp"),
    *("image_generation", "code_interpreter", "computer_use_preview", "computer", "local_shell", "shell"),
)
_TOOL_TAGS = {
    "function": "function",
    "namespace": "namespace",
    **dict.fromkeys(OTHER_TOOLS, "other"),
}


def _tool_tag(tool: Any) -> str | None:
    kind = tool.get("type") if isinstance(tool, dict) else "function"
    return _TOOL_TAGS.get(kind) if isinstance(kind, str) else None


WireTool = Annotated[
    Annotated[FunctionTool, tag("function")]
    | Annotated[NamespaceTool, tag("namespace")]
    | Annotated[OtherTool, tag("other")],
    choose(_tool_tag, f"must be one of: function, namespace, {', '.join(OTHER_TOOLS)}", "type"),
]
WireTools = Annotated[list[WireTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class NamedChoice(OpenWire):
    """A function that must be called."""

    type: Literal["function"]
    name: str
    namespace: str | None = None


class AllowedTool(OpenWire):
    """A function, all functions of a namespace, or web_search, which is ignored."""

    type: Literal["function", "namespace", "web_search"]
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
    | Annotated[AllowedChoice, tag("allowed_tools")],
    choose(
        choice_form,
        'must be "none", "auto", "required" or an object of the type "function" or "allowed_tools"; other tools are '
        "not supported",
    ),
]


@dataclass(frozen=True)
class OfferedTools:
    """The tools of a request that the model is offered."""

    tools: tuple[Tool, ...] = ()
    namespaces: tuple[tuple[str, str, str], ...] = ()
    """For each function of a namespace: its name for the model, its namespace, its own name."""
    not_offered: tuple[str, ...] = ()
    """Tools that are accepted without effect, such as `tools[3] (web_search)`."""


def offered_tools(sent: Sequence[Any]) -> OfferedTools:
    """Convert the tools of a request. Raises InvalidRequest if two functions have the same name."""
    tools: dict[str, Tool] = {}
    namespaces, not_offered = [], []
    for i, wire in enumerate(sent):
        if isinstance(wire, OtherTool):
            not_offered.append(f"tools[{i}] ({wire.type})")
        for path, tool, function, namespace in _functions(wire, f"tools[{i}]"):
            if tool.name in tools:
                raise InvalidRequest(f"`{path}` is {shown(function.name)}: an earlier tool has this name.", path)
            tools[tool.name] = tool
            if namespace is not None:
                namespaces.append((tool.name, namespace, function.name))
    return OfferedTools(tuple(tools.values()), tuple(namespaces), tuple(not_offered))


def _functions(wire: Any, path: str) -> Iterator[tuple[str, Tool, FunctionTool, str | None]]:
    if isinstance(wire, FunctionTool):
        yield f"{path}.name", wire.tool(), wire, None
    elif isinstance(wire, NamespaceTool):
        for i, function in enumerate(wire.tools):
            yield f"{path}.tools[{i}].name", function.tool(wire.name), function, wire.name


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
            return ToolChoice("required", (full_name(sent.name, sent.namespace),))
    names = tuple(name for tool in sent.tools for name in _allowed_names(tool, offered))
    if not names and sent.mode == "required":
        raise InvalidRequest(
            "`tool_choice` requires a tool call, but allows no function, and this server cannot call web_search.",
            "tool_choice",
        )
    return ToolChoice(sent.mode, names) if names else ToolChoice("none")


def _allowed_names(allowed: AllowedTool, offered: OfferedTools) -> Iterator[str]:
    if allowed.type == "function":
        yield full_name(allowed.name or "", allowed.namespace)
    elif allowed.type == "namespace":
        yield from (full for full, namespace, _ in offered.namespaces if namespace == allowed.name)
