"""Answer: the accumulated deltas of one generation; AnswerEncoder: writes an answer in a dialect."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from deployments.http.errors import Failure
from deployments.http.generation import Generation, TextDelta, TextLogprobs, ToolCall
from deployments.requests import SpecPrefillReport
from engine.errors import EngineFailed

FINISH_REASONS = ("stop", "length", "tool_calls")

NO_USAGE = dict.fromkeys(
    ("num_prompt_tokens", "num_cached_tokens", "num_skipped_tokens", "num_tokens", "num_drafted", "num_accepted"), 0
)
"""Token counts of a timeline, see Answer.usage, for an answer without any."""


@dataclass
class ChoiceAnswer:
    """One choice, as far as it is generated."""

    deltas: list[TextDelta] = field(default_factory=list)
    """In order of arrival, which some dialects keep between thought, text and calls."""
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
        return joined_calls(call for delta in self.deltas for call in delta.tool_calls)

    @property
    def logprobs(self) -> list[TextLogprobs]:
        return [entry for delta in self.deltas for entry in delta.logprobs]


def joined_calls(parts: Iterable[ToolCall]) -> list[ToolCall]:
    """Return the calls that consist of these parts; the last part of the last one may be missing."""
    calls: list[list[ToolCall]] = []
    for part in parts:
        if part.is_first:
            calls.append([])
        calls[-1].append(part)
    return [
        replace(call[0], arguments="".join(part.arguments for part in call), is_last=call[-1].is_last) for call in calls
    ]


class Answer:
    """All choices of a request, and its token counts.

    Args:
        generation: Source of the counts of prompt tokens.
        num_choices: Number of choices.
        keeps_text: Whether to keep the deltas; a streamed answer does not need them.
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

    def usage(self) -> dict[str, int]:
        """Return the token counts for the timeline."""
        return {
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_cached_tokens": self.num_cached_tokens,
            "num_skipped_tokens": self.num_skipped_tokens,
            "num_tokens": self.num_tokens,
            "num_drafted": self.num_drafted,
            "num_accepted": self.num_accepted,
        }

    def add(self, delta: TextDelta) -> None:
        """Add a delta. Raises EngineFailed for an unknown finish reason."""
        choice = self.choices[delta.index]
        self.num_tokens += delta.num_tokens
        self.num_reasoning_tokens += delta.num_reasoning_tokens
        self.num_drafted += delta.num_drafted
        self.num_accepted += delta.num_accepted
        if self._keeps_text:
            choice.deltas.append(delta)
        if delta.finish_reason is not None:
            if delta.finish_reason not in FINISH_REASONS:
                raise EngineFailed(f"the generation ended with the unknown finish reason {delta.finish_reason}")
            choice.finish_reason, choice.stop_sequence = delta.finish_reason, delta.stop_sequence

    def check_complete(self) -> None:
        """Raise EngineFailed if a choice has no finish reason."""
        if any(choice.finish_reason is None for choice in self.choices):
            raise EngineFailed("the generation ended without a finish reason")


class AnswerEncoder(Protocol):
    """Writes one answer in a dialect, either by `body`, or by `opening`, `encode` per delta, and `closing` or `failed`.

    Bytes are complete events of the stream's form, such as server-sent events; b"" stands for no event.
    """

    def opening(self, generation: Generation) -> bytes:
        """Return the events before the first delta."""
        ...

    def encode(self, delta: TextDelta) -> bytes:
        """Return the events of one delta of any choice."""
        ...

    def closing(self, answer: Answer) -> bytes:
        """Return the events after the last delta, when every choice has its finish reason."""
        ...

    def failed(self, failure: Failure) -> bytes:
        """Return the last event of a stream that failed, possibly before its opening."""
        ...

    def body(self, answer: Answer) -> dict[str, Any] | bytes:
        """Return the body of an answer that is not streamed; bytes are JSON text."""
        ...


def prompt_details(answer: Answer) -> dict[str, Any]:
    """Return the token counts of the prompt; with `specprefill` if a sparse prefill was requested or tried."""
    details: dict[str, Any] = {"cached_tokens": answer.num_cached_tokens}
    if (report := answer.spec_prefill) is not None:
        details["specprefill"] = {
            "skipped_tokens": answer.num_skipped_tokens,
            "scored_tokens": report.num_scored,
            "scoring_ms": round(1000 * report.scoring_s, 1),
            "dense_because": report.dense_because,
        }
    return details
