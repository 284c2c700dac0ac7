"""Routes a conversation to its planner: to MLLM if it has media anywhere, otherwise to the text planner."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from deployments.protocol import MEDIA_KINDS, Route
from engine.protocol import InvalidRequest


def classify(messages: Iterable[Mapping[str, Any]]) -> Route:
    """Return the route of a conversation. Media count in every turn and in tool results."""
    return Route.TEXT if next(find_media(messages), None) is None else Route.MLLM


def reject_unsupported_media(messages: Iterable[Mapping[str, Any]], kinds: frozenset[str]) -> None:
    """Raise InvalidRequest for media that the model does not read.

    Args:
        messages: The conversation.
        kinds: Kinds of media that the model reads besides text, such as `image`.
    """
    for kind, path in find_media(messages):
        if kind not in kinds:
            accepted = ", ".join(["text", *sorted(kinds)])
            raise InvalidRequest(f"`{path}` is {kind} input, but this model accepts only: {accepted}.", path)


def find_media(messages: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield (kind, path) of each media part in order, also of nested parts such as the blocks of a tool result."""
    for i, message in enumerate(messages):
        yield from _find_in(message.get("content"), f"messages[{i}].content")


def _find_in(content: Any, path: str) -> Iterator[tuple[str, str]]:
    if not isinstance(content, list | tuple):
        return
    for i, part in enumerate(content):
        if not isinstance(part, Mapping):
            continue
        kind = MEDIA_KINDS.get(str(part.get("type")))
        if kind is not None:
            yield kind, f"{path}[{i}]"
        else:
            yield from _find_in(part.get("content"), f"{path}[{i}].content")
