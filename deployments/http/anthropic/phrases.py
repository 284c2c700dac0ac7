"""Refusals in Anthropic's own phrases, which its clients tell apart by their words: `path.with.dots: what is wrong`."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import ValidationError

from deployments.http.errors import CHOICE, MAX_FINDINGS, Refusal, shown
from engine.protocol import InvalidRequest

NOT_PERMITTED = "Extra inputs are not permitted"
"""Claude Code drops a field for good that is refused with these words, and gives up on most others."""


class ThreadsUnsupported(Refusal):
    """A conversation that the server keeps. SDKs go on without it when they read this error code."""

    status, code = 400, "thread_unsupported_request"
    details: ClassVar[Mapping[str, Any] | None] = {"error_code": code, "unsupported": ["threads"]}

    def __init__(self) -> None:
        super().__init__(field="thread")

    @property
    def message(self) -> str:
        return f"thread: {NOT_PERMITTED}. This server keeps no conversations: send all messages with every request."


def wrong(path: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{path}: {what}", path)


def from_validation(error: ValidationError) -> InvalidRequest:
    """The first finding. Pydantic's phrases are Anthropic's; the value and, for a choice, its field are added."""
    if error.error_count() > MAX_FINDINGS:
        return InvalidRequest(
            f"The request body has {error.error_count()} fields that are unknown or wrong, too many to name one."
        )
    first = error.errors(include_url=False, include_context=False)[0]
    kind, value, path = first["type"], first["input"], dotted(first["loc"])
    if kind.startswith(CHOICE) and (field := kind.removeprefix(CHOICE)):
        path = f"{path}.{field}"
        kind = kind if field in value else "missing"
        value = value.get(field)
    if kind == "missing":
        return wrong(path, "Field required")
    if kind == "extra_forbidden":
        return wrong(path, NOT_PERMITTED)
    return wrong(path, f"{first['msg']} (received {shown(value)})")


def dotted(loc: tuple[int | str, ...]) -> str:
    """The path of a finding without the tags of unions, which begin with NUL."""
    return ".".join(str(step)[:100] for step in loc if not str(step).startswith("\0"))
