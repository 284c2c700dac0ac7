"""Operation: one method of one route, as the app serves it and the OpenAPI document describes it."""

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Operation:
    """One method of one route. Operations of the same path have the same endpoint and are one route."""

    method: str
    path: str
    """In Starlette's form, with parameters such as `{id:path}`."""
    endpoint: Endpoint
    summary: str
    """One sentence."""
    body_model: Any = None
    """Wire model of the body, or a union of wire models; None: no body."""
    example: dict[str, Any] | None = None
    """A valid body."""
    media_type: str = "application/json"
    """Content type of the answer. A body model with `stream` adds that of the dialect's streams."""
    text_for_programs: bool = False
    """Whether a program that does not accept `media_type` gets plain text."""

    @property
    def described_path(self) -> str:
        """The path with parameters as `{name}`."""
        return re.sub(r"{(\w+):\w+}", r"{\1}", self.path)

    @property
    def id(self) -> str:
        return "_".join([self.method.lower(), *re.findall(r"\w+", self.described_path)])
