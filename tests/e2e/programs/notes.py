"""NotesBackend: has a program read a file with one of its own tools, without a model."""

import json
import re

from deployments.protocol import ChatRequest, Route, TextDelta, Tool
from tests.deployments.http.clients.scripted import (
    CALL_TOKENS,
    OTHER_ANSWER,
    ScriptedBackend,
    call,
    text_of,
    text_script,
)
from tests.deployments.http.conftest import FakeBackend, FakeGeneration

PATH = re.compile(r"/\S+/notes\.txt")
READERS = ("Read", "read", "read_file", "exec_command", "shell", "exec", "run_commands")
"""Tools that read a file, or run a command."""


class NotesBackend(ScriptedBackend):
    """Calls a tool that reads the file whose path the user has named, and then says what the tool has said."""

    async def start(self, request: ChatRequest, route: Route) -> FakeGeneration:
        self.script = notes_script(request)
        return await FakeBackend.start(self, request, route)


def notes_script(request: ChatRequest) -> list[TextDelta]:
    """Return the deltas of an answer: a call, or text where there is a result, no tool or no path."""
    results = [message for message in request.messages if message["role"] == "tool"]
    asked = "\n".join(text_of(message) for message in request.messages if message["role"] == "user")
    tool = next((tool for name in READERS for tool in request.tools if tool.name == name), None)
    path = PATH.search(asked)
    if results or tool is None or path is None:
        return text_script(text_of(results[-1]) if results else OTHER_ANSWER, request)
    called = call(tool.name, json.dumps(arguments(tool, path[0])))
    return [TextDelta("", CALL_TOKENS, tool_calls=(called,)), TextDelta("", 1, "tool_calls")]


def arguments(tool: Tool, path: str) -> dict[str, str | list[str]]:
    """Return the path, or the command that shows the file, for each required argument: alone or as a list."""
    schema = tool.parameters or {}
    value = path if "read" in tool.name.lower() else f"cat {path}"
    types = {name: schema["properties"][name].get("type") for name in schema.get("required", ())}
    return {name: value if kind == "string" else [value] for name, kind in types.items()}
