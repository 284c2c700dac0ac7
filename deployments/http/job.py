"""Job and PlainJob: parsed requests that are ready to start, with and without generated tokens."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from deployments.http.answer import AnswerEncoder
from deployments.http.event_stream import SERVER_SENT_EVENTS, StreamForm
from deployments.http.generation import Generation


@dataclass(frozen=True)
class Job:
    """A request that generates. It does not refer to the conversation once it has started."""

    start: Callable[[], Awaitable[Generation]]
    """Starts the generation; called once. Returns at the first token or raises."""
    encoder: AnswerEncoder
    stream: bool = False
    num_choices: int = 1
    """Choices in flight that the request counts for."""
    form: StreamForm = SERVER_SENT_EVENTS
    """Form of the stream."""


@dataclass(frozen=True)
class PlainBody:
    """The body of an answer without generated tokens."""

    content: dict[str, Any] | bytes
    """Bytes are JSON text."""
    num_prompt_tokens: int = 0
    """Computed tokens, which count for max_tokens_per_minute of the API key."""


@dataclass(frozen=True)
class PlainJob:
    """A request without generated tokens, such as embeddings. It is cancelled when the client disconnects."""

    work: Callable[[], Awaitable[PlainBody]]
    """Computes the body; called once."""
    num_choices: int = 1
    """Choices in flight that the request counts for."""
