"""Dialect: all that the HTTP API knows of one dialect; DialectTable: all dialects, found by the path of a request."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from deployments.http.allowance import Allowance, limit_headers
from deployments.http.errors import Failure
from deployments.http.operation import Operation
from deployments.http.parsed_request import ParsedRequest, ReadingRules

Parser = Callable[[dict[str, Any], ReadingRules], ParsedRequest]
"""Validates and normalizes the JSON object of a body. Raises InvalidRequest, ModelNotFound."""


class Endpoints(Protocol):
    """Some endpoints of the HTTP API."""

    @property
    def operations(self) -> Sequence[Operation]:
        """Their routes, in the order of the OpenAPI document."""
        ...


@dataclass(frozen=True)
class ErrorForm:
    """How a dialect writes errors."""

    body: Callable[[Failure, str | None], dict[str, Any]]
    """Return the body of an error response for a failure and the request's id."""
    schema_name: str
    schema: Mapping[str, Any]
    """JSON schema of the body, for the OpenAPI document."""


@dataclass(frozen=True)
class Dialect:
    """One dialect. A path that is at or under one of `prefixes` is spoken to in it."""

    name: str
    prefixes: tuple[str, ...]
    errors: ErrorForm
    bodies: Mapping[str, Parser]
    """Kind of body, unique among all dialects, to its parser."""
    endpoints: tuple[Callable[[Any], Endpoints], ...]
    """Make the endpoints, each from the HttpContext."""
    apis: Mapping[str, str]
    """Path to the label of the metrics for requests at or under it."""
    answer_ids: tuple[str, ...] = ()
    """Prefixes of the ids of answers."""
    limit_headers: Callable[[Allowance], Mapping[str, str]] = limit_headers
    """Return the response headers that tell an allowance of the API key."""
    id_headers: tuple[str, ...] = ()
    """Response headers with the request's id, besides X-Request-Id."""
    x_api_key_decides: bool = False
    """Whether Authorization is ignored where x-api-key is sent; otherwise one valid key of both is enough."""
    stream_type: str = "text/event-stream"
    """Content type of streamed answers."""
    traced_as: Mapping[str, str] = field(default_factory=dict)
    """Path to OpenTelemetry's gen_ai.operation.name; `chat` for other paths."""
    greeting: str = ""
    """Answer to programs that ask for `/` to find out what serves there; '' for a dialect whose clients do not ask."""


class DialectTable:
    """The dialects of a server. The first one is also that of paths that belong to none, such as /v1/status.

    Args:
        dialects: All of them.
    """

    def __init__(self, dialects: Iterable[Dialect]):
        self._dialects = tuple(dialects)
        self._prefixes = [(prefix, dialect) for dialect in self._dialects for prefix in dialect.prefixes]

    def __iter__(self) -> Iterator[Dialect]:
        return iter(self._dialects)

    def of(self, path: str) -> Dialect:
        """Return the dialect of a path: that of the longest prefix that it is at or under."""
        under = [(len(prefix), dialect) for prefix, dialect in self._prefixes if f"{path}/".startswith(f"{prefix}/")]
        return max(under, key=lambda one: one[0])[1] if under else self._dialects[0]

    @cached_property
    def parsers(self) -> Mapping[str, Parser]:
        """Kind of body to its parser."""
        return {kind: parser for dialect in self._dialects for kind, parser in dialect.bodies.items()}

    @cached_property
    def apis(self) -> Mapping[str, str]:
        """Path to the label of the metrics."""
        return {path: api for dialect in self._dialects for path, api in dialect.apis.items()}

    @cached_property
    def error_schemas(self) -> Mapping[str, Mapping[str, Any]]:
        """Name to JSON schema of each form of errors."""
        return {dialect.errors.schema_name: dialect.errors.schema for dialect in self._dialects}

    @cached_property
    def id_headers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for dialect in self._dialects for name in dialect.id_headers))

    @cached_property
    def answer_ids(self) -> tuple[str, ...]:
        return tuple(prefix for dialect in self._dialects for prefix in dialect.answer_ids)

    def limit_header_names(self, kinds: Iterable[str]) -> tuple[str, ...]:
        """Return the names of all headers that tell allowances of these kinds."""
        allowances = [Allowance(kind, 1, 1, 0.0, 0.0) for kind in kinds]
        names = [name for one in allowances for dialect in self._dialects for name in dialect.limit_headers(one)]
        return tuple(dict.fromkeys(names))

    def greeting(self) -> str:
        """Return what programs find at `/`; '' if no dialect has a greeting."""
        return next((dialect.greeting for dialect in self._dialects if dialect.greeting), "")
