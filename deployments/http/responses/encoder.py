"""ResponsesEncoder: writes an answer as a response of the Responses API, or as its events."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deployments.http.answer import Answer, prompt_details
from deployments.http.custom_tool import InputText
from deployments.http.errors import CLIENT_LEFT, Failure
from deployments.http.generation import Generation, TextDelta, ToolCall
from deployments.http.responses.items import Item, output_id
from deployments.http.responses.sealed import seal


@dataclass(frozen=True)
class ResponsesEcho:
    """The fields of the request's body that its answer and the store depend on."""

    settings: dict[str, Any]
    """Fields of the response that repeat those of the request."""
    instructions: str | None = None
    items: bytes = b"[]"
    """Input items as JSON, if they are stored or joined with stored ones."""
    previous_response_id: str | None = None
    references: tuple[str, ...] = ()
    """Ids of stored items that the input references."""
    stores: bool = True
    namespaces: tuple[tuple[str, str, str], ...] = ()
    """See OfferedTools."""
    customs: frozenset[str] = frozenset()
    """See OfferedTools."""
    shows_summary: bool = False
    """Whether the thought is sent as the summary of its item instead of its content."""
    seals_reasoning: bool = False
    """Whether reasoning items contain their thought as `encrypted_content`."""

    @property
    def is_open(self) -> bool:
        """Whether the conversation depends on stored responses."""
        return self.previous_response_id is not None or bool(self.references)


@dataclass(frozen=True)
class TextKind:
    """Types of an item with streamed text, of its part and of its events."""

    item_type: str
    part_type: str
    part_events: str
    text_events: str
    index_field: str = "content_index"

    def part(self, text: str) -> Item:
        more = {"annotations": [], "logprobs": []} if self.part_type == "output_text" else {}
        return {"type": self.part_type, "text": text, **more}


MESSAGE = TextKind("message", "output_text", "response.content_part", "response.output_text")
THOUGHT = TextKind("reasoning", "reasoning_text", "response.content_part", "response.reasoning_text")
SUMMARY = TextKind(
    "reasoning",
    "summary_text",
    "response.reasoning_summary_part",
    "response.reasoning_summary_text",
    "summary_index",
)


@dataclass(frozen=True)
class CallKind:
    """Types of an item that is a call, of its text and of its events."""

    item_type: str
    text_field: str
    text_events: str


DONE = b"data: [DONE]\n\n"
"""The end that Open Responses asks for and OpenAI leaves out. SDKs and agents stop at either."""

FUNCTION_CALL = CallKind("function_call", "arguments", "response.function_call_arguments")
CUSTOM_CALL = CallKind("custom_tool_call", "input", "response.custom_tool_call_input")


class Events:
    """Writes numbered server-sent events."""

    def __init__(self) -> None:
        self._num_events = 0

    def write(self, type: str, **fields: Any) -> bytes:
        event = {"type": type, **fields, "sequence_number": self.next_number()}
        return f"event: {type}\ndata: {json.dumps(event)}\n\n".encode()

    def next_number(self) -> int:
        self._num_events += 1
        return self._num_events - 1


class TextItem:
    """A message or thought in progress. Per delta only its text and its sequence number are encoded."""

    def __init__(self, kind: TextKind, id: str, index: int, seals: bool, events: Events):
        self.kind = kind
        self._id = id
        self._index = index
        self._seals = seals
        self._events = events
        self._pieces: list[str] = []
        self._place = {"item_id": id, "output_index": index, kind.index_field: 0}
        self._logprobs = {"logprobs": []} if kind is MESSAGE else {}
        event = {"type": f"{kind.text_events}.delta", **self._place, **self._logprobs}
        self._before = f"event: {event['type']}\ndata: {json.dumps(event)[:-1]}, ".encode()

    def opening(self) -> bytes:
        return self._events.write(
            "response.output_item.added", output_index=self._index, item=self._item("in_progress", [])
        ) + self._events.write(f"{self.kind.part_events}.added", **self._place, part=self.kind.part(""))

    def delta(self, text: str) -> bytes:
        self._pieces.append(text)
        rest = f'"delta": {json.dumps(text)}, "sequence_number": {self._events.next_number()}}}\n\n'
        return self._before + rest.encode()

    def closing(self, item: Item) -> bytes:
        text, write = "".join(self._pieces), self._events.write
        return b"".join(
            [
                write(f"{self.kind.text_events}.done", **self._place, text=text, **self._logprobs),
                write(f"{self.kind.part_events}.done", **self._place, part=self.kind.part(text)),
                write("response.output_item.done", output_index=self._index, item=item),
            ]
        )

    def item(self, status: str) -> Item:
        """Return the item with the text so far."""
        return self._item(status, [self.kind.part("".join(self._pieces))])

    def _item(self, status: str, parts: list[Item]) -> Item:
        head = {"id": self._id, "type": self.kind.item_type, "status": status}
        if self.kind is MESSAGE:
            return {**head, "role": "assistant", "content": parts}
        item = {**head, "summary": parts} if self.kind is SUMMARY else {**head, "summary": [], "content": parts}
        if self._seals and parts:
            item["encrypted_content"] = seal("".join(self._pieces))
        return item


