"""EditsBackend: has a program read a file and then change it with its own tools, without a model."""

import json
from typing import Any

from deployments.http.generation import ToolCall
from deployments.requests import ChatRequest, Route, Tool
from tests.deployments.http.clients.scripted import ScriptedBackend, call, call_script, text_of, text_script
from tests.deployments.http.conftest import FakeBackend, FakeGeneration
from tests.e2e.programs.catalogue import EDITED_TEXT, NOTES, NOTES_TEXT
from tests.e2e.programs.notes import PATH, READERS, arguments

EDITORS = ("Edit", "edit", "replace", "apply_patch", "exec_command")
"""Tools that change a file, in this order; Codex has one of the last two."""
PATCH = f"*** Begin Patch\n*** Update File: {NOTES}\n@@\n-{NOTES_TEXT}\n+{EDITED_TEXT}\n*** End Patch\n"
DONE = "The file is changed."


class EditsBackend(ScriptedBackend):
    """Calls a tool that reads the file whose path the user has named, one that changes it, and then says so."""

    max_context_tokens = 65536

    async def start(self, request: ChatRequest, route: Route) -> FakeGeneration:
        called = next_call(request)
        if called is None:
            self.script = text_script(DONE, request)
        else:
            self.script = call_script([called])
        return await FakeBackend.start(self, request, route)


def next_call(request: ChatRequest) -> ToolCall | None:
    """Return the next call; None where both have been made, and where there is no tool or no path."""
    asked = "\n".join(text_of(message) for message in request.messages if message["role"] == "user")
    path = PATH.search(asked)
    num_results = sum(message["role"] == "tool" for message in request.messages)
    names = [READERS, EDITORS][num_results] if num_results < 2 else ()
    tool = next((tool for name in names for tool in request.tools if tool.name == name), None)
    if tool is None or path is None:
        return None
    given = arguments(tool, path[0]) if num_results == 0 else edit_arguments(tool, path[0])
    return call(tool.name, json.dumps(given))


def edit_arguments(tool: Tool, path: str) -> dict[str, Any]:
    """Return the patch, the command, or the path with both texts under the names of the tool's required arguments."""
    if tool.name == "apply_patch":
        return {"input": PATCH}
    values = {"path": path, "old": NOTES_TEXT, "new": EDITED_TEXT, "cmd": f"sed -i s/quiet/loud/ {path}"}
    schema = tool.parameters or {}
    given = {name: next((values[part] for part in values if part in name.lower()), None) for name in schema["required"]}
    return {name: "Say loud instead of quiet." if value is None else value for name, value in given.items()}
