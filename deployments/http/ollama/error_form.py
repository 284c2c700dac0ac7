"""Errors in Ollama's form, `{"error": "..."}`, also as the last line of a stream."""

import json
from typing import Any

from deployments.http.dialect import ErrorForm
from deployments.http.errors import Failure, ModelNotFound

SCHEMA = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}


def error_body(failure: Failure, request_id: str | None = None) -> dict[str, Any]:
    """Return the body of an error response, which names the field. Clients know a missing model by "not found"."""
    if isinstance(failure.error, ModelNotFound):
        asked, served = failure.error.args
        return {"error": f"model '{asked[:256]}' not found: this server serves '{served}'"}
    param, message = failure.param, failure.message
    return {"error": message if param is None or param in message else f"{param}: {message}"}


def error_line(failure: Failure) -> bytes:
    """Return the line that ends a stream, with what the headers of a response would say."""
    retry = {} if failure.retry_after_s is None else {"retry_after_s": failure.retry_after_s}
    return json.dumps({**error_body(failure), **retry}).encode() + b"\n"


ERRORS = ErrorForm(error_body, "OllamaError", SCHEMA)
