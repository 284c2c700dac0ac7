"""ApiDocument: the OpenAPI document of the operations that the app serves."""

import re
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from pydantic import TypeAdapter

from deployments.http.access import READY_PATHS
from deployments.http.dialect import Dialect, DialectTable
from deployments.http.operation import Operation

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


class ApiDocument:
    """Collects the operations and builds the document on first use.

    Args:
        dialects: The dialects of the server.
        refuses_unknown: Whether unknown fields at the top of a body are errors.
        model_name: Model name for the examples.
    """

    def __init__(self, dialects: DialectTable, refuses_unknown: bool, model_name: str):
        self._dialects = dialects
        self.operations: list[Operation] = []
        self._refuses_unknown = refuses_unknown
        self._model_name = model_name
        self._written: dict[str, Any] | None = None

    def add(self, operation: Operation) -> None:
        """Add an operation. The model of its example becomes the served one."""
        example = operation.example
        if example is not None and "model" in example:
            operation = replace(operation, example={**example, "model": self._model_name})
        self.operations.append(operation)
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
            path = paths.setdefault(operation.described_path, {})
            dialect = self._dialects.of(operation.described_path)
            path[operation.method.lower()] = _operation(operation, bodies.get(operation.id), dialect)
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
        schemas = {**self._dialects.error_schemas, **shared.get("$defs", {})}
        bodies = {id: schema for (id, _), schema in written.items()}
        if not self._refuses_unknown:
            for schema in bodies.values():
                for choice in schema.get("anyOf", [schema]):
                    _resolved(choice, schemas).pop("additionalProperties", None)
        return bodies, schemas


def _operation(operation: Operation, schema: dict[str, Any] | None, dialect: Dialect) -> dict[str, Any]:
    written: dict[str, Any] = {"operationId": operation.id, "summary": operation.summary}
    if names := re.findall(r"{(\w+)}", operation.described_path):
        written["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if schema is not None:
        written["requestBody"] = {"required": True, "content": {"application/json": _content(schema, operation)}}
    streams = "stream" in getattr(operation.body_model, "model_fields", {})
    return {**written, "responses": _responses(operation, streams, dialect)}


def _resolved(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    ref = schema.get("$ref")
    return schema if ref is None else schemas[ref.rpartition("/")[2]]


def _content(schema: dict[str, Any], operation: Operation) -> dict[str, Any]:
    return {"schema": schema} if operation.example is None else {"schema": schema, "example": operation.example}


def _responses(operation: Operation, streams: bool, dialect: Dialect) -> dict[str, Any]:
    is_json = operation.media_type == "application/json"
    content: dict[str, Any] = {operation.media_type: {"schema": {"type": "object" if is_json else "string"}}}
    if operation.text_for_programs:
        content["text/plain"] = {"schema": {"type": "string"}}
    if streams:
        content[dialect.stream_type] = {"schema": {"type": "string"}}
    ref = REF_TEMPLATE.format(model=dialect.errors.schema_name)
    error = {"application/json": {"schema": {"$ref": ref}}}
    errors = {status: {"description": why, "content": error} for status, why in ERROR_STATUSES.items()}
    if operation.path in READY_PATHS:
        errors["503"] = {"description": "Not ready: `reason` says why.", "content": content}
    return {"200": {"description": "The answer.", "content": content}, **errors}
