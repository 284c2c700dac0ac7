"""The wire models of tools and tool choices in chat completions, custom tools and legacy functions included."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from deployments.http.custom_tool import InputGrammar, TextFormat, custom_tool
from deployments.http.errors import shown
from deployments.http.wire import MAX_TOOLS, OpenWire, choose, tag, tag_among
from deployments.requests import Tool, ToolChoice
from engine.errors import InvalidRequest

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise PydanticCustomError("tool_name", "must be 1 to 128 of the characters A-Z a-z 0-9 _ . : / -")
    return name


ToolName = Annotated[str, AfterValidator(_checked_name)]


class FunctionDefinition(OpenWire):
    """The name, description and parameters of a function."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def tool(self) -> Tool:
        return Tool(self.name, self.description, self.parameters, bool(self.strict))


class FunctionTool(OpenWire):
    """A function of a chat completion."""

    type: Literal["function"]
    function: FunctionDefinition

    def tool(self, path: str) -> Tool:
        return self.function.tool()


class GrammarFormat(OpenWire):
    """A grammar of the input of a custom tool."""

    type: Literal["grammar"]
    grammar: InputGrammar


InputFormat = Annotated[
    Annotated[TextFormat, tag("text")] | Annotated[GrammarFormat, tag("grammar")],
    choose(tag_among("text", "grammar"), "must be one of: text, grammar", "type"),
]


class CustomDefinition(OpenWire):
    """The name and description of a custom tool, and the format of its text."""

    name: ToolName
    description: str | None = None
    format: InputFormat | None = None


class CustomTool(OpenWire):
    """A tool of a chat completion that takes one text."""

    type: Literal["custom"]
    custom: CustomDefinition

    def tool(self, path: str) -> Tool:
        """Return the function for the tool at a path of the request. Raises InvalidRequest for its grammar."""
        sent = self.custom.format
        grammar = sent.grammar if isinstance(sent, GrammarFormat) else None
        return custom_tool(self.custom.name, self.custom.description, grammar, f"{path}.custom.format.grammar")


WireTool = Annotated[
    Annotated[FunctionTool, tag("function")] | Annotated[CustomTool, tag("custom")],
    choose(tag_among("function", "custom"), "must be one of: function, custom", "type"),
]


class NameField(OpenWire):
    """An object with the name of a tool."""

    name: str


class NamedFunction(OpenWire):
    """One function: `{"type": "function", "function": {"name": ...}}`. As a tool choice it requires a call."""

    type: Literal["function"]
    function: NameField

    @property
    def name(self) -> str:
        return self.function.name


class NamedCustom(OpenWire):
    """One custom tool: `{"type": "custom", "custom": {"name": ...}}`. As a tool choice it requires a call."""

    type: Literal["custom"]
    custom: NameField

    @property
    def name(self) -> str:
        return self.custom.name


NamedTool = Annotated[
    Annotated[NamedFunction, tag("function")] | Annotated[NamedCustom, tag("custom")],
    choose(tag_among("function", "custom"), "must be one of: function, custom", "type"),
]


class AllowedTools(OpenWire):
    """The tools that may be called, or one of which must be called with mode `required`."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedChoice(OpenWire):
    """A tool choice `{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}`."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def choice_form(value: Any) -> str | None:
    """Return the tag of a tool choice; None for an unknown one. In the Responses API, too, which has the same kinds."""
    if isinstance(value, str):
        return "mode" if value in ("none", "auto", "required") else None
    kind = value.get("type") if isinstance(value, dict) else None
    return kind if kind in ("function", "custom", "allowed_tools") else None


WireToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], tag("mode")]
    | Annotated[NamedFunction, tag("function")]
    | Annotated[NamedCustom, tag("custom")]
    | Annotated[AllowedChoice, tag("allowed_tools")],
    choose(
        choice_form,
        'must be "none", "auto", "required", an object of the type "function" or "custom" that names one, or one of '
        'the type "allowed_tools"',
    ),
]
Tools = Annotated[list[WireTool], Field(max_length=MAX_TOOLS, fail_fast=True)]
Functions = Annotated[list[FunctionDefinition], Field(max_length=MAX_TOOLS, fail_fast=True)]


def _legacy_form(value: Any) -> str | None:
    if isinstance(value, str):
        return "mode" if value in ("none", "auto") else None
    return "name" if isinstance(value, dict) else None


LegacyChoice = Annotated[
    Annotated[Literal["none", "auto"], tag("mode")] | Annotated[NameField, tag("name")],
    choose(_legacy_form, 'must be "none", "auto" or an object with a name'),
]


def tool_choice(
    choice: Any, tools: Sequence[Tool], customs: frozenset[str] = frozenset(), field: str = "tool_choice"
) -> ToolChoice:
    """Convert a wire choice; `customs` are the names of the custom tools.

    Raises:
        InvalidRequest: It names an unknown tool or one of the other kind, or requires a call without tools.
    """
    match choice:
        case None:
            return ToolChoice()
        case str():
            return check_choice(ToolChoice(choice), tools, field)  # type: ignore[arg-type]
        case NamedFunction() | NamedCustom():
            chosen, named = ToolChoice("required", (choice.name,)), [choice]
        case NameField():
            return check_choice(ToolChoice("required", (choice.name,)), tools, field)
        case _:
            named = choice.allowed_tools.tools
            chosen = ToolChoice(choice.allowed_tools.mode, tuple(tool.name for tool in named))
    check_choice(chosen, tools, field)
    for one in named:
        check_kind(one.type, one.name, customs, field)
    return chosen


def check_kind(kind: str, name: str, customs: frozenset[str], field: str = "tool_choice") -> None:
    """Check that a tool of the request has the kind by which a choice names it. Raises InvalidRequest."""
    if (kind == "custom") != (name in customs):
        other = "function" if kind == "custom" else "custom"
        raise InvalidRequest(f"`{field}` names the {kind} {shown(name)}, whose type is {other}.", field)


def check_choice(choice: ToolChoice, tools: Sequence[Tool], field: str = "tool_choice") -> ToolChoice:
    """Return the choice. Raises InvalidRequest if it names an unknown tool, or requires a call without tools."""
    names = {tool.name for tool in tools}
    for name in choice.names:
        if name not in names:
            raise InvalidRequest(f"`{field}` names the tool {name[:128]!r}, which is not in `tools`.", field)
    if choice.mode == "required" and not tools:
        raise InvalidRequest(f"`{field}` requires a tool call, but the request has no tools.", field)
    return choice


def check_tools(tools: Sequence[Tool], field: str = "tools") -> tuple[Tool, ...]:
    """Return the tools. Raises InvalidRequest if two have the same name."""
    seen: set[str] = set()
    for i, tool in enumerate(tools):
        if tool.name in seen:
            raise InvalidRequest(f"`{field}[{i}]` has the name {tool.name!r}, which an earlier tool has.", field)
        seen.add(tool.name)
    return tuple(tools)


def custom_names(tools: Sequence[Any]) -> frozenset[str]:
    """Return the names of the custom tools among wire tools."""
    return frozenset(tool.custom.name for tool in tools if isinstance(tool, CustomTool))
