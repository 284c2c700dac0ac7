"""The wire models of input items, and their conversion to plain items.

A plain item is a dict in the fields of the Responses API: message content is always a list of parts, thoughts are
readable text, and unknown keys are dropped.
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from deployments.http.errors import shown
from deployments.http.openai.message_wire import Detail, Image
from deployments.http.parsed_request import ReadingRules
from deployments.http.responses.sealed import Unsealer
from deployments.http.responses.tools import WireTools
from deployments.http.wire import STRING_OR_ARRAY, OpenWire, choose, tag
from engine.errors import InvalidRequest

Item = dict[str, Any]
"""A plain input item, or an output item."""

MAX_ITEMS = 16_384
"""Input items of one request."""

MAX_NAMED = 16
"""Most items that are left out whose names are returned."""

MAX_PARTS = 2048
"""Content parts of one item."""

MAX_NAME_CHARS = 256
"""Characters of a function's name or namespace in the history."""

ID_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "additional_tools": "at",
}
"""Type of an item to the prefix of its id."""

_MADE_ID = re.compile(r"(?:msg|rs|fc|fco|ctc|ctco|at)_([0-9a-f]{32})i?[0-9]{1,6}")


class TextPart(OpenWire):
    """A part of text, of a request or of an earlier answer."""

    type: str
    text: str

    def kept(self) -> Item:
        return {"type": "output_text" if self.type == "output_text" else "input_text", "text": self.text}


class RefusalPart(OpenWire):
    """A refusal in an earlier answer."""

    type: str
    refusal: str

    def kept(self) -> Item:
        return {"type": "refusal", "refusal": self.refusal}


class ImagePart(OpenWire):
    """An image; `image_url` is a string, or an object as in chat completions."""

    type: str
    image_url: Image
    detail: Detail | None = None

    def kept(self) -> Item:
        detail = self.detail or self.image_url.detail or "auto"
        return {"type": "input_image", "image_url": self.image_url.url, "detail": detail}


_PART_TAGS = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "refusal": "refusal",
    "input_image": "image",
}


def _part_tag(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else "text"
    return _PART_TAGS.get(kind) if isinstance(kind, str) else None


Part = Annotated[
    Annotated[TextPart, tag("text")] | Annotated[RefusalPart, tag("refusal")] | Annotated[ImagePart, tag("image")],
    choose(_part_tag, f"must be one of: {', '.join(_PART_TAGS)}", "type"),
]
Parts = Annotated[list[Part], Field(max_length=MAX_PARTS, fail_fast=True)]
Content = Annotated[Annotated[str, tag("string")] | Annotated[Parts, tag("array")], STRING_OR_ARRAY]
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]


class InputItem(OpenWire):
    """The base of items with an optional id."""

    id: str | None = None

    def _named(self, fields: Item) -> Item:
        return fields if self.id is None else {"id": self.id, **fields}


class MessageItem(InputItem):
    """A message; the type may be omitted."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content | None = None

    def kept(self) -> Item:
        if isinstance(self.content, list):
            parts = [part.kept() for part in self.content]
        else:
            kind = "output_text" if self.role == "assistant" else "input_text"
            parts = [{"type": kind, "text": self.content or ""}]
        return self._named({"type": "message", "role": self.role, "content": parts})


def _json_text(value: Any) -> Any:
    """Convert arguments that a client sends as an object to JSON text."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value


class FunctionCallItem(InputItem):
    """A function call of an earlier answer; arguments sent as an object become JSON text."""

    type: Literal["function_call"]
    call_id: str = Field(min_length=1)
    name: Name
    arguments: Annotated[str, BeforeValidator(_json_text)]
    namespace: Name | None = None

    def kept(self) -> Item:
        namespace = {} if self.namespace is None else {"namespace": self.namespace}
        call = {"type": "function_call", "call_id": self.call_id, "name": self.name, "arguments": self.arguments}
        return self._named({**call, **namespace})


