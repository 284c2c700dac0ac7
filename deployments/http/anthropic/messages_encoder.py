"""MessagesEncoder: writes an answer as a message of Anthropic's dialect, or as the events of its stream."""

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from pydantic_core import from_json

from deployments.http.answer import Answer, prompt_details
from deployments.http.anthropic.error_form import error_event
from deployments.http.anthropic.messages_wire import MessagesEcho
from deployments.http.anthropic.signature import signature_of
from deployments.http.errors import Failure
from deployments.http.generation import Generation, TextDelta, ToolCall

Block = dict[str, Any]


class MessagesEncoder:
    """See AnswerEncoder. Consecutive thought or text is one content block; each call is its own block.

    Args:
        echo: Fields of the request that the answer depends on.
        id: Id of the message.
        model: Name of the model.
        request_id: Request id for error events.
    """

    def __init__(self, echo: MessagesEcho, id: str, model: str, request_id: str):
        self._echo = echo
        self._head = {"id": id, "type": "message", "role": "assistant", "model": model}
        self._request_id = request_id
        self._open: str | None = None
        self._index = 0
        self._thought: list[str] = []

    def opening(self, generation: Generation) -> bytes:
        usage = _usage(generation.num_prompt_tokens, generation.num_cached_tokens, 0)
        message = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return _event({"type": "message_start", "message": message})

    def encode(self, delta: TextDelta) -> bytes:
        return b"".join(event for kind, value in _pieces(delta) for event in self._events(kind, value))

    def closing(self, answer: Answer) -> bytes:
        end = {"type": "message_delta", "delta": _stop(answer), "usage": usage_of(answer)}
        return b"".join([*self._close(), _event(end), _event({"type": "message_stop"})])

    def failed(self, failure: Failure) -> bytes:
        return error_event(failure, self._request_id)

    def body(self, answer: Answer) -> dict[str, Any]:
        blocks: list[Block] = []
        for delta in answer.choices[0].deltas:
            for kind, value in _pieces(delta):
                _add(blocks, kind, value)
        return {
            **self._head,
            "content": [self._finished(block) for block in blocks],
            **_stop(answer),
            "usage": usage_of(answer),
        }

    def _events(self, kind: str, value: Any) -> Iterator[bytes]:
        if kind == "tool_use":
            if value.is_first:
                yield from self._close()
                yield self._start(kind, {**_tool_use(value), "input": {}})
            if value.arguments:
                yield self._delta({"type": "input_json_delta", "partial_json": value.arguments})
            if value.is_last:
                yield from self._close()
            return
        if self._open != kind:
            yield from self._close()
            yield self._start(kind, _EMPTY[kind])
        if kind == "text":
            yield self._delta({"type": "text_delta", "text": value})
            return
        self._thought.append(value)
        if not self._echo.omits_thinking:
            yield self._delta({"type": "thinking_delta", "thinking": value})

    def _start(self, kind: str, block: Block) -> bytes:
        self._open = kind
        return _event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self) -> Iterator[bytes]:
        """Yield the events that end the open block, if there is one."""
        if self._open is None:
            return
        if self._open == "thinking":
            signature = signature_of("".join(self._thought), self._echo.omits_thinking)
            self._thought.clear()
            yield self._delta({"type": "signature_delta", "signature": signature})
        yield _event({"type": "content_block_stop", "index": self._index})
        self._open = None
        self._index += 1

    def _finished(self, block: Block) -> Block:
        if block["type"] == "tool_use":
            return {**block, "input": _input_of(block["input"])}
        if block["type"] != "thinking":
            return block
        omits = self._echo.omits_thinking
        signature = signature_of(block["thinking"], omits)
        return {**block, "thinking": "" if omits else block["thinking"], "signature": signature}


_EMPTY: dict[str, Block] = {
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
}


def _pieces(delta: TextDelta) -> Iterator[tuple[str, Any]]:
    """Yield the content of a delta as pairs of content block type and value."""
    if delta.reasoning:
        yield "thinking", delta.reasoning
    if delta.text:
        yield "text", delta.text
    for call in delta.tool_calls:
        yield "tool_use", call


def _add(blocks: list[Block], kind: str, value: Any) -> None:
    if kind == "tool_use":
        if value.is_first:
            blocks.append({**_tool_use(value), "input": ""})
        blocks[-1]["input"] += value.arguments
        return
    if not blocks or blocks[-1]["type"] != kind:
        blocks.append(dict(_EMPTY[kind]))
    blocks[-1][kind] += value


def _input_of(arguments: str) -> Any:
    """Return the object of a call's arguments; those that the end of the answer cut off as far as they can be read."""
    try:
        return json.loads(arguments)
    except ValueError:
        with suppress(ValueError):  # unpaired surrogates, which this reader refuses
            return from_json(arguments, allow_partial="trailing-strings")
        return {}


def _tool_use(call: ToolCall) -> Block:
    return {"type": "tool_use", "id": f"toolu_{call.id.removeprefix('call_')}", "name": call.name}


def usage_of(answer: Answer) -> dict[str, Any]:
    """Return the token counts of an answer; for `specprefill` see prompt_details."""
    usage = _usage(answer.num_prompt_tokens, answer.num_cached_tokens, answer.num_tokens)
    if answer.num_reasoning_tokens:
        usage["output_tokens_details"] = {"thinking_tokens": answer.num_reasoning_tokens}
    return usage | {name: value for name, value in prompt_details(answer).items() if name != "cached_tokens"}


def _usage(num_prompt_tokens: int, num_cached_tokens: int, num_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": num_prompt_tokens - num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached_tokens,
        "output_tokens": num_tokens,
    }


def _stop(answer: Answer) -> dict[str, Any]:
    choice = answer.choices[0]
    if choice.finish_reason == "length":
        reason = "model_context_window_exceeded" if answer.context_limited else "max_tokens"
    elif choice.finish_reason == "tool_calls":
        reason = "tool_use"
    else:
        reason = "end_turn" if choice.stop_sequence is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": choice.stop_sequence if reason == "stop_sequence" else None}


def _event(body: dict[str, Any]) -> bytes:
    return f"event: {body['type']}\ndata: {json.dumps(body)}\n\n".encode()
