"""The errors that only HTTP has, an error in the terms of HTTP, and the errors of validations; see error_map.py.

OrchardErrors are shown to the client. Any other exception is logged under its request id and answered with a constant
sentence, since messages of libraries may contain addresses, paths or other clients' text.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import ValidationError

from engine.errors import EngineFailed, InvalidRequest, OrchardError

CLIENT_LEFT = 499
"""nginx's status for a client that disconnected, seen in the access log only. A client whose request was cancelled by
another one receives it too."""


class Refusal(InvalidRequest):
    """An error that only HTTP has a status for."""

    status: ClassVar[int]
    code: ClassVar[str]
    type: ClassVar[str] = "invalid_request_error"
    headers: ClassVar[Mapping[str, str]] = {}
    retry_after_s: float | None = None
    """Seconds until the same request may succeed; None if it never will."""

    def __init__(self, *args: object, field: str | None = None):
        OrchardError.__init__(self, *args)
        self.field = field


class ModelNotFound(Refusal):
    """The requested model name is not served."""

    status, code = 404, "model_not_found"

    def __init__(self, asked: str, served: str):
        super().__init__(asked, served, field="model")

    @property
    def message(self) -> str:
        asked, served = self.args
        return (
            f"The model {shown(asked)} does not exist: this server serves {json.dumps(served)}. Send that name, or add "
            "yours to http.served_model_names."
        )


class BodyTooLarge(Refusal):
    """A request body is too large.

    args: bytes announced, or received when the limit was exceeded; the limit in bytes.
    """

    status, code = 413, "request_too_large"

    @property
    def message(self) -> str:
        num_bytes, limit = self.args
        return f"The request body has {num_bytes} bytes or more; the limit is {limit} bytes."


class BodyTooSlow(Refusal):
    """A request body arrived too slowly.

    args: bytes received; seconds since the headers; least rate in bytes per second.
    """

    status, code = 408, "request_timeout"

    @property
    def message(self) -> str:
        num_bytes, age_s, min_bytes_per_s = self.args
        return (
            f"The request body arrived too slowly: {num_bytes} bytes in {age_s:.1f} s; the minimum is "
            f"{min_bytes_per_s} bytes per second (http.min_body_bytes_per_s)."
        )


class RequestNotFound(Refusal):
    """No request in progress has the id in args[0]."""

    status, code = 404, "request_not_found"

    @property
    def message(self) -> str:
        return f"The request {shown(self.args[0])} was not found: it has ended, or this server has not received it."


class NodeNotFound(Refusal):
    """No node with the id in args[0] has an engine."""

    status, code = 404, "node_not_found"

    @property
    def message(self) -> str:
        return f"The node {shown(self.args[0])} was not found: no node with this id has an engine, see GET /v1/status."


class NotReady(EngineFailed):
    """No request can be served now; args[0] says why."""


@dataclass(frozen=True)
class Failure:
    """An error in the terms of HTTP, for any dialect."""

    status: int
    message: str
    type: str
    param: str | None = None
    """Path of the field at fault."""
    code: str | None = None
    retry_after_s: int | None = None
    """Whole seconds, 1 to 60; None if a retry is useless."""
    more_headers: Mapping[str, str] = field(default_factory=dict)
    error: Exception | None = None
    """The exception behind the failure, for dialects with phrases of their own for it."""

    @property
    def headers(self) -> dict[str, str]:
        retry = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return {**self.more_headers, **retry}


MAX_FINDINGS = 1000
"""Most findings of one validation for which the first is reported. pydantic can only list all of them, which takes
seconds and hundreds of megabytes for 500 000 unknown fields."""

CHOICE = "choice of "
"""Prefix of the error type of a union's discriminator; the name of the discriminating field follows."""

_RULES = {
    "model_type": "must be an object",
    "dict_type": "must be an object",
    "list_type": "must be an array",
    "string_type": "must be a string",
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "none_required": "must be null",
}


def from_validation(error: ValidationError) -> InvalidRequest:
    """Convert the first finding of a validation, with the path as the client would write it."""
    if error.error_count() > MAX_FINDINGS:
        return InvalidRequest(
            f"The request body has {error.error_count()} unknown or invalid fields, too many to name one: the limit is "
            f"{MAX_FINDINGS}."
        )
    first = error.errors(include_url=False, include_context=False)[0]
    kind, value, path = first["type"], first["input"], _path(first["loc"])
    if kind.startswith(CHOICE) and (field_name := kind.removeprefix(CHOICE)):
        path = f"{path}.{field_name}"
        kind = kind if field_name in value else "missing"
        value = value.get(field_name)
    if kind == "missing":
        return InvalidRequest(f"`{path}` is required.", path)
    if kind == "extra_forbidden":
        return InvalidRequest(f"`{path}` is not supported.", path)
    rule = _RULES.get(kind) or re.sub(r"^\w+ should", "must", first["msg"]).replace(
        " after validation", ""
    ).removesuffix(", not more")
    return InvalidRequest(f"`{path}` is {shown(value)}: it {rule}.", path)


def _path(loc: tuple[int | str, ...]) -> str:
    """Return the path of a finding without union tags, which begin with NUL, and with long client field names cut."""
    steps = [f"[{step}]" if isinstance(step, int) else f".{step[:100]}" for step in loc if not is_tag(step)]
    return "".join(steps).removeprefix(".")


def is_tag(step: int | str) -> bool:
    """Return whether a step of a finding's path is a union tag, which clients do not write."""
    return isinstance(step, str) and step.startswith("\0")


def shown(value: Any) -> str:
    """Return a client's value for an error message: short JSON, or the size of an array or object."""
    if isinstance(value, list | dict):
        return f"an array of {len(value)}" if isinstance(value, list) else f"an object with {len(value)} fields"
    text = json.dumps(value[:101] if isinstance(value, str) else value, ensure_ascii=False)
    return text if len(text) <= 100 else text[:100] + "…"