class FunctionCallOutputItem(InputItem):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str = Field(min_length=1)
    output: Content

    def kept(self) -> Item:
        output = [part.kept() for part in self.output] if isinstance(self.output, list) else self.output
        return self._named({"type": self.type, "call_id": self.call_id, "output": output})


class ThoughtPart(OpenWire):
    """A part of a reasoning item: `summary_text` or `reasoning_text`."""

    type: str | None = None
    text: str


Thoughts = Annotated[list[ThoughtPart], Field(max_length=MAX_PARTS, fail_fast=True)]


class ReasoningItem(InputItem):
    """A thought: the text sealed by this server, else the content, else the summary.

    Text sealed by other servers is dropped.
    """

    type: Literal["reasoning"]
    summary: Thoughts | None = None
    content: Thoughts | None = None
    encrypted_content: str | None = None

    def kept(self) -> Item:
        summary = [{"type": "summary_text", "text": part.text} for part in self.summary or ()]
        content = [{"type": "reasoning_text", "text": part.text} for part in self.content or ()]
        return self._named({"type": "reasoning", "summary": summary, **({"content": content} if content else {})})


class ReferenceItem(OpenWire):
    """A reference to an item of a stored response; the type may be omitted."""

    type: Literal["item_reference"] | None = None
    id: str = Field(min_length=1)

    def kept(self) -> Item:
        return {"type": "item_reference", "id": self.id}


class CustomCallItem(InputItem):
    """A call of a tool that takes text."""

    type: Literal["custom_tool_call"]
    call_id: str = Field(min_length=1)
    name: Name
    input: str
    namespace: Name | None = None

    def kept(self) -> Item:
        namespace = {} if self.namespace is None else {"namespace": self.namespace}
        call = {"type": "custom_tool_call", "call_id": self.call_id, "name": self.name, "input": self.input}
        return self._named({**call, **namespace})


class AdditionalToolsItem(InputItem):
    """Tools that the model is offered in addition to those of the field `tools`."""

    type: Literal["additional_tools"]
    role: str | None = None
    tools: WireTools


class OtherItem(OpenWire):
    """An item of a tool that this server does not run, as of a session that began elsewhere: it is left out."""

    type: str


ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning", "item_reference")
OTHER_TYPES = frozenset(
    {
        *("compaction", "compaction_summary", "context_compaction"),
        *("tool_search_call", "tool_search_output", "web_search_call", "file_search_call", "image_generation_call"),
        *("code_interpreter_call", "computer_call", "computer_call_output", "program", "program_output"),
        *("local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output"),
        *("apply_patch_call", "apply_patch_call_output"),
        *("mcp_list_tools", "mcp_call", "mcp_approval_request", "mcp_approval_response"),
    }
)
"""Items of OpenAI's own tools."""


def _item_tag(item: Any) -> str | None:
    """Return the tag of an item. Without a type it is a reference if it has an id and no role, else a message."""
    if not isinstance(item, dict):
        return "message"
    kind = item.get("type")
    if kind is None:
        return "item_reference" if "id" in item and "role" not in item else "message"
    if not isinstance(kind, str):
        return None
    return "other" if kind in OTHER_TYPES else ITEM_TAGS.get(kind)


ITEM_TAGS = {
    **{kind: kind for kind in (*ITEM_TYPES, "custom_tool_call", "additional_tools")},
    "custom_tool_call_output": "function_call_output",
}


WireItem = Annotated[
    Annotated[MessageItem, tag("message")]
    | Annotated[FunctionCallItem, tag("function_call")]
    | Annotated[FunctionCallOutputItem, tag("function_call_output")]
    | Annotated[ReasoningItem, tag("reasoning")]
    | Annotated[CustomCallItem, tag("custom_tool_call")]
    | Annotated[AdditionalToolsItem, tag("additional_tools")]
    | Annotated[ReferenceItem, tag("item_reference")]
    | Annotated[OtherItem, tag("other")],
    choose(_item_tag, f"must be one of: {', '.join(ITEM_TYPES)}", "type"),
]
WireInput = Annotated[
    Annotated[str, tag("string")]
    | Annotated[list[WireItem], Field(max_length=MAX_ITEMS, fail_fast=True), tag("array")],
    STRING_OR_ARRAY,
]


