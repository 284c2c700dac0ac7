"""ChatEncoder: writes an answer as a chat completion, or as its chunks."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from deployments.http.answer import Answer, ChoiceAnswer, prompt_details
from deployments.http.custom_tool import InputText, input_of
from deployments.http.errors import Failure
from deployments.http.generation import Generation, TextDelta, TextLogprobs, ToolCall
from deployments.http.openai.error_form import error_event

LEAST_LOGPROB = -9999.0
"""OpenAI's value for a token of probability zero; JSON has no infinity."""


@dataclass(frozen=True)
class ChatEcho:
    """The fields of the request's body that its answer depends on."""

    include_usage: bool = False
    continuous_usage: bool = False
    """Whether each chunk has the usage so far (vLLM's `continuous_usage_stats`)."""
    num_choices: int = 1
    logprobs: bool = False
    customs: frozenset[str] = frozenset()
    """Names of the custom tools, whose calls have a text instead of arguments."""


class ChatEncoder:
    """See AnswerEncoder.

    Args:
        echo: Fields of the request that the answer depends on.
        id: Id of the completion.
        model: Name of the model.
        created: Unix time in seconds.
    """

    def __init__(self, echo: ChatEcho, id: str, model: str, created: int):
        self._echo = echo
        self._head = {"id": id, "object": "chat.completion.chunk", "created": created, "model": model}
        self._num_prompt_tokens = self._num_tokens = 0
        self._choices = [ChoiceEncoder(self._head, index, echo) for index in range(echo.num_choices)]

    def opening(self, generation: Generation) -> bytes:
        self._num_prompt_tokens = generation.num_prompt_tokens
        return b"".join(choice.opening for choice in self._choices)

    def encode(self, delta: TextDelta) -> bytes:
        if not self._echo.continuous_usage:
            return self._choices[delta.index].encode(delta)
        self._num_tokens += delta.num_tokens
        figures = {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self._num_tokens,
            "total_tokens": self._num_prompt_tokens + self._num_tokens,
        }
        return self._choices[delta.index].encode(delta, figures)

    def closing(self, answer: Answer) -> bytes:
        end = b"data: [DONE]\n\n"
        return _event({**self._head, "choices": [], "usage": usage(answer)}) + end if self._echo.include_usage else end

    def failed(self, failure: Failure) -> bytes:
        return error_event(failure)

    def body(self, answer: Answer) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": _message(choice, self._echo.customs),
                "logprobs": logprobs_body(choice.logprobs) if self._echo.logprobs else None,
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(answer.choices)
        ]
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": usage(answer)}


class ChoiceEncoder:
    """Writes the chunks of one choice. Per token only the text is encoded, between precomputed bytes.

    Attributes:
        opening: The chunk before the first token.
    """

    def __init__(self, head: dict[str, Any], index: int, echo: ChatEcho):
        self._head = head
        self._index = index
        self._echo = echo
        self._num_calls = 0
        self._input = InputText()  # of the last call
        self.opening = self._chunk({"role": "assistant", "content": "", "refusal": None})
        self._before, self._after = self._chunk({"content": "\0"}).split(b'"\\u0000"')

    def encode(self, delta: TextDelta, usage: dict[str, Any] | None = None) -> bytes:
        """Return the chunks of a delta: thought, text with logprobs, calls and finish reason, as far as present."""
        chunks = b""
        if delta.reasoning:
            chunks += self._chunk({"reasoning_content": delta.reasoning}, usage=usage)
        if delta.logprobs:
            chunks += self._chunk({"content": delta.text}, logprobs_body(delta.logprobs), usage=usage)
        elif delta.text and usage is None:
            chunks += self._before + json.dumps(delta.text).encode() + self._after
        elif delta.text:
            chunks += self._chunk({"content": delta.text}, usage=usage)
        for call in delta.tool_calls:
            for body in self._call(call):
                chunks += self._chunk({"tool_calls": [body]}, usage=usage)
        if delta.finish_reason is not None:
            chunks += self._chunk({}, finish_reason=delta.finish_reason, usage=usage)
        return chunks

    def _call(self, call: ToolCall) -> Iterator[dict[str, Any]]:
        """Yield the objects for a part of a call: first one with id and name, then those with more of its text."""
        if call.is_first:
            self._num_calls += 1
            self._input = InputText()
            yield {"index": self._num_calls - 1, **tool_call_body(call, self._echo.customs, "")}
        is_custom = call.name in self._echo.customs
        if text := self._input.push(call) if is_custom else call.arguments:
            more = {"custom": {"input": text}} if is_custom else {"function": {"arguments": text}}
            yield {"index": self._num_calls - 1, **more}

    def _chunk(
        self,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
        usage: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        chunk = {**self._head, "choices": [choice]}
        return _event({**chunk, "usage": usage} if self._echo.include_usage or usage else chunk)


def usage(answer: Answer) -> dict[str, Any]:
    """Return the token counts of an answer in the fields of chat completions."""
    return {
        "prompt_tokens": answer.num_prompt_tokens,
        "completion_tokens": answer.num_tokens,
        "total_tokens": answer.num_prompt_tokens + answer.num_tokens,
        "prompt_tokens_details": prompt_details(answer),
        # not OpenAI's accepted_prediction_tokens, which count a prediction sent by the client
        "completion_tokens_details": {
            "reasoning_tokens": answer.num_reasoning_tokens,
            "drafted_tokens": answer.num_drafted,
            "accepted_draft_tokens": answer.num_accepted,
        },
    }


def tool_call_body(call: ToolCall, customs: frozenset[str], text: str) -> dict[str, Any]:
    """Return the JSON object of a call of a function, or of one of the custom tools.

    Args:
        call: The call.
        customs: Names of the custom tools.
        text: The arguments of the function, or the input of the custom tool.
    """
    if call.name in customs:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": text}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": text}}


def logprobs_body(entries: Sequence[TextLogprobs]) -> dict[str, Any]:
    """Return the JSON object of the logprobs of a text's tokens, with the alternatives of each token."""
    content = [
        {**token_body(entry.token, entry.logprob), "top_logprobs": [token_body(*other) for other in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def token_body(token: bytes, logprob: float) -> dict[str, Any]:
    """Return the JSON object of one token: text, logprob of at least LEAST_LOGPROB, and bytes."""
    text = token.decode(errors="replace")
    return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(token)}


def _message(choice: ChoiceAnswer, customs: frozenset[str]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.tool_calls:
        message["content"] = choice.text or None
        message["tool_calls"] = [
            tool_call_body(call, customs, input_of(call) if call.name in customs else call.arguments)
            for call in choice.tool_calls
        ]
    return message


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"