class CallItem:
    """A call in progress."""

    def __init__(
        self, kind: CallKind, id: str, index: int, call_id: str, named: tuple[str | None, str], events: Events
    ):
        self.kind = kind
        self._index = index
        self._events = events
        namespace, self._name = named
        self._more = {} if namespace is None else {"namespace": namespace}
        self._head = {"id": id, "type": kind.item_type}
        self._call_id = call_id
        self._place = {"item_id": id, "output_index": index}
        self._input = InputText()
        self._pieces: list[str] = []

    def opening(self) -> bytes:
        return self._events.write("response.output_item.added", output_index=self._index, item=self.item("in_progress"))

    def push(self, part: ToolCall) -> bytes:
        """Return the events of a part of the call."""
        text = self._input.push(part) if self.kind is CUSTOM_CALL else part.arguments
        self._pieces.append(text)
        return self._events.write(f"{self.kind.text_events}.delta", **self._place, delta=text) if text else b""

    def closing(self, item: Item) -> bytes:
        named = {"name": self._name} if self.kind is FUNCTION_CALL else {}
        text = {self.kind.text_field: item[self.kind.text_field]}
        return self._events.write(f"{self.kind.text_events}.done", **self._place, **named, **text) + self._events.write(
            "response.output_item.done", output_index=self._index, item=item
        )

    def item(self, status: str) -> Item:
        """Return the item with the text so far."""
        text = {self.kind.text_field: "".join(self._pieces)}
        return {**self._head, "status": status, "call_id": self._call_id, "name": self._name, **text, **self._more}


