"""PlainAnswer: the answer to a request for which nothing is generated, on the way that all answers take."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from deployments.chat import Generation, SpecPrefillReport, TextDelta
from deployments.http.answer import Answer
from deployments.http.answer_response import Job
from deployments.http.api_keys import KeyIdentity
from deployments.http.door import Door
from deployments.http.errors import Failure
from deployments.http.request_reader import ParsedRequest


@dataclass(frozen=True)
class PlainBody:
    """The body of an answer that is not generated."""

    content: dict[str, Any] | bytes
    """Bytes are JSON already."""
    num_prompt_tokens: int = 0
    """Tokens that were computed, which the limits of the request's key count."""


Work = Callable[[KeyIdentity], Awaitable[PlainBody]]
"""Takes the key of the request."""


def plain_job(door: Door, parsed: ParsedRequest, id: str, work: Work, num_choices: int = 1) -> Job:
    """The job of a request that is answered by `work`, which is cancelled when the client leaves.

    Args:
        num_choices: how many places of answers it takes meanwhile.
    """
    answer = PlainAnswer(work, num_choices)
    job = door.job(parsed, id, lambda parsed, id: answer)
    return replace(job, start=answer.start, stream=False, num_choices=num_choices)


class PlainAnswer:
    """A Generation of no tokens, and the AnswerEncoder of what `work` returns."""

    num_prompt_tokens = num_cached_tokens = num_skipped_tokens = 0
    context_limited = False
    spec_prefill: SpecPrefillReport | None = None

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
        """There is nothing to close."""

    def body(self, answer: Answer) -> dict[str, Any] | bytes:
        return self._body.content

    # It is never streamed.

    def opening(self, generation: Generation) -> bytes:
        return b""

    def encode(self, delta: TextDelta) -> bytes:
        return b""

    def closing(self, answer: Answer) -> bytes:
        return b""

    def failed(self, failure: Failure) -> bytes:
        return b""
