"""Errors and rate limit headers in Anthropic's form, with the phrases that its clients match."""

import json
import math
import re
from datetime import UTC, datetime
from typing import Any

from deployments.http.allowance import Allowance
from deployments.http.anthropic.phrases import ThreadsUnsupported
from deployments.http.dialect import ErrorForm
from deployments.http.errors import Failure
from engine.errors import ContextLengthExceeded

SCHEMA = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
        "request_id": {"type": ["string", "null"]},
    },
}

_TYPES = {
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


def error_body(failure: Failure, request_id: str | None = None) -> dict[str, Any]:
    """Return the body of an error response, whose message names the field."""
    error: dict[str, Any] = {"type": _TYPES.get(failure.status, "api_error"), "message": _message(failure)}
    if isinstance(failure.error, ThreadsUnsupported):
        error["details"] = failure.error.details
    return {"type": "error", "error": error, "request_id": request_id}


def error_event(failure: Failure, request_id: str) -> bytes:
    """Return the `error` event that ends a stream, with what the headers of a response would say."""
    body = error_body(failure, request_id)
    if failure.retry_after_s is not None:
        body["error"]["retry_after_s"] = failure.retry_after_s
    return b"event: error\ndata: " + json.dumps(body).encode() + b"\n\n"


ERRORS = ErrorForm(error_body, "AnthropicError", SCHEMA)


def limit_headers(allowance: Allowance) -> dict[str, str]:
    """Return the headers that tell what is left of a limit of the API key."""
    full_at = math.ceil(allowance.now_s + allowance.full_in_s)
    return {
        f"anthropic-ratelimit-{allowance.kind}-limit": str(allowance.per_minute),
        f"anthropic-ratelimit-{allowance.kind}-remaining": str(allowance.remaining),
        f"anthropic-ratelimit-{allowance.kind}-reset": datetime.fromtimestamp(full_at, UTC).strftime(
            "%Y-%m-%dT%H:%M:%SZ"
        ),
    }


def _message(failure: Failure) -> str:
    if isinstance(failure.error, ContextLengthExceeded):
        return _too_long(failure.error)
    return _with_path(failure.message, failure.param)


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


def _with_path(message: str, param: str | None) -> str:
    """Return the message with the field's path in Anthropic's notation, `messages.0.content`."""
    if param is None:
        return message
    path = re.sub(r"\[(\d+)\]", r".\1", param)
    message = message.replace(param, path)
    return message if path in message else f"{path}: {message}"