def left_out(sent: str | Sequence[Any] | None) -> tuple[str, ...]:
    """Return the items of an `input` that are left out, such as `input[3] (web_search_call)`."""
    others = [(i, item) for i, item in enumerate(sent or ()) if isinstance(item, OtherItem)]
    return tuple(f"input[{i}] ({item.type})" for i, item in others[:MAX_NAMED])


def added_tools(sent: str | Sequence[Any] | None) -> list[tuple[str, Sequence[Any]]]:
    """Return (path, tools) of each item that adds tools."""
    items = enumerate(sent or ())
    return [(f"input[{i}].tools", item.tools) for i, item in items if isinstance(item, AdditionalToolsItem)]


def kept_items(sent: str | Sequence[Any], rules: ReadingRules) -> list[Item]:
    """Convert an `input` to plain items; a string, also an empty one, is one user message.

    Raises:
        InvalidRequest: The model does not read images, or a sealed thought is broken.
    """
    if isinstance(sent, str):
        return [MessageItem(role="user", content=sent).kept()]
    unsealer = Unsealer()
    items = []
    for i, wire in enumerate(sent):
        if isinstance(wire, OtherItem | AdditionalToolsItem):
            continue
        item = wire.kept()
        _check_media(item, f"input[{i}]", rules)
        if isinstance(wire, ReasoningItem) and wire.encrypted_content:
            item |= _unsealed(wire.encrypted_content, unsealer, f"input[{i}].encrypted_content")
        items.append(item)
    return items


def _unsealed(sealed: str, unsealer: Unsealer, path: str) -> Item:
    try:
        text = unsealer.open(sealed)
    except ValueError as error:
        raise InvalidRequest(f"`{path}` is {shown(sealed)}: it {error}.", path) from None
    return {} if text is None else {"content": [{"type": "reasoning_text", "text": text}]}


def _check_media(item: Item, path: str, rules: ReadingRules) -> None:
    for name in ("content", "output"):
        parts = item.get(name)
        for i, part in enumerate(parts if isinstance(parts, list) else ()):
            if part["type"] != "input_image":
                continue
            where = f"{path}.{name}[{i}]"
            rules.check_media("image", where)
            if item.get("role") == "assistant":
                raise InvalidRequest(f"`{where}` is an image: an assistant message may only contain text.", where)


def references(items: Sequence[Item]) -> Iterator[tuple[int, str]]:
    """Return (index, id) of each reference to a stored item."""
    return ((i, item["id"]) for i, item in enumerate(items) if item["type"] == "item_reference")


def output_id(kind: str, response_id: str, index: int) -> str:
    """Return the id of an output item, which contains the id of its response."""
    return f"{ID_PREFIXES[kind]}_{response_id.removeprefix('resp_')}{index}"


def response_id_of(item_id: str) -> str | None:
    """Return the id of the response that an item belongs to; None for an id that this server did not create."""
    made = _MADE_ID.fullmatch(item_id)
    return None if made is None else f"resp_{made[1]}"


def listed_items(items: Sequence[Item], response_id: str) -> list[Item]:
    """Return the input items of a response with ids and statuses, as clients list them."""
    hex_id = response_id.removeprefix("resp_")
    listed = []
    for i, item in enumerate(items):
        made = f"{ID_PREFIXES[item['type']]}_{hex_id}i{i}"
        parts = {"content": [_listed_part(part) for part in item["content"]]} if item["type"] == "message" else {}
        listed.append({"id": made, "status": "completed", **item, **parts})
    return listed


def _listed_part(part: Item) -> Item:
    return {**part, "annotations": []} if part["type"] == "output_text" else part
