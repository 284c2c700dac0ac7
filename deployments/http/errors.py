"""Maps every error to an HTTP status and an error body.

OrchardErrors are shown to the client. Any other exception is logged under its request id and answered with a constant
sentence, since messages of libraries may contain addresses, paths or other clients' text.

An error after which the same request may succeed tells when to retry, in whole seconds: in the header Retry-After, or
in a stream, where headers are already sent, as `retry_after_s` of the error object.
"""

import functools
import json
import logging
import math
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, ClassVar, Literal

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Scope

from deployments.serve_log import is_probe
from engine import retry_after
from engine.protocol import (
    Cancelled,
    ContextLengthExceeded,
    EngineFailed,
    InvalidRequest,
    OrchardError,
    Overloaded,
    QueueTimeout,
    Unavailable,
)

logger = logging.getLogger("orchard.http")

Converter = Callable[[Any], Exception | None]
"""Converts a foreign exception to an OrchardError; None: it stays unexpected."""

Endpoint = Callable[[Request], Awaitable[Response]]

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
    details: ClassVar[Mapping[str, Any] | None] = None
    """Additional fields of the error in Anthropic's dialect."""

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


ErrorDialect = Literal["openai", "anthropic"]

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_dialect(path: str) -> ErrorDialect:
    """Return the dialect of errors on a route."""
    return "anthropic" if path == "/v1/messages" or path.startswith("/v1/messages/") else "openai"


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
    anthropic_message: str | None = None
    """Anthropic's own phrase for this error, if there is one."""
    details: Mapping[str, Any] | None = None
    """Additional fields of the error in Anthropic's dialect."""

    @property
    def headers(self) -> dict[str, str]:
        retry = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return {**self.more_headers, **retry}

    def body(self, dialect: ErrorDialect = "openai", request_id: str | None = None) -> bytes:
        if dialect == "anthropic":
            return json.dumps(self.anthropic_body(request_id)).encode()
        return json.dumps({"error": self._error}).encode()

    def anthropic_body(self, request_id: str | None = None) -> dict[str, Any]:
        """Return the body in Anthropic's dialect, whose message names the field."""
        message = self.anthropic_message or _with_path(self.message, self.param)
        error: dict[str, Any] = {"type": _ANTHROPIC_TYPES.get(self.status, "api_error"), "message": message}
        if self.details is not None:
            error["details"] = self.details
        return {"type": "error", "error": error, "request_id": request_id}

    def anthropic_event_body(self, request_id: str) -> bytes:
        """Return the data of an `error` event in Anthropic's dialect."""
        body = self.anthropic_body(request_id)
        if self.retry_after_s is not None:
            body["error"]["retry_after_s"] = self.retry_after_s
        return json.dumps(body).encode()

    def event_body(self) -> bytes:
        """Return the data of an error event in OpenAI's dialect, with what the headers of a response would say."""
        retry = {} if self.retry_after_s is None else {"retry_after_s": self.retry_after_s}
        return json.dumps({"error": {**self._error, **retry}}).encode()

    @property
    def _error(self) -> dict[str, Any]:
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.code}


def _with_path(message: str, param: str | None) -> str:
    """Return the message with the field's path in Anthropic's notation, `messages.0.content`."""
    if param is None:
        return message
    path = re.sub(r"\[(\d+)\]", r".\1", param)
    message = message.replace(param, path)
    return message if path in message else f"{path}: {message}"


