"""ErrorMap: maps every exception to an HTTP status and an error body in the dialect of the request.

An error after which the same request may succeed tells when to retry, in whole seconds: in the header Retry-After, or
in a stream, where headers are already sent, as `retry_after_s` of the error object.
"""

import functools
import json
import logging
import math
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Scope

from deployments.http.dialect import DialectTable
from deployments.http.errors import CLIENT_LEFT, Failure, NotReady, Refusal
from deployments.http.operation import Endpoint
from deployments.serve_log import is_probe
from engine import retry_after
from engine.errors import (
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


class ErrorMap:
    """Maps exceptions to failures and responses.

    Args:
        dialects: The dialects of the server.
        converters: Foreign exception class to its Converter; looked up along the bases of the exception's class.
        note: Called with each converted exception and its failure, which is about to be sent.
    """

    def __init__(
        self,
        dialects: DialectTable,
        converters: Mapping[type[Exception], Converter] | None = None,
        note: Callable[[Exception, Failure], None] = lambda error, failure: None,
    ):
        self._dialects = dialects
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
        body = self._dialects.of(scope["path"]).errors.body(failure, request_id)
        return Response(json.dumps(body).encode(), failure.status, failure.headers, "application/json")

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
            return Failure(error.status, error.message, *of_request, more_headers=error.headers, error=error)
        case ContextLengthExceeded():
            of_request = "invalid_request_error", error.field, "context_length_exceeded"
            return Failure(400, error.message, *of_request, error=error)
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


def _seconds(retry_after_s: float) -> int:
    return math.ceil(min(retry_after.MAX_S, max(retry_after.MIN_S, retry_after_s)))  # this order maps NaN to 1


def _of_http_exception(error: HTTPException) -> Failure:
    type_ = "invalid_request_error" if error.status_code < 500 else "server_error"
    return Failure(error.status_code, str(error.detail), type_, more_headers=error.headers or {})
