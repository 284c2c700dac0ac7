"""Answer: what the deltas of one generation add up to; AnswerEncoder: how a dialect writes it."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from deployments.chat import Generation, SpecPrefillReport, TextDelta, TextLogprobs, ToolCall
from deployments.http.errors import Failure
from engine.protocol import EngineFailed

FINISH_REASONS = ("stop", "length", "tool_calls")


@dataclass
class ChoiceAnswer:
    """One of the answers to a request, as far as it is there."""

    deltas: list[TextDelta] = field(default_factory=list)
    """In their order: in some dialects thought, text and calls may follow each other in any."""
    finish_reason: str | None = None
    stop_sequence: str | None = None

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def reasoning(self) -> str:
        return "".join(delta.reasoning for delta in self.deltas)

    @property
    def tool_calls(self) -> list[ToolCall]:
        return [call for delta in self.deltas for call in delta.tool_calls]

    @property
    def logprobs(self) -> list[TextLogprobs]:
        return [entry for delta in self.deltas for entry in delta.logprobs]


class Answer:
    """All choices of a request, and its figures. One that failed or was aborted raises EngineFailed.

    Args:
        keeps_text: whether the deltas are kept, which a stream has no use for.
    """

    def __init__(self, generation: Generation, num_choices: int, keeps_text: bool):
        self.num_prompt_tokens = generation.num_prompt_tokens
        self.num_cached_tokens = generation.num_cached_tokens
        self.num_skipped_tokens = generation.num_skipped_tokens
        self.spec_prefill: SpecPrefillReport | None = generation.spec_prefill
        self.context_limited = generation.context_limited
        self.num_tokens = self.num_reasoning_tokens = self.num_drafted = self.num_accepted = 0
        self.choices = [ChoiceAnswer() for _ in range(num_choices)]
        self._keeps_text = keeps_text

    def add(self, delta: TextDelta) -> None:
        choice = self.choices[delta.index]
        self.num_tokens += delta.num_tokens
        self.num_reasoning_tokens += delta.num_reasoning_tokens
        self.num_drafted += delta.num_drafted
        self.num_accepted += delta.num_accepted
        if self._keeps_text:
            choice.deltas.append(delta)
        if delta.finish_reason is not None:
            if delta.finish_reason not in FINISH_REASONS:
                raise EngineFailed(f"the generation ended with {delta.finish_reason}")
            choice.finish_reason, choice.stop_sequence = delta.finish_reason, delta.stop_sequence

    def check_complete(self) -> None:
        """Raises EngineFailed if a choice has not ended."""
        if any(choice.finish_reason is None for choice in self.choices):
            raise EngineFailed("the generation ended without a finish reason")


class AnswerEncoder(Protocol):
    """Writes one answer in a dialect: `body`, or `opening`, any number of `encode`, and `closing` or `failed`.

    Bytes are complete server-sent events, or b"" for nothing.
    """

    def opening(self, generation: Generation) -> bytes:
        """The events before the first delta."""
        ...

    def encode(self, delta: TextDelta) -> bytes:
        """The events of one delta, of any choice."""
        ...

    def closing(self, answer: Answer) -> bytes:
        """The events behind the last delta: every choice has its finish reason."""
        ...

    def failed(self, failure: Failure) -> bytes:
        """The last event of a stream that failed, perhaps before its opening."""
        ...

    def body(self, answer: Answer) -> dict[str, Any] | bytes:
        """The body of an answer that is not streamed; bytes are JSON already."""
        ...


def prompt_details(answer: Answer) -> dict[str, Any]:
    """Where a prompt's tokens came from. `specprefill` is there if a sparse prompt was asked for or tried."""
    details: dict[str, Any] = {"cached_tokens": answer.num_cached_tokens}
    if (report := answer.spec_prefill) is not None:
        details["specprefill"] = {
            "skipped_tokens": answer.num_skipped_tokens,
            "scored_tokens": report.num_scored,
            "scoring_ms": round(1000 * report.scoring_s, 1),
            "dense_because": report.dense_because,
        }
    return details