class ErrorMap:
    """Maps exceptions to failures and responses.

    Args:
        converters: Foreign exception class to its Converter; looked up along the bases of the exception's class.
        note: Called with each converted exception and its failure, which is about to be sent.
    """

    def __init__(
        self,
        converters: Mapping[type[Exception], Converter] | None = None,
        note: Callable[[Exception, "Failure"], None] = lambda error, failure: None,
    ):
        self._converters = dict(converters or {})
        self._note = note

    def convert(self, error: Exception) -> Exception:
        """Convert a foreign error to an OrchardError; return it unchanged without a converter."""
        for base in type(error).__mro__:
            if base in self._converters:
                return self._converters[base](error) or error
        return error

    def failure(self, error: Exception, request_id: str, level: int = logging.WARNING) -> Failure:
        """Convert an exception to a Failure, and log those with status 500 and above. level: for those above 500."""
        converted = self.convert(error)
        failure = self._failure(error, converted, request_id, level)
        self._note(converted, failure)
        return failure

    def _failure(self, error: Exception, converted: Exception, request_id: str, level: int) -> Failure:
        if isinstance(converted, HTTPException):
            return _of_http_exception(converted)
        found = _of_orchard_error(converted, request_id) if isinstance(converted, OrchardError) else None
        if found is None or found.status == 500:
            logger.error("request %s failed", request_id, exc_info=error, extra={"request_id": request_id})
        elif found.status > 500:
            logger.log(level, "request %s: %s", request_id, found.message, extra={"request_id": request_id})
        return found or Failure(500, f"The server failed to answer request {request_id}.", "server_error")

    def response(self, error: Exception, request_id: str, scope: Scope) -> Response:
        """Return the error response in the dialect of the requested route."""
        failure = self.failure(error, request_id, logging.DEBUG if is_probe(scope["path"]) else logging.WARNING)
        return self.response_to(failure, request_id, scope)

    def response_to(self, failure: Failure, request_id: str, scope: Scope) -> Response:
        """Return the response of a failure in the dialect of the requested route."""
        body = failure.body(error_dialect(scope["path"]), request_id)
        return Response(body, failure.status, failure.headers, "application/json")

    def guard(self, endpoint: Endpoint) -> Endpoint:
        """Wrap an endpoint so that every exception becomes a response."""

        @functools.wraps(endpoint)
        async def guarded(request: Request) -> Response:
            try:
                return await endpoint(request)
            except ClientDisconnect:
                logger.info("request %s: the client disconnected while its body was read", request.state.request_id)
                return Response(status_code=CLIENT_LEFT)
            except Exception as error:
                return self.response(error, request.state.request_id, request.scope)

        return guarded

    async def handle_http_exception(self, request: Request, error: Exception) -> Response:
        """Answer unknown routes and methods, which the framework raises outside of any endpoint."""
        if isinstance(error, HTTPException) and error.status_code in (404, 405):
            detail = f"The route {request.method[:16]} {request.url.path[:256]} does not exist."
            if error.status_code == 404 and (right := _right_route(request)):
                detail += f" Did you mean {right}?"
            error = HTTPException(error.status_code, detail, error.headers)
        return self.response(error, request.state.request_id, request.scope)


CLOSE_ROUTE = 0.85
"""Least similarity of a wrong path to the route that it is taken for, from 0 to 1 (difflib)."""


def _right_route(request: Request) -> str | None:
    """Return the route that a wrong path means: one without /v1, with it twice, a slash too many or a typing error."""
    paths = [route.path for route in request.app.routes if "{" not in route.path]
    wrong = re.sub(r"/{2,}", "/", request.url.path[:256]).rstrip("/")
    fitting = [path for path in paths if wrong.endswith(path.removeprefix("/v1"))]
    return max(fitting, key=len) if fitting else next(iter(get_close_matches(wrong, paths, 1, CLOSE_ROUTE)), None)


def _of_orchard_error(error: OrchardError, request_id: str) -> Failure | None:
    match error:
        case Refusal():
            retry_after_s = None if error.retry_after_s is None else _seconds(error.retry_after_s)
            of_request = error.type, error.field, error.code, retry_after_s
            return Failure(error.status, error.message, *of_request, more_headers=error.headers, details=error.details)
        case ContextLengthExceeded():
            of_request = "invalid_request_error", error.field, "context_length_exceeded"
            return Failure(400, error.message, *of_request, anthropic_message=_too_long(error))
        case InvalidRequest():
            return Failure(400, error.message, "invalid_request_error", error.field)
        case QueueTimeout():
            return Failure(503, error.message, "server_error", None, "queue_timeout", _seconds(error.retry_after_s))
        case Overloaded():
            return Failure(429, error.message, "rate_limit_error", None, "overloaded", _seconds(error.retry_after_s))
        case Cancelled():
            return Failure(CLIENT_LEFT, error.message, "cancelled", None, "request_cancelled")
        case NotReady():
            message = f"No request can be served now: {error.message}"
            return Failure(503, message, "server_error", None, "not_ready", _seconds(retry_after.NOT_READY_S))
        case Unavailable():
            return Failure(503, error.message, "server_error", None, "unavailable", _seconds(error.retry_after_s))
        case EngineFailed():
            message = f"The engine failed while processing request {request_id}."
            return Failure(500, message, "server_error", None, "engine_failed")
    return None


def _too_long(error: ContextLengthExceeded) -> str:
    """Return Anthropic's phrase, by which agents recognise that they must shorten the conversation or ask for less."""
    num_prompt_tokens, num_output_tokens, limit = error.args[:3]
    if num_prompt_tokens >= limit:
        maximum = min(limit, num_prompt_tokens - 1)  # one token of the answer must fit
        return f"prompt is too long: {num_prompt_tokens} tokens > {maximum} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {num_prompt_tokens} + {num_output_tokens} > {limit}, "
        "decrease input length or `max_tokens` and try again"
    )


def _seconds(retry_after_s: float) -> int:
    return math.ceil(min(retry_after.MAX_S, max(retry_after.MIN_S, retry_after_s)))  # this order maps NaN to 1


def _of_http_exception(error: HTTPException) -> Failure:
    type_ = "invalid_request_error" if error.status_code < 500 else "server_error"
    return Failure(error.status_code, str(error.detail), type_, more_headers=error.headers or {})


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
