"""Embeddings in any dialect: their computation for a request, and the numbers of their vectors as JSON."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from deployments.http.context import HttpContext
from deployments.http.parsed_request import ParsedRequest
from deployments.requests import Embeddings, EmbedRequest, ScoreRequest

T = TypeVar("T", EmbedRequest, ScoreRequest)

MAX_PARALLEL = 4
"""Choices that a request with several inputs counts for, unless its API key may have fewer. An idle engine computes
more of them at once, as many as the key may have, see engine/request_group.py."""


def completed(context: HttpContext, wanted: T, parsed: ParsedRequest) -> T:
    """Return a request as it is computed.

    Args:
        context: The HTTP API, which limits the choices of a request.
        wanted: What the body says.
        parsed: The request as `HttpContext.read` returns it, with id, client and the limit of its API key.
    """
    whole, max_open = parsed.request, parsed.max_rows
    num_parallel = min(wanted.num_prompts, MAX_PARALLEL, context.backend.in_flight.max_choices)
    if max_open is not None:
        num_parallel = min(num_parallel, max_open)
    return replace(
        wanted, request_id=whole.request_id, client=whole.client, num_parallel=num_parallel, max_open=max_open
    )


async def embed(context: HttpContext, wanted: EmbedRequest) -> Embeddings:
    """Compute the embeddings of a request. Raises OrchardError."""
    await context.check_ready()
    return await context.backend.embed(wanted)


async def arrays(vectors: Sequence[bytes]) -> AsyncIterator[bytes]:
    """Yield each vector of little-endian float32 as a JSON array, with nine digits, exact for float32.

    Yields to the event loop in between, as millions of numbers take a second.
    """
    for vector in vectors:
        yield ("[" + ", ".join([f"{value:.9g}" for value in np.frombuffer(vector, "<f4").tolist()]) + "]").encode()
        await asyncio.sleep(0)
