"""Where a conversation goes: with media anywhere in it to the MLLM planner, otherwise to the text planner."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from deployments.chat import MEDIA_KINDS, Route
from engine.protocol import InvalidRequest


def classify(messages: Iterable[Mapping[str, Any]]) -> Route:
    """Earlier turns and tool results count like the last turn."""
    return Route.TEXT if next(find_media(messages), None) is None else Route.MLLM


def reject_unsupported_media(messages: Iterable[Mapping[str, Any]], kinds: frozenset[str]) -> None:
    """kinds: what the model can read besides text, such as `image`. Raises InvalidRequest for anything else."""
    for kind, path in find_media(messages):
        if kind not in kinds:
            accepted = ", ".join(["text", *sorted(kinds)])
            raise InvalidRequest(f"`{path}` is of the kind {kind}, but this model reads only: {accepted}.", path)


def find_media(messages: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """(kind, path) of each media part in order, also of parts within parts, such as the blocks of a tool result."""
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
