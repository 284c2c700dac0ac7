"""PlainAnswer: the answer to a request without generated tokens, such as embeddings, in the form of a generation."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from deployments.http.answer import Answer
from deployments.http.answer_response import Job
from deployments.http.api_keys import KeyIdentity
from deployments.http.errors import Failure
from deployments.protocol import Generation, SpecPrefillReport, TextDelta


@dataclass(frozen=True)
class PlainBody:
    """The body of an answer without generated tokens."""

    content: dict[str, Any] | bytes
    """Bytes are JSON text."""
    num_prompt_tokens: int = 0
    """Computed tokens, which count for max_tokens_per_minute of the API key."""


Work = Callable[[KeyIdentity], Awaitable[PlainBody]]
"""Computes the body for the identity of the request's API key."""


def plain_job(id: str, work: Work, num_choices: int = 1) -> Job:
    """Create the job of a request that `work` answers; it is cancelled when the client disconnects.

    Args:
        id: Id of the answer.
        work: Computes the body.
        num_choices: Choices in flight that the request counts for.
    """
    answer = PlainAnswer(work, num_choices)
    return Job(id, answer.start, answer, num_choices=num_choices)


class PlainAnswer:
    """A Generation of no tokens, and the AnswerEncoder of what `work` returns."""

    num_prompt_tokens = num_cached_tokens = num_skipped_tokens = 0
    context_limited = False
    node_ids: tuple[str, ...] = ()
    spec_prefill: SpecPrefillReport | None = None
    left_open: tuple[str, ...] = ()

    def __init__(self, work: Work, num_choices: int):
        self._work = work
        self._num_choices = num_choices
        self._body = PlainBody({})

    async def start(self, key: KeyIdentity) -> Generation:
        self._body = await self._work(key)
        self.num_prompt_tokens = self._body.num_prompt_tokens
        return self

    async def __aiter__(self) -> AsyncIterator[TextDelta]:
        for index in range(self._num_choices):
            yield TextDelta("", 0, "stop", index)

    async def aclose(self) -> None:
        """Do nothing: the work has ended."""

    def body(self, answer: Answer) -> dict[str, Any] | bytes:
        return self._body.content

    # Never called, as plain answers are not streamed.

    def opening(self, generation: Generation) -> bytes:
        return b""

    def encode(self, delta: TextDelta) -> bytes:
        return b""

    def closing(self, answer: Answer) -> bytes:
        return b""

    def failed(self, failure: Failure) -> bytes:
        return b""
