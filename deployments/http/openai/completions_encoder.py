"""CompletionsEncoder: writes an answer as a text completion, or as its chunks."""

import codecs
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deployments.http.answer import Answer, ChoiceAnswer
from deployments.http.errors import Failure
from deployments.http.generation import Generation, PromptLogprobs, TextDelta, TextLogprobs
from deployments.http.openai.chat_encoder import LEAST_LOGPROB, usage
from deployments.http.openai.error_form import error_event
from deployments.http.openai.raw_prompt_wire import RawPrompt


@dataclass(frozen=True)
class CompletionsEcho:
    """The fields of the request's body that its answer depends on."""

    prompts: tuple[RawPrompt, ...]
    fields: tuple[str, ...]
    """The client's field of each prompt."""
    num_choices: int = 1
    """Choices per prompt."""
    echo: bool = False
    """Whether each text begins with its prompt."""
    logprobs: int | None = None
    has_answer: bool = True
    """Whether tokens are generated."""
    include_usage: bool = False
    continuous_usage: bool = False
    """Whether each chunk has the usage so far (vLLM's `continuous_usage_stats`)."""

    @property
    def num_answers(self) -> int:
        return len(self.prompts) * self.num_choices


class CompletionsEncoder:
    """See AnswerEncoder. Index i of the answer is choice i % n of prompt i // n.

    Args:
        echo: Fields of the request that the answer depends on.
        id: Id of the completion.
        model: Name of the model.
        created: Unix time in seconds.
    """

    def __init__(self, echo: CompletionsEcho, id: str, model: str, created: int):
        self.prompt_texts: tuple[str, ...] = ()
        """Text of each prompt, with `echo`; set before the answer starts."""
        self._echo = echo
        self._head = {"id": id, "object": "text_completion", "created": created, "model": model}
        self._num_prompt_tokens = self._num_tokens = 0
        self._logprobs = [LogprobsEncoder() for _ in range(echo.num_answers)]

    def opening(self, generation: Generation) -> bytes:
        """Return chunks with the echoed prompts; with logprobs these come with the first delta."""
        self._num_prompt_tokens = generation.num_prompt_tokens
        if self._echo.logprobs is not None:
            return b""
        texts = [self._prompt_text(index) for index in range(self._echo.num_answers)]
        return b"".join(self._chunk(index, text) for index, text in enumerate(texts) if text)

    def encode(self, delta: TextDelta) -> bytes:
        self._num_tokens += delta.num_tokens
        prompts = b"" if delta.prompt_logprobs is None else self._prompts(delta.index, delta.prompt_logprobs)
        if not (delta.text or delta.logprobs or delta.finish_reason):
            return prompts
        logprobs = None
        if self._echo.logprobs is not None and delta.logprobs:
            logprobs = self._logprobs[delta.index].body(delta.logprobs)
        return prompts + self._chunk(delta.index, delta.text, logprobs, delta.finish_reason)

    def closing(self, answer: Answer) -> bytes:
        end = b"data: [DONE]\n\n"
        return _event({**self._head, "choices": [], "usage": usage(answer)}) + end if self._echo.include_usage else end

    def failed(self, failure: Failure) -> bytes:
        return error_event(failure)

    def body(self, answer: Answer) -> dict[str, Any]:
        choices = [self._choice(index, answer.choices) for index in range(len(answer.choices))]
        return {**self._head, "choices": choices, "usage": usage(answer)}

    def _choice(self, index: int, choices: Sequence[ChoiceAnswer]) -> dict[str, Any]:
        choice, logprobs = choices[index], None
        if self._echo.logprobs is not None:
            same_prompt = (choices[i] for i in self._same_prompt(index))
            prompt = next((p for one in same_prompt for delta in one.deltas if (p := delta.prompt_logprobs)), None)
            logprobs = LogprobsEncoder().body(choice.logprobs, prompt)
        return {
            "index": index,
            "text": self._prompt_text(index) + choice.text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
        }

    def _prompts(self, index: int, logprobs: PromptLogprobs) -> bytes:
        """Return chunks with the prompt of a choice, for all choices of that prompt."""
        return b"".join(
            self._chunk(i, self._prompt_text(i), self._logprobs[i].body((), logprobs)) for i in self._same_prompt(index)
        )

    def _same_prompt(self, index: int) -> range:
        """Return the choices of the prompt that this one belongs to."""
        first = index - index % self._echo.num_choices
        return range(first, first + self._echo.num_choices)

    def _prompt_text(self, index: int) -> str:
        return self.prompt_texts[index // self._echo.num_choices] if self._echo.echo else ""

    def _chunk(
        self, index: int, text: str, logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
    ) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        chunk = {**self._head, "choices": [choice]}
        if self._echo.continuous_usage:
            chunk["usage"] = {
                "prompt_tokens": self._num_prompt_tokens,
                "completion_tokens": self._num_tokens,
                "total_tokens": self._num_prompt_tokens + self._num_tokens,
            }
        elif self._echo.include_usage:
            chunk["usage"] = None
        return _event(chunk)


class LogprobsEncoder:
    """Writes the legacy logprobs of one choice, with text offsets that continue from delta to delta."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def body(self, entries: Sequence[TextLogprobs], prompt: PromptLogprobs | None = None) -> dict[str, Any]:
        """Return tokens, token_logprobs, top_logprobs and text_offset (in characters of the text).

        Args:
            entries: Tokens of the answer.
            prompt: The prompt before them; its first token has neither logprob nor alternatives.
        """
        first = [] if prompt is None else [prompt.first]
        entries = [*(() if prompt is None else prompt.others), *entries]
        tokens = [*first, *(entry.token for entry in entries)]
        return {
            "tokens": [token_name(token) for token in tokens],
            "token_logprobs": [None] * len(first) + [max(entry.logprob, LEAST_LOGPROB) for entry in entries],
            "top_logprobs": [None] * len(first) + [_top(entry) for entry in entries],
            "text_offset": [self._offset_of(token) for token in tokens],
        }

    def _offset_of(self, token: bytes) -> int:
        offset = self._offset
        self._offset += len(self._decoder.decode(token))
        return offset


def token_name(token: bytes) -> str:
    r"""Return the text of a token; incomplete characters are written as OpenAI does, `bytes:\xe2\x80`."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _top(entry: TextLogprobs) -> dict[str, float]:
    """Return the most likely tokens, best first, and the sampled one."""
    best = {token_name(token): max(logprob, LEAST_LOGPROB) for token, logprob in entry.top}
    return best | {token_name(entry.token): max(entry.logprob, LEAST_LOGPROB)}


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"
