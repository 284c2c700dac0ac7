"""Errors in OpenAI's form."""

import json
from typing import Any

from deployments.http.dialect import ErrorForm
from deployments.http.errors import Failure

SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def error_body(failure: Failure, request_id: str | None = None) -> dict[str, Any]:
    """Return the body of an error response."""
    return {"error": _error(failure)}


def error_event(failure: Failure) -> bytes:
    """Return an event that ends a stream, with what the headers of a response would say."""
    retry = {} if failure.retry_after_s is None else {"retry_after_s": failure.retry_after_s}
    return b"data: " + json.dumps({"error": {**_error(failure), **retry}}).encode() + b"\n\n"


def _error(failure: Failure) -> dict[str, Any]:
    return {"message": failure.message, "type": failure.type, "param": failure.param, "code": failure.code}


ERRORS = ErrorForm(error_body, "OpenAIError", SCHEMA)
