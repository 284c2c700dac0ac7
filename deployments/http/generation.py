"""Generation: a started answer as the dialects see it, and the deltas that it yields."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from deployments.requests import SpecPrefillReport


@dataclass(frozen=True)
class TextLogprobs:
    """`TokenLogprobs` with each token as its bytes instead of its id."""

    token: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()
    """(token, logprob) of the most likely tokens, best first."""


@dataclass(frozen=True)
class PromptLogprobs:
    """The tokens of a prompt, which the model reads one after the other."""

    first: bytes
    """The first token, which has no logprob, as nothing stands before it."""
    others: tuple[TextLogprobs, ...]


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool in an answer, or a part of one. The parts of a call follow each other; calls do not overlap."""

    id: str
    """Unique; `call_` and 24 hex digits. All parts of a call have it."""
    name: str
    """All parts of a call have it."""
    arguments: str
    """JSON text of an object, or the next piece of it."""
    is_first: bool = True
    """Whether the call begins here."""
    is_last: bool = True
    """Whether the call is complete. The end of an answer by its length may leave a call without its last part."""


@dataclass(frozen=True)
class TextDelta:
    """New output of one choice since its last delta."""

    text: str
    """Text of the answer itself, without thought and calls."""
    num_tokens: int
    """Tokens that this delta covers, also those whose text is not certain yet."""
    finish_reason: str | None = None
    """stop, length or tool_calls; set on the last delta of the choice only."""
    index: int = 0
    """The choice."""
    logprobs: tuple[TextLogprobs, ...] = ()
    """One per token if requested, also for tokens whose text is not certain yet."""
    num_drafted: int = 0
    """See TokenChunk."""
    num_accepted: int = 0
    """See TokenChunk."""
    reasoning: str = ""
    """Text of the thought, without its markers."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls, or parts of them, that are certain with these tokens."""
    num_reasoning_tokens: int = 0
    """Tokens of this delta that belong to the thought."""
    stop_sequence: str | None = None
    """The stop string that ended the choice, with its finish reason."""
    prompt_logprobs: PromptLogprobs | None = None
    """Logprobs of the prompt, if requested. One delta of one choice has them."""


class Generation(Protocol):
    """A started request: its prompt is planned and its first token has arrived. Iterating ends with the last choice."""

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def node_ids(self) -> tuple[str, ...]:
        """The nodes whose engines began the answer; () without Ray."""
        ...

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were read from the prefix cache."""
        ...

    @property
    def num_skipped_tokens(self) -> int:
        """Prompt tokens that sparse prefill left out."""
        ...

    @property
    def spec_prefill(self) -> SpecPrefillReport | None:
        """See Plan."""
        ...

    @property
    def context_limited(self) -> bool:
        """Whether the remaining context, not the client's max_tokens, limits the length of the answer."""
        ...

    @property
    def left_open(self) -> tuple[str, ...]:
        """See GrammarSpec."""
        ...

    def __aiter__(self) -> AsyncIterator[TextDelta]: ...

    async def aclose(self) -> None:
        """Abort the generation, if it still runs, and free its rows. May be called again."""
        ...
