"""Converts Anthropic's messages to the input of `normalize`.

Adjacent texts are joined with a blank line, so that a string and a list with one text block give the same prompt.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from deployments.http.anthropic.block_wire import (
    AssistantMessage,
    Base64Source,
    DocumentBlock,
    ImageBlock,
    ServerToolBlock,
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    ToolChange,
    ToolReference,
    ToolResult,
    ToolUse,
    UserMessage,
)
from deployments.http.anthropic.signature import omitted_thought
from deployments.requests import Tool
from engine.processing.message import Message, Part, image_part, text_part

ERROR_MARK = "[error] "
"""Prefix of the result of a failed tool."""

BETWEEN_TEXTS = "\n\n"

Piece = str | Part
"""Text, or the content part of an image."""

Numbered = tuple[str, Any]
"""Path of a block in the client's body, and the block."""


def conversation(
    system: str | Sequence[TextBlock] | None,
    messages: Sequence[UserMessage | AssistantMessage | SystemMessage],
    tools: Mapping[str, Tool],
) -> Iterator[Message]:
    """Yield the messages of a conversation; adjacent messages of one role become one turn.

    Args:
        system: The system prompt.
        messages: The messages.
        tools: All tools of the request by name, for tool references.
    """
    for _, block in _numbered(system or "", "system"):
        if block.text:
            yield {"role": "system", "content": block.text}
    for role, turn in groupby(enumerate(messages), key=lambda numbered: numbered[1].role):
        contents = [_numbered(message.content, f"messages.{i}.content") for i, message in turn]
        if role == "system":
            for blocks in contents:
                pieces = [_change(block, tools) if isinstance(block, ToolChange) else block.text for _, block in blocks]
                yield {"role": "system", "content": _content(pieces)}
        elif role == "user":
            yield from _user_turn([block for blocks in contents for block in blocks], tools)
        else:
            blocks = [block for blocks in contents for _, block in blocks if not isinstance(block, ServerToolBlock)]
            if blocks or not any(contents):
                yield _assistant_turn(blocks)


def all_blocks(messages: Sequence[UserMessage | AssistantMessage | SystemMessage]) -> Iterator[Numbered]:
    """Yield the blocks of all messages with their paths; those of a tool result follow it."""
    for i, message in enumerate(messages):
        for path, block in _numbered(message.content, f"messages.{i}.content"):
            yield path, block
            if isinstance(block, ToolResult):
                yield from _numbered(block.content or "", f"{path}.content")


def definition_text(tool: Tool) -> str:
    """Return a tool's definition as text for the middle of a conversation."""
    return json.dumps(tool.definition, ensure_ascii=False)


def _change(change: ToolChange, tools: Mapping[str, Tool]) -> str:
    if change.type == "tool_removal":
        return f"The tool {change.tool.name} can no longer be called."
    return definition_text(tools[change.tool.name])


def _user_turn(blocks: Sequence[Numbered], tools: Mapping[str, Tool]) -> Iterator[Message]:
    """Yield the messages of a user turn, tool results first, as they must follow their calls directly."""
    results = [(path, block) for path, block in blocks if isinstance(block, ToolResult)]
    for path, result in results:
        content = _result_content(result, f"{path}.content", tools)
        yield {"role": "tool", "tool_call_id": result.tool_use_id, "content": content}
    content = _content(_piece(path, block) for path, block in blocks if not isinstance(block, ToolResult))
    if content or not results:
        yield {"role": "user", "content": content}


def _result_content(result: ToolResult, path: str, tools: Mapping[str, Tool]) -> str | list[Part]:
    pieces = [
        definition_text(tools[block.tool_name]) if isinstance(block, ToolReference) else _piece(place, block)
        for place, block in _numbered(result.content or "", path)
    ]
    if not result.is_error:
        return _content(pieces)
    if pieces and isinstance(pieces[0], str):
        return _content([ERROR_MARK + pieces[0], *pieces[1:]])
    return _content([ERROR_MARK, *pieces])


def _assistant_turn(blocks: Sequence[Any]) -> Message:
    message: Message = {
        "role": "assistant",
        "content": _content(block.text for block in blocks if isinstance(block, TextBlock)),
    }
    thoughts = [block for block in blocks if isinstance(block, ThinkingBlock)]
    if thought := _content(block.thinking or omitted_thought(block.signature) for block in thoughts):
        message["reasoning_content"] = thought
    if calls := [_call(block) for block in blocks if isinstance(block, ToolUse)]:
        message["tool_calls"] = calls
    return message


def _call(block: ToolUse) -> dict[str, Any]:
    arguments = json.dumps(block.input, ensure_ascii=False)
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _numbered(content: str | Sequence[Any], path: str) -> list[Numbered]:
    blocks = [TextBlock(type="text", text=content)] if isinstance(content, str) else content
    return [(f"{path}.{i}", block) for i, block in enumerate(blocks)]


def _piece(path: str, block: TextBlock | DocumentBlock | ImageBlock) -> Piece:
    if isinstance(block, TextBlock | DocumentBlock):
        return block.text
    source = block.source
    is_inline = isinstance(source, Base64Source)
    url = f"data:{source.media_type};base64,{source.data}" if is_inline else source.url
    return image_part(url, field=path)


def _content(pieces: Iterable[Piece]) -> str | list[Part]:
    joined: list[Piece] = []
    for is_text, run in groupby((piece for piece in pieces if piece), key=lambda piece: isinstance(piece, str)):
        neighbours = list(run)
        joined += [BETWEEN_TEXTS.join(map(str, neighbours))] if is_text else neighbours
    texts = [piece for piece in joined if isinstance(piece, str)]
    if len(texts) == len(joined):
        return "".join(texts)
    return [text_part(piece) if isinstance(piece, str) else piece for piece in joined]
