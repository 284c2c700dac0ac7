"""The client's field of a raw prompt, for errors about it."""

from collections.abc import Iterator
from contextlib import contextmanager

from deployments.requests import ChatRequest
from engine.errors import InvalidRequest


@contextmanager
def naming_prompt(request: ChatRequest) -> Iterator[None]:
    """Make errors about a raw prompt name the client's field instead of `messages`, which planner and engine use."""
    try:
        yield
    except InvalidRequest as error:
        if request.raw_prompt is not None and error.field in (None, "messages"):
            error.field = request.prompt_field
        raise
