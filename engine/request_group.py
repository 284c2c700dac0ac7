"""Groups of requests with one result each, such as embeddings: a few at a time, in an idle engine a step's worth."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from time import monotonic
from typing import Any, Protocol

from engine.config import EngineConfig
from engine.errors import EngineFailed, OrchardError
from engine.protocol import EngineRequest, GroupEnds, TokenChunk


class Engine(Protocol):
    """The part of AsyncEngine that is used here."""

    config: EngineConfig

    @property
    def num_open_choices(self) -> int: ...

    def generate(self, request: EngineRequest) -> AsyncIterator[TokenChunk]: ...


async def generate_group(
    engine: Engine,
    requests: Sequence[EngineRequest],
    num_parallel: int,
    heartbeat_period_s: float,
    max_open: int | None = None,
) -> AsyncIterator[GroupEnds]:
    """Yield the ends of requests with `pooling`, each once, as soon as they are there.

    Args:
        engine: The engine.
        requests: The requests, of which num_parallel are open at once. More are open while at most half of max_running
            and at most max_queue choices are, of this group and all others, as long as those of the group have no more
            tokens than a step: they share forwards, and leave room for a request that arrives.
        num_parallel: See `requests`.
        heartbeat_period_s: Longest time without a message; one without ends is yielded then.
        max_open: Most requests of the group that are open at once, at least num_parallel; None: any number.

    Yields:
        An error of AsyncEngine.generate is an end; the other requests are cancelled after it.
    """
    waiting, began_s = deque(enumerate(requests)), monotonic()
    running: dict[asyncio.Future[TokenChunk], int] = {}
    num_idle_open = min(engine.config.max_running // 2, engine.config.max_queue)
    max_tokens = engine.config.prefill_chunk_tokens
    try:
        while waiting or running:
            num_others = engine.num_open_choices - len(running)
            num_tokens = sum(len(requests[index].token_ids) for index in running.values())
            while waiting:
                index, request = waiting[0]
                num_tokens += len(request.token_ids)
                has_room = num_others + len(running) < num_idle_open and num_tokens <= max_tokens
                is_full = max_open is not None and len(running) >= max_open
                if len(running) >= num_parallel and (is_full or not has_room):
                    break
                waiting.popleft()
                begun = replace(request, spent_s=request.spent_s + monotonic() - began_s)
                running[asyncio.ensure_future(_end_of(engine, begun))] = index
            done, _ = await asyncio.wait(running, timeout=heartbeat_period_s, return_when=asyncio.FIRST_COMPLETED)
            ends = tuple((running.pop(task), _result(task)) for task in list(running) if task in done)
            yield GroupEnds(ends)
            if any(isinstance(end, OrchardError) for _, end in ends):
                return
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _end_of(engine: Engine, request: EngineRequest) -> TokenChunk:
    chunks: Any = engine.generate(request)
    async with aclosing(chunks):
        async for chunk in chunks:
            if chunk.finish_reason is not None:
                return chunk
    raise EngineFailed("the engine ended the request without a result")


def _result(task: asyncio.Future[TokenChunk]) -> TokenChunk | OrchardError:
    """Return the end of a request. Raises an unexpected error of its task."""
    error = task.exception()
    if error is not None and not isinstance(error, OrchardError):
        raise error
    return task.result() if error is None else error
