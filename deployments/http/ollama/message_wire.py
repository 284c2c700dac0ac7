"""The wire models of Ollama's messages and tools, and their conversion to canonical messages."""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from deployments.http.errors import shown
from deployments.http.parsed_request import ReadingRules
from deployments.http.wire import MAX_TOOLS, OpenWire
from deployments.requests import Tool
from engine.errors import InvalidRequest
from engine.processing.message import Message, Part, image_part, text_part

MAX_IMAGES = 2048
"""Images of one message."""

MAX_TOOL_CALLS = 512
"""Tool calls of one message."""

MAX_NAME_CHARS = 256
"""Characters of a tool's name in the history."""

DATA_URL = "data:image/any;base64,"
"""Head of the URL of an image, whose format is read from its bytes."""


class OllamaFunction(OpenWire):
    """The name, description and parameters of a function."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class OllamaTool(OpenWire):
    """A function that the model may call."""

    type: Literal["function"] = "function"
    function: OllamaFunction


Tools = Annotated[list[OllamaTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class OllamaCalledFunction(OpenWire):
    """The name and arguments of a call in an earlier answer."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
    arguments: dict[str, Any] | None = None


class OllamaCall(OpenWire):
    """A call in an earlier answer."""

    id: str | None = None
    function: OllamaCalledFunction


Images = Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_IMAGES, fail_fast=True)]
"""Each as base64."""

Role = Annotated[
    Literal["system", "user", "assistant", "tool"],
    BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value),
]


class OllamaMessage(OpenWire):
    """A message. A tool's result names its call by `tool_call_id` or `tool_name`, else it belongs to the next call."""

    role: Role
    content: str | None = None
    thinking: str | None = None
    images: Images | None = None
    tool_calls: Annotated[list[OllamaCall], Field(max_length=MAX_TOOL_CALLS, fail_fast=True)] | None = None
    tool_name: Annotated[str, Field(max_length=MAX_NAME_CHARS)] | None = None
    tool_call_id: str | None = None


def content_of(text: str, images: Sequence[str] | None, path: str, rules: ReadingRules) -> str | list[Part]:
    """Return canonical content: the images, then the text. Raises InvalidRequest; path: of the images."""
    if not images:
        return text
    parts = [_image(image, f"{path}[{j}]", rules) for j, image in enumerate(images)]
    return [*parts, text_part(text)] if text else parts


def _image(image: str, path: str, rules: ReadingRules) -> Part:
    rules.check_media("image", path)
    if image[:8].lower().startswith(("http://", "https://")):
        raise InvalidRequest(f"`{path}` is {shown(image)}: an image must be sent as base64.", path)
    is_url = image[:5].lower() == "data:"
    return image_part(image if is_url else DATA_URL + image, field=path)


def canonical_messages(messages: Iterable[OllamaMessage], rules: ReadingRules) -> Iterator[Message]:
    """Yield one canonical message per message. Raises InvalidRequest."""
    waiting: list[tuple[str, str]] = []  # id and name of each call without a result
    for i, message in enumerate(messages):
        content = content_of(message.content or "", message.images, f"messages[{i}].images", rules)
        canonical: Message = {"role": message.role, "content": content}
        if message.role == "tool":
            canonical["tool_call_id"] = _answered_call(message, waiting) or f"call_{i}"
            if message.tool_name:
                canonical["name"] = message.tool_name
        if message.role == "assistant":
            if message.thinking:
                canonical["reasoning_content"] = message.thinking
            if message.tool_calls:
                ids = [call.id or f"call_{i}_{j}" for j, call in enumerate(message.tool_calls)]
                waiting = [(id, call.function.name) for id, call in zip(ids, message.tool_calls, strict=True)]
                canonical["tool_calls"] = [
                    _canonical_call(id, call) for id, call in zip(ids, message.tool_calls, strict=True)
                ]
        yield canonical


def _answered_call(message: OllamaMessage, waiting: list[tuple[str, str]]) -> str | None:
    """Return the id of the call that a result belongs to, which then has its result; None without one."""
    if message.tool_call_id:
        waiting[:] = [call for call in waiting if call[0] != message.tool_call_id]
        return message.tool_call_id
    named = [call for call in waiting if call[1] == message.tool_name]
    if not (found := next(iter(named or waiting), None)):
        return None
    waiting.remove(found)
    return found[0]


def _canonical_call(id: str, call: OllamaCall) -> dict[str, Any]:
    arguments = json.dumps(call.function.arguments or {}, ensure_ascii=False)
    return {"id": id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def tools_of(tools: Sequence[OllamaTool]) -> tuple[Tool, ...]:
    """Return the tools. Raises InvalidRequest if two have the same name."""
    seen: set[str] = set()
    for i, tool in enumerate(tools):
        if tool.function.name in seen:
            raise InvalidRequest(
                f"`tools[{i}]` has the name {tool.function.name!r}, which an earlier tool has.", "tools"
            )
        seen.add(tool.function.name)
    return tuple(Tool(tool.function.name, tool.function.description, tool.function.parameters) for tool in tools)
