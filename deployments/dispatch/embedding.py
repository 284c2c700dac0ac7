"""Computes the embeddings of several prompts, a few groups of them at a time."""

from collections.abc import Iterator

import numpy as np

from deployments.dispatch.text_group import ComputeGroup, each
from deployments.requests import ChatRequest, Embeddings, EmbedRequest
from engine.errors import InvalidRequest

FLOAT_BYTES = 4


async def embed_all(
    request: EmbedRequest, compute: ComputeGroup, num_engines: int = 1, *, may_shorten: bool = False
) -> Embeddings:
    """Compute the embeddings of all prompts, a few groups at a time.

    Args:
        request: The prompts.
        compute: Computes a group of them.
        num_engines: Engines among which groups may be divided.
        may_shorten: Whether the model's embeddings may be shortened to num_dimensions dimensions.

    Raises:
        OrchardError: The first error of `compute`; the other groups are cancelled.
        InvalidRequest: The vectors do not have num_dimensions dimensions.
    """

    def shortened(vector: bytes) -> bytes:
        return _shortened(vector, request.num_dimensions, may_shorten)

    found = await each(
        list(_requests(request)), compute, request.num_parallel, num_engines, shortened, request.max_open
    )
    return Embeddings(tuple(vector for vector, _ in found), sum(num_tokens for _, num_tokens in found))


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
            prompt_name=request.prompt_name,
        )
