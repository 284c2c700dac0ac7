"""Computes the embeddings of several prompts, one engine request per prompt, a few at a time."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import numpy as np

from deployments.dispatch.engine_client import failure_of
from deployments.dispatch.engine_stream import EngineStream
from deployments.requests import ChatRequest, Embeddings, EmbedRequest
from engine.errors import EngineFailed, InvalidRequest

FLOAT_BYTES = 4

EmbedOne = Callable[[ChatRequest], Awaitable[tuple[bytes, int]]]
"""Computes one embedding: returns little-endian float32 [hidden] and the number of prompt tokens."""


async def embed_all(request: EmbedRequest, embed_one: EmbedOne, *, may_shorten: bool = False) -> Embeddings:
    """Compute the embeddings of all prompts, num_parallel at a time.

    Args:
        request: The prompts.
        embed_one: Computes one embedding.
        may_shorten: Whether the model's embeddings may be shortened to num_dimensions dimensions.

    Raises:
        OrchardError: The first error of embed_one; the other prompts are cancelled.
        InvalidRequest: The vectors do not have num_dimensions dimensions.
    """

    async def shortened(one: ChatRequest) -> tuple[bytes, int]:
        vector, num_tokens = await embed_one(one)
        return _shortened(vector, request.num_dimensions, may_shorten), num_tokens

    found = await each(list(_requests(request)), shortened, request.num_parallel)
    return Embeddings(tuple(vector for vector, _ in found), sum(num_tokens for _, num_tokens in found))


async def each(requests: Sequence[ChatRequest], embed_one: EmbedOne, num_parallel: int) -> list[tuple[bytes, int]]:
    """Compute the embeddings of all requests, num_parallel at a time; return them in their order.

    Raises:
        OrchardError: The first error of embed_one; the other requests are cancelled.
    """
    found: dict[int, tuple[bytes, int]] = {}
    waiting = enumerate(requests)

    async def work() -> None:  # the workers share the iterator `waiting`
        for index, one in waiting:
            found[index] = await embed_one(one)

    workers = [asyncio.ensure_future(work()) for _ in range(min(num_parallel, len(requests)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [found[index] for index in range(len(requests))]


async def read_embedding(stream: EngineStream) -> tuple[bytes, int]:
    """Read a stream to its end; return the embedding and the number of prompt tokens.

    Raises EngineFailed, Unavailable, Cancelled.
    """
    request, vector = stream.plan.request, None
    chunks: Any = stream
    try:
        async for chunk in chunks:
            if (error := failure_of(chunk, request)) is not None:
                raise error
            vector = chunk.embedding or vector
    finally:
        await stream.aclose()
    if vector is None:
        raise EngineFailed("the engine ended the request without an embedding")
    return vector, len(request.token_ids)


def _shortened(vector: bytes, num_dimensions: int | None, may_shorten: bool) -> bytes:
    """Return the first `num_dimensions` dimensions, normalized again. Raises InvalidRequest if that is impossible."""
    own = len(vector) // FLOAT_BYTES
    if num_dimensions in (None, own):
        return vector
    if not may_shorten or num_dimensions > own:
        most = f"at most {own}" if may_shorten else f"{own}, as the embeddings of this model cannot be shortened"
        raise InvalidRequest(f"`dimensions` is {num_dimensions}: it must be {most}.", "dimensions")
    short = np.frombuffer(vector, "<f4")[:num_dimensions].astype(np.float64)
    return (short / (np.linalg.norm(short) or 1.0)).astype("<f4").tobytes()


def _requests(request: EmbedRequest) -> Iterator[ChatRequest]:
    for index, (prompt, field) in enumerate(zip(request.prompts, request.fields, strict=True)):
        yield ChatRequest(
            request_id=f"{request.request_id}-{index}",
            messages=(),
            priority=request.priority,
            client=request.client,
            raw_prompt=prompt,
            prompt_field=field,
            is_embedding=True,
            prompt_name=request.prompt_name,
        )
