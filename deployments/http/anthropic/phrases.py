"""Errors in Anthropic's phrases, which its clients match: `path.with.dots: reason`."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import ValidationError

from deployments.http.errors import CHOICE, MAX_FINDINGS, Refusal, shown
from engine.errors import InvalidRequest

NOT_PERMITTED = "Extra inputs are not permitted"
"""On this phrase Claude Code stops sending the field; on most others it gives up."""


class ThreadsUnsupported(Refusal):
    """The request asks for a conversation stored on the server. On this error code SDKs continue without it."""

    status, code = 400, "thread_unsupported_request"
    details: ClassVar[Mapping[str, Any]] = {"error_code": code, "unsupported": ["threads"]}

    def __init__(self) -> None:
        super().__init__(field="thread")

    @property
    def message(self) -> str:
        return f"thread: {NOT_PERMITTED}. This server stores no conversations: send all messages with every request."


def wrong(path: str, what: str) -> InvalidRequest:
    """Return an error in Anthropic's form."""
    return InvalidRequest(f"{path}: {what}", path)


def from_validation(error: ValidationError) -> InvalidRequest:
    """Convert the first finding of a validation. Pydantic's phrases are Anthropic's; the value is added."""
    if error.error_count() > MAX_FINDINGS:
        return InvalidRequest(
            f"The request body has {error.error_count()} unknown or invalid fields, too many to name one: the limit is "
            f"{MAX_FINDINGS}."
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
    """Return the path of a finding without union tags, which begin with NUL."""
    return ".".join(str(step)[:100] for step in loc if not str(step).startswith("\0"))
