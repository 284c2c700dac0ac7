"""ChatLines and GenerateLines: write an answer as Ollama's object, or as the lines of its stream."""

import json
from datetime import UTC, datetime
from typing import Any

from deployments.http.answer import Answer, joined_calls
from deployments.http.errors import Failure
from deployments.http.generation import Generation, TextDelta, TextLogprobs, ToolCall
from deployments.http.ollama.durations import answer_durations
from deployments.http.ollama.error_form import error_line
from deployments.http.ollama.generation_wire import GenerationEcho
from deployments.http.timeline import current

CONTENT_TYPE = "application/x-ndjson"

LEAST_LOGPROB = -9999.0
"""Stands for the logprob of a token of probability zero, as JSON has no infinity."""


class GenerateLines:
    """See AnswerEncoder and StreamForm. Answers of /api/generate.

    Args:
        echo: Fields of the request that the answer depends on.
    """

    content_type = CONTENT_TYPE

    def __init__(self, echo: GenerationEcho):
        self._echo = echo
        self._num_calls = 0
        self._parts: list[ToolCall] = []  # of a call that is not complete

    def part(self, text: str, thinking: str, calls: tuple[ToolCall, ...]) -> dict[str, Any]:
        """Return the fields with output, of a line or of a whole answer."""
        return {"response": text, **({"thinking": thinking} if thinking else {})}

    def loaded(self) -> dict[str, Any]:
        """Return the answer to a request without a prompt."""
        return {**self._head, **self.part("", "", ()), "done": True, "done_reason": "load"}

    def opening(self, generation: Generation) -> bytes:
        return b""

    def encode(self, delta: TextDelta) -> bytes:
        calls = self._complete(delta.tool_calls)
        if not (delta.text or delta.reasoning or calls or delta.logprobs):
            return b""
        part = self.part(delta.text, delta.reasoning, calls)
        self._num_calls += len(calls)
        return self._line({**part, "done": False, **self._logprobs(delta.logprobs)})

    def closing(self, answer: Answer) -> bytes:
        return self._line({**self.part("", "", ()), **_end(answer)})

    def failed(self, failure: Failure) -> bytes:
        return error_line(failure)

    def body(self, answer: Answer) -> dict[str, Any]:
        choice = answer.choices[0]
        part = self.part(choice.text, choice.reasoning, tuple(call for call in choice.tool_calls if call.is_last))
        return {**self._head, **part, **_end(answer), **self._logprobs(tuple(choice.logprobs))}

    def waiting(self) -> bytes:
        """Return a line without output, which keeps a connection open."""
        return self._line({**self.part("", "", ()), "done": False})

    def note(self, header: str, value: str) -> bytes:
        """Return a line without output with what a header would have said."""
        return self._line({**self.part("", "", ()), "done": False, header.lower(): value})

    def _complete(self, parts: tuple[ToolCall, ...]) -> tuple[ToolCall, ...]:
        """Return the calls that are complete with these parts, as Ollama's form has whole calls alone."""
        calls = joined_calls([*self._parts, *parts])
        self._parts = calls[-1:] if calls and not calls[-1].is_last else []
        return tuple(call for call in calls if call.is_last)

    @property
    def _head(self) -> dict[str, Any]:
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        return {"model": self._echo.model, "created_at": now}

    def _line(self, fields: dict[str, Any]) -> bytes:
        return json.dumps({**self._head, **fields}).encode() + b"\n"

    def _logprobs(self, entries: tuple[TextLogprobs, ...]) -> dict[str, Any]:
        return {"logprobs": [_logprob(entry) for entry in entries]} if self._echo.logprobs and entries else {}


class ChatLines(GenerateLines):
    """See AnswerEncoder. Answers of /api/chat, with calls, whose arguments are objects."""

    def part(self, text: str, thinking: str, calls: tuple[ToolCall, ...]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "function": {"index": index, "name": call.name, "arguments": json.loads(call.arguments)},
                }
                for index, call in enumerate(calls, start=self._num_calls)
            ]
        return {"message": message}


def _end(answer: Answer) -> dict[str, Any]:
    """Return the fields of a complete answer. Ollama's clients know no other reasons than these two."""
    return {
        "done": True,
        "done_reason": "length" if answer.choices[0].finish_reason == "length" else "stop",
        **answer_durations(current()),
        "prompt_eval_count": answer.num_prompt_tokens,
        "eval_count": answer.num_tokens,
    }


def _logprob(entry: TextLogprobs) -> dict[str, Any]:
    return {
        **_token(entry.token, entry.logprob),
        **({"top_logprobs": [_token(*other) for other in entry.top]} if entry.top else {}),
    }


def _token(token: bytes, logprob: float) -> dict[str, Any]:
    return {
        "token": token.decode(errors="replace"),
        "logprob": max(logprob, LEAST_LOGPROB),
        "bytes": list(token),
    }
