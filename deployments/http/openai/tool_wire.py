"""The wire models of tools and tool choices in chat completions, legacy functions included."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from deployments.http.wire import MAX_TOOLS, OpenWire, choose, tag
from deployments.protocol import Tool, ToolChoice
from engine.protocol import InvalidRequest

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise PydanticCustomError("tool_name", "must be 1 to 128 of the characters A-Z a-z 0-9 _ . : / -")
    return name


ToolName = Annotated[str, AfterValidator(_checked_name)]


class FunctionTool(OpenWire):
    """The name, description and parameters of a function."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def tool(self) -> Tool:
        return Tool(self.name, self.description, self.parameters, bool(self.strict))


class WireTool(OpenWire):
    """A tool of a chat completion, which is always a function."""

    type: Literal["function"]
    function: FunctionTool


class NamedFunction(OpenWire):
    """The name of a function."""

    name: str


class NamedChoice(OpenWire):
    """One function: `{"type": "function", "function": {"name": ...}}`. As a tool choice it requires a call."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(OpenWire):
    """The functions that may be called, or one of which must be called with mode `required`."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedChoice(OpenWire):
    """A tool choice `{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}`."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def choice_form(value: Any) -> str | None:
    """Return the tag of a tool choice, also for the Responses API; None for an unknown one."""
    if isinstance(value, str):
        return "mode" if value in ("none", "auto", "required") else None
    kind = value.get("type") if isinstance(value, dict) else None
    return kind if kind in ("function", "allowed_tools") else None


WireToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], tag("mode")]
    | Annotated[NamedChoice, tag("function")]
    | Annotated[AllowedChoice, tag("allowed_tools")],
    choose(
        choice_form,
        'must be "none", "auto", "required", an object of the type "function" that names one, or one of the type '
        '"allowed_tools"',
    ),
]
Tools = Annotated[list[WireTool], Field(max_length=MAX_TOOLS, fail_fast=True)]
Functions = Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


def _legacy_form(value: Any) -> str | None:
    if isinstance(value, str):
        return "mode" if value in ("none", "auto") else None
    return "name" if isinstance(value, dict) else None


LegacyChoice = Annotated[
    Annotated[Literal["none", "auto"], tag("mode")] | Annotated[NamedFunction, tag("name")],
    choose(_legacy_form, 'must be "none", "auto" or an object with a name'),
]


def tool_choice(choice: Any, tools: Sequence[Tool], field: str = "tool_choice") -> ToolChoice:
    """Convert a wire choice. Raises InvalidRequest if it names an unknown tool, or requires a call without tools."""
    match choice:
        case None:
            chosen = ToolChoice()
        case str():
            chosen = ToolChoice(choice)  # type: ignore[arg-type]
        case NamedChoice():
            chosen = ToolChoice("required", (choice.function.name,))
        case NamedFunction():
            chosen = ToolChoice("required", (choice.name,))
        case _:
            allowed = choice.allowed_tools
            chosen = ToolChoice(allowed.mode, tuple(tool.function.name for tool in allowed.tools))
    return check_choice(chosen, tools, field)


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
