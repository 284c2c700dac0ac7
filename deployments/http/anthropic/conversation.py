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
    ImageBlock,
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    ToolReference,
    ToolResult,
    ToolUse,
    UserMessage,
)
from deployments.http.anthropic.signature import omitted_thought
from deployments.protocol import Message, Tool

ERROR_MARK = "[error] "
"""Prefix of the result of a failed tool."""

BETWEEN_TEXTS = "\n\n"

Piece = str | dict[str, Any]
"""Text, or the content part of an image."""


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
    for block in _blocks(system or ""):
        if block.text:
            yield {"role": "system", "content": block.text}
    for role, turn in groupby(messages, key=lambda message: message.role):
        contents = [_blocks(message.content) for message in turn]
        if role == "system":
            yield from ({"role": "system", "content": _content(map(_piece, blocks))} for blocks in contents)
        elif role == "user":
            yield from _user_turn([block for blocks in contents for block in blocks], tools)
        else:
            yield _assistant_turn([block for blocks in contents for block in blocks])


def referenced_tools(messages: Sequence[UserMessage | AssistantMessage | SystemMessage]) -> Iterator[tuple[str, str]]:
    """Yield the path and the tool name of each tool reference."""
    for i, message in enumerate(messages):
        for j, block in enumerate(_blocks(message.content)):
            if isinstance(block, ToolResult):
                for k, inner in enumerate(_blocks(block.content or "")):
                    if isinstance(inner, ToolReference):
                        yield f"messages.{i}.content.{j}.content.{k}.tool_name", inner.tool_name


def image_paths(messages: Sequence[UserMessage | AssistantMessage | SystemMessage]) -> Iterator[str]:
    """Yield the path of each image, in the order of `conversation`."""
    for role, turn in groupby(enumerate(messages), key=lambda numbered: numbered[1].role):
        if role != "user":
            continue
        blocks = [
            (f"messages.{i}.content.{j}", block)
            for i, message in turn
            for j, block in enumerate(_blocks(message.content))
        ]
        for path, block in blocks:
            if isinstance(block, ToolResult):
                inner = enumerate(_blocks(block.content or ""))
                yield from (f"{path}.content.{k}" for k, found in inner if isinstance(found, ImageBlock))
        yield from (path for path, block in blocks if isinstance(block, ImageBlock))


def definition_text(tool: Tool) -> str:
    """Return a tool's definition as text for the middle of a conversation."""
    return json.dumps(tool.definition, ensure_ascii=False)


def _user_turn(blocks: Sequence[Any], tools: Mapping[str, Tool]) -> Iterator[Message]:
    """Yield the messages of a user turn, tool results first, as they must follow their calls directly."""
    results = [block for block in blocks if isinstance(block, ToolResult)]
    for result in results:
        yield {"role": "tool", "tool_call_id": result.tool_use_id, "content": _result_content(result, tools)}
    content = _content(_piece(block) for block in blocks if not isinstance(block, ToolResult))
    if content or not results:
        yield {"role": "user", "content": content}


def _result_content(result: ToolResult, tools: Mapping[str, Tool]) -> str | list[dict[str, Any]]:
    pieces = [
        definition_text(tools[block.tool_name]) if isinstance(block, ToolReference) else _piece(block)
        for block in _blocks(result.content or "")
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
    thoughts = [_thought(block) for block in blocks if isinstance(block, ThinkingBlock)]
    if thought := _content(thoughts):
        message["reasoning_content"] = thought
    if calls := [_call(block) for block in blocks if isinstance(block, ToolUse)]:
        message["tool_calls"] = calls
    return message


def _thought(block: ThinkingBlock) -> str:
    return block.thinking or omitted_thought(block.signature)


def _call(block: ToolUse) -> dict[str, Any]:
    arguments = json.dumps(block.input, ensure_ascii=False)
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _blocks(content: str | Sequence[Any]) -> Sequence[Any]:
    return [TextBlock(type="text", text=content)] if isinstance(content, str) else content


def _piece(block: TextBlock | ImageBlock) -> Piece:
    if isinstance(block, TextBlock):
        return block.text
    source = block.source
    is_inline = isinstance(source, Base64Source)
    url = f"data:{source.media_type};base64,{source.data}" if is_inline else source.url
    return {"type": "image_url", "image_url": {"url": url}}


def _content(pieces: Iterable[Piece]) -> str | list[dict[str, Any]]:
    joined: list[Piece] = []
    for is_text, run in groupby((piece for piece in pieces if piece), key=lambda piece: isinstance(piece, str)):
        neighbours = list(run)
        joined += [BETWEEN_TEXTS.join(map(str, neighbours))] if is_text else neighbours
    texts = [piece for piece in joined if isinstance(piece, str)]
    if len(texts) == len(joined):
        return "".join(texts)
    return [{"type": "text", "text": piece} if isinstance(piece, str) else piece for piece in joined]
