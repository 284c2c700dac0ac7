"""Groups of texts, such as a request's inputs of an embedding, each of which is planned and computed by one call."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence

from deployments.dispatch.engine_stream import failure_of
from deployments.dispatch.prompt_field import naming_prompt
from deployments.planners.prompt_planner import num_raw_bytes_of
from deployments.requests import ChatRequest
from engine import retry_after
from engine.errors import EngineFailed, OrchardError, Unavailable
from engine.protocol import EngineRequest, FinishReason, GroupEnds

MAX_TEXTS = 32
"""Most texts of a group: those that an engine computes in one forward."""

MAX_CHARACTERS = 8192
"""Most characters of a group's texts, unless a single text has more. The texts of a group are in one message, and go to
one engine."""

MIN_GROUPS = 2
"""Groups that are under way for each engine: it computes one while the next one is planned."""

TextResults = list[tuple[bytes, int]]
"""An embedding (little-endian float32 [hidden]) or a score ([1]), and the number of prompt tokens, of each text."""

ComputeGroup = Callable[[Sequence[ChatRequest], int, int | None], Awaitable[TextResults]]
"""Computes a group, of which an engine takes at once so many texts while it is busy, and at most so many while it is
idle. Returns the results in their order."""


async def each(
    texts: Sequence[ChatRequest],
    compute: ComputeGroup,
    num_parallel: int,
    num_engines: int = 1,
    convert: Callable[[bytes], bytes] = lambda result: result,
    max_open: int | None = None,
) -> TextResults:
    """Compute all texts, a few groups at a time; return the results in the order of the texts.

    Args:
        texts: The texts.
        compute: Computes a group.
        num_parallel: Texts that busy engines take at once; all groups under way share them.
        num_engines: Engines among which groups may be divided; 0 while none is known.
        convert: Converts a result as soon as its group is complete.
        max_open: Most texts that idle engines take at once, at least num_parallel; shared as well. None: any number.

    Raises:
        OrchardError: The first error of `compute` or `convert`; the other groups are cancelled.
    """
    num_wanted = min(num_parallel, MIN_GROUPS * max(1, num_engines))
    num_shares = max(1, min(num_wanted, num_engines))
    groups = list(_groups(texts, min(MAX_TEXTS, -(-len(texts) // num_shares))))
    num_workers = min(num_wanted, len(groups))
    most_of_group = None if max_open is None else max(1, max_open // num_workers)
    found = dict[int, TextResults]()
    waiting = enumerate(groups)

    async def work() -> None:  # the workers share the iterator `waiting`
        for index, group in waiting:
            results = await compute(group, max(1, num_parallel // num_workers), most_of_group)
            found[index] = [(convert(result), num_tokens) for result, num_tokens in results]

    workers = [asyncio.ensure_future(work()) for _ in range(num_workers)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [result for index in range(len(groups)) for result in found[index]]


def _groups(texts: Sequence[ChatRequest], max_texts: int) -> Iterator[Sequence[ChatRequest]]:
    """Divide texts into groups of consecutive ones."""
    group, num_characters = list[ChatRequest](), 0
    for text in texts:
        num_more = num_raw_bytes_of(text.raw_prompt) + num_raw_bytes_of(text.scored_query)
        if group and (len(group) == max_texts or num_characters + num_more > MAX_CHARACTERS):
            yield group
            group, num_characters = [], 0
        group.append(text)
        num_characters += num_more
    if group:
        yield group


class TextGroup:
    """The texts of a group, and what is known of their results. An engine that takes over computes those left.

    Args:
        texts: The texts.
    """

    def __init__(self, texts: Sequence[ChatRequest]):
        self._texts = texts
        self._found: dict[int, tuple[bytes, int]] = {}
        self._sent: dict[int, EngineRequest] = {}  # what the current engine has, by the index of the text

    @property
    def left(self) -> list[ChatRequest]:
        """The texts without a result."""
        return [text for index, text in enumerate(self._texts) if index not in self._found]

    @property
    def is_complete(self) -> bool:
        return len(self._found) == len(self._texts)

    @property
    def results(self) -> TextResults:
        """The results of a complete group, in the order of its texts."""
        return [self._found[index] for index in range(len(self._texts))]

    def planned(self, plans: Sequence[EngineRequest | OrchardError]) -> list[EngineRequest]:
        """Take the plans of the texts left, or those before the first one that cannot be planned, and its error.

        Raises:
            OrchardError: That error, which names the text.
        """
        indices = [index for index in range(len(self._texts)) if index not in self._found]
        for index, plan in zip(indices, plans, strict=False):
            if isinstance(plan, OrchardError):
                with naming_prompt(self._texts[index]):
                    raise plan
        requests = [plan for plan in plans if isinstance(plan, EngineRequest)]
        self._sent = dict(zip(indices, requests, strict=True))
        return requests

    def take(self, message: GroupEnds) -> None:
        """Take the ends of some of the requests that the engine has; the results of the others if one has failed.

        Raises:
            OrchardError: One of them has failed; the error names its text. Unavailable if it may succeed elsewhere.
        """
        sent, failed = list(self._sent), list[tuple[int, OrchardError]]()
        for position, end in message.ends:
            index = sent[position]
            if isinstance(end, OrchardError):
                failed.append((index, end))
            elif (error := failure_of(end, self._sent[index])) is not None:
                failed.append((index, error))
            elif end.finish_reason is FinishReason.MOVED:
                failed.append((index, Unavailable("The engine is drained.", retry_after.REPLICA_LOST_S)))
            elif end.embedding is None:
                failed.append((index, EngineFailed("the engine ended the request without an embedding")))
            else:
                self._found[index] = end.embedding, len(self._sent[index].token_ids)
        for index, error in failed:
            with naming_prompt(self._texts[index]):
                raise error