class ResponsesEncoder:
    """See AnswerEncoder. Text after a call starts a new message.

    Args:
        echo: Fields of the request that the answer depends on.
        id: Id of the response.
        model: Name of the model.
        created: Unix time in seconds.
        keep: Called with the complete response to store it; None: it is not stored.
    """

    def __init__(
        self,
        echo: ResponsesEcho,
        id: str,
        model: str,
        created: int,
        keep: Callable[[dict[str, Any]], None] | None = None,
    ):
        self._echo = echo
        self._id = id
        self._head = {"id": id, "object": "response", "created_at": created, "model": model}
        self._keep = keep
        self.is_stored = keep is not None
        self._namespaces = {full: (namespace, name) for full, namespace, name in echo.namespaces}
        self._events = Events()
        self._output: list[Item] = []
        self._open: TextItem | CallItem | None = None
        self._has_answer = False
        self._is_opened = False

    def opening(self, generation: Generation | None = None) -> bytes:
        self._is_opened = True
        return b"".join(
            self._events.write(type, response=self.response("in_progress"))
            for type in ("response.created", "response.in_progress")
        )

    def encode(self, delta: TextDelta) -> bytes:
        events = b""
        if delta.reasoning:
            events += self._text(SUMMARY if self._echo.shows_summary else THOUGHT, delta.reasoning)
        if delta.text:
            events += self._text(MESSAGE, delta.text)
        for call in delta.tool_calls:
            events += self._call(call)
        return events

    def closing(self, answer: Answer) -> bytes:
        events, response = self._end(answer)
        return events + self._events.write(f"response.{response['status']}", response=response) + DONE

    def failed(self, failure: Failure) -> bytes:
        """Return the last events, with the error in both forms that SDKs read: as fields and as `error`."""
        events = b"" if self._is_opened else self.opening()
        error = {"code": _error_code(failure), "message": _error_message(failure)}
        events += self._events.write("response.failed", response=self.response("failed", error=error))
        fields = {**error, "param": failure.param}
        return events + self._events.write("error", **fields, error={"type": failure.type, **fields})

    def body(self, answer: Answer) -> dict[str, Any]:
        for delta in answer.choices[0].deltas:
            self.encode(delta)
        return self._end(answer)[1]

    def response(self, status: str, **fields: Any) -> dict[str, Any]:
        """Return the response with the items so far."""
        output = list(self._output)
        if self._open is not None:
            output.append(self._open.item("in_progress" if status == "in_progress" else "incomplete"))
        more = {"error": None, "incomplete_details": None, "completed_at": None, "usage": None, **fields}
        return {**self._head, "status": status, "background": False, **self._echo.settings, **more, "output": output}

    def _end(self, answer: Answer) -> tuple[bytes, dict[str, Any]]:
        """Store the response; return the events that end its last item, and the response itself.

        A completed answer without text and calls gets an empty message.
        """
        if answer.choices[0].finish_reason == "length":
            events = self._close("incomplete")
            more: dict[str, Any] = {"incomplete_details": {"reason": "max_output_tokens"}}
            response = self.response("incomplete", usage=usage(answer), **more)
        else:
            events = b"" if self._has_answer else self._text(MESSAGE, "")
            events += self._close("completed")
            response = self.response("completed", usage=usage(answer), completed_at=int(time.time()))
        if self._keep is not None:
            self._keep(response)
        return events, response

    def _text(self, kind: TextKind, text: str) -> bytes:
        events = b""
        item = self._open
        if not isinstance(item, TextItem) or item.kind is not kind:
            events += self._close("completed")
            index = len(self._output)
            seals = self._echo.seals_reasoning and kind is not MESSAGE
            item = TextItem(kind, output_id(kind.item_type, self._id, index), index, seals, self._events)
            self._open, self._has_answer = item, self._has_answer or kind is MESSAGE
            events += item.opening()
        return events + item.delta(text) if text else events

    def _close(self, status: str) -> bytes:
        if self._open is None:
            return b""
        item = self._open.item(status)
        events = self._open.closing(item)
        self._output.append(item)
        self._open = None
        return events

    def _call(self, part: ToolCall) -> bytes:
        events = b""
        if part.is_first:
            events += self._close("completed")
            kind, index = CUSTOM_CALL if part.name in self._echo.customs else FUNCTION_CALL, len(self._output)
            named = self._namespaces.get(part.name, (None, part.name))
            id = output_id(kind.item_type, self._id, index)
            self._open = CallItem(kind, id, index, part.id, named, self._events)
            self._has_answer = True
            events += self._open.opening()
        assert isinstance(self._open, CallItem)
        events += self._open.push(part)
        return events + self._close("completed") if part.is_last else events


def usage(answer: Answer) -> dict[str, Any]:
    """Return the token counts of an answer in the fields of the Responses API."""
    return {
        "input_tokens": answer.num_prompt_tokens,
        "input_tokens_details": {**prompt_details(answer), "cache_write_tokens": 0},  # writes are not billed
        "output_tokens": answer.num_tokens,
        "output_tokens_details": {
            "reasoning_tokens": answer.num_reasoning_tokens,
            "drafted_tokens": answer.num_drafted,
            "accepted_draft_tokens": answer.num_accepted,
        },
        "total_tokens": answer.num_prompt_tokens + answer.num_tokens,
    }


def _error_code(failure: Failure) -> str:
    if failure.code == "context_length_exceeded":
        return failure.code
    if failure.status == 429:
        return "rate_limit_exceeded"
    return "invalid_prompt" if failure.status < CLIENT_LEFT else "server_error"


def _error_message(failure: Failure) -> str:
    """Return the message with the retry time, as a stream has no Retry-After header and Codex reads the message."""
    if failure.retry_after_s is None:
        return failure.message
    return f"{failure.message} Please try again in {failure.retry_after_s}s."
