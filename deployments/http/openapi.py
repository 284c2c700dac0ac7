"""ApiDocument: the OpenAPI document, to which each endpoint adds its routes."""

import re
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from pydantic import TypeAdapter

from deployments.http.access import READY_PATHS
from deployments.http.errors import error_dialect

REF_TEMPLATE = "#/components/schemas/{model}"

ERROR_STATUSES = {
    "400": "A field is wrong or not supported: `param` names it.",
    "401": "An API key is needed.",
    "403": "The Host, the origin or the API key is not allowed to do this.",
    "404": "The model, the request or the route does not exist.",
    "408": "The request body arrived too slowly.",
    "413": "The request body is too large.",
    "415": "The Content-Type is not application/json.",
    "429": "Too many requests: Retry-After says when to retry.",
    "499": "The request was cancelled.",
    "500": "The server failed.",
    "503": "No request can be served now: Retry-After says when to retry.",
}

OPENAI_ERROR = {
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
ANTHROPIC_ERROR = {
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
ERRORS = {"openai": ("OpenAIError", OPENAI_ERROR), "anthropic": ("AnthropicError", ANTHROPIC_ERROR)}


@dataclass(frozen=True)
class Operation:
    """One method of one route."""

    path: str
    """With parameters as `{name}`."""
    method: str
    body_model: Any
    """Wire model of the body, or a union of wire models; None: no body."""
    summary: str
    """One sentence."""
    example: dict[str, Any] | None = None
    """A valid body."""
    media_type: str = "application/json"
    """Content type of the answer. A body model with `stream` adds text/event-stream."""

    @property
    def id(self) -> str:
        return "_".join([self.method.lower(), *re.findall(r"\w+", self.path)])


class ApiDocument:
    """Collects the operations and builds the document on first use.

    Args:
        refuses_unknown: Whether unknown fields at the top of a body are errors.
        model_name: Model name for the examples.
    """

    def __init__(self, refuses_unknown: bool, model_name: str):
        self.operations: list[Operation] = []
        self._refuses_unknown = refuses_unknown
        self._model_name = model_name
        self._written: dict[str, Any] | None = None

    def describe(
        self,
        path: str,
        method: str,
        body_model: Any,
        summary: str,
        example: dict[str, Any] | None = None,
        media_type: str = "application/json",
    ) -> None:
        """Add an operation; the arguments are documented in Operation."""
        if example is not None and "model" in example:
            example = {**example, "model": self._model_name}
        self.operations.append(Operation(path, method, body_model, summary, example, media_type))
        self._written = None

    @property
    def document(self) -> dict[str, Any]:
        """The OpenAPI 3.1 document."""
        if self._written is None:
            self._written = self._write()
        return self._written

    def _write(self) -> dict[str, Any]:
        bodies, schemas = self._schemas()
        paths: dict[str, Any] = {}
        for operation in self.operations:
            path = paths.setdefault(operation.path, {})
            path[operation.method.lower()] = _operation(operation, bodies.get(operation.id))
        return {
            "openapi": "3.1.0",
            "info": {"title": "Orchard", "version": version("orchard-mlx"), "description": self._description},
            "paths": paths,
            "components": {
                "schemas": schemas,
                "securitySchemes": {
                    "bearer": {"type": "http", "scheme": "bearer"},
                    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                },
            },
            "security": [{}, {"bearer": []}, {"key": []}],
        }

    @property
    def _description(self) -> str:
        others = "refused" if self._refuses_unknown else "ignored and named in the header X-Orchard-Ignored"
        return (
            "A body may have fields that are not listed here: those that would change the answer are refused by name, "
            f"the others are {others}."
        )

    def _schemas(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the schemas of the bodies by operation id, and all schemas that they reference."""
        models = [
            (operation.id, "validation", TypeAdapter(operation.body_model))
            for operation in self.operations
            if operation.body_model is not None
        ]
        written, shared = TypeAdapter.json_schemas(models, ref_template=REF_TEMPLATE)  # type: ignore[arg-type]
        schemas = {**dict(ERRORS.values()), **shared.get("$defs", {})}
        bodies = {id: schema for (id, _), schema in written.items()}
        if not self._refuses_unknown:
            for schema in bodies.values():
                for choice in schema.get("anyOf", [schema]):
                    _resolved(choice, schemas).pop("additionalProperties", None)
        return bodies, schemas


def _operation(operation: Operation, schema: dict[str, Any] | None) -> dict[str, Any]:
    written: dict[str, Any] = {"operationId": operation.id, "summary": operation.summary}
    if names := re.findall(r"{(\w+)}", operation.path):
        written["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if schema is not None:
        written["requestBody"] = {"required": True, "content": {"application/json": _content(schema, operation)}}
    streams = "stream" in getattr(operation.body_model, "model_fields", {})
    return {**written, "responses": _responses(operation, streams)}


def _resolved(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    ref = schema.get("$ref")
    return schema if ref is None else schemas[ref.rpartition("/")[2]]


def _content(schema: dict[str, Any], operation: Operation) -> dict[str, Any]:
    return {"schema": schema} if operation.example is None else {"schema": schema, "example": operation.example}


def _responses(operation: Operation, streams: bool) -> dict[str, Any]:
    is_json = operation.media_type == "application/json"
    content: dict[str, Any] = {operation.media_type: {"schema": {"type": "object" if is_json else "string"}}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    name, _ = ERRORS[error_dialect(operation.path)]
    error = {"application/json": {"schema": {"$ref": REF_TEMPLATE.format(model=name)}}}
    errors = {status: {"description": why, "content": error} for status, why in ERROR_STATUSES.items()}
    if operation.path in READY_PATHS:
        errors["503"] = {"description": "Not ready: `reason` says why.", "content": content}
    return {"200": {"description": "The answer.", "content": content}, **errors}
