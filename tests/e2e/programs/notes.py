"""NotesBackend: has a program read a file with one of its own tools, without a model."""

import json
import re

from deployments.http.generation import TextDelta
from deployments.requests import ChatRequest, Route, Tool
from tests.deployments.http.clients.scripted import (
    OTHER_ANSWER,
    ScriptedBackend,
    call,
    call_script,
    text_of,
    text_script,
)
from tests.deployments.http.conftest import FakeBackend, FakeGeneration
from tests.e2e.programs.catalogue import NOTES_TEXT

PATH = re.compile(r"/\S+/notes\.txt")
READERS = ("Read", "read", "read_file", "exec_command", "run_commands", "functions.exec")
"""Tools that read a file, run a command, or (Codex with names of its own models) run JavaScript that calls tools."""
SCRIPT = "text((await tools.exec_command({{cmd: {command}}})).output)"


PATCH = f"*** Begin Patch\n*** Add File: copy.txt\n+{NOTES_TEXT}\n*** End Patch\n"


class NotesBackend(ScriptedBackend):
    """Calls a tool that reads the file whose path the user has named, and then says what the tool has said.

    A program with `apply_patch` also writes a copy of the file by it.
    """

    async def start(self, request: ChatRequest, route: Route) -> FakeGeneration:
        self.script = notes_script(request)
        return await FakeBackend.start(self, request, route)


def notes_script(request: ChatRequest) -> list[TextDelta]:
    """Return the deltas of an answer: a call, or text where there is a result, no tool or no path."""
    results = [message for message in request.messages if message["role"] == "tool"]
    asked = "\n".join(text_of(message) for message in request.messages if message["role"] == "user")
    tool = next((tool for name in READERS for tool in request.tools if tool.name == name), None)
    path = PATH.search(asked)
    if len(results) == 1 and any(tool.name == "apply_patch" for tool in request.tools):
        called = call("apply_patch", json.dumps({"input": PATCH}))
    elif results or tool is None or path is None:
        return text_script(text_of(results[-1]) if results else OTHER_ANSWER, request)
    else:
        called = call(tool.name, json.dumps(arguments(tool, path[0])))
    return call_script([called])


def arguments(tool: Tool, path: str) -> dict[str, str | list[str]]:
    """Return the path, or the command that shows the file, for each required argument: alone or as a list."""
    schema = tool.parameters or {}
    value = path if "read" in tool.name.lower() else f"cat {path}"
    value = SCRIPT.format(command=json.dumps(value)) if tool.input_grammar is not None else value
    types = {name: schema["properties"][name].get("type") for name in schema.get("required", ())}
    return {name: value if kind == "string" else [value] for name, kind in types.items()}
