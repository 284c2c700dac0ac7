"""The routes about the model: tags, ps, show and version; and those that would write models, which are refused."""

import time
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deployments.http.client_address import address_group, client_host
from deployments.http.context import HttpContext
from deployments.http.errors import Refusal
from deployments.http.ollama.model_names import all_names, listed_name
from deployments.http.ollama.show_wire import OllamaShowBody
from deployments.http.operation import Operation

API_VERSION = "0.41.0"
"""The version of Ollama whose API this is; clients refuse to work with versions that are too old for them."""

NEVER = "9999-12-31T23:59:59Z"
"""When the model is unloaded."""

WRITES = (
    ("POST", "/api/pull"),
    ("POST", "/api/push"),
    ("POST", "/api/create"),
    ("POST", "/api/copy"),
    ("DELETE", "/api/delete"),
    ("POST", "/api/blobs/{digest}"),
)

SHOW = "/api/show"
SHOW_EXAMPLE = {"model": "demo"}


class NoModelWrites(Refusal):
    """The method and route in args[0] would write models."""

    status, code = 403, "no_model_writes"

    @property
    def message(self) -> str:
        return (
            f"{self.args[0]} is refused: this server serves one model, which it loads when it starts, and writes none "
            "over HTTP. `orchard pull MODEL` downloads a model, `orchard serve MODEL` serves it."
        )


class ModelPages:
    """The endpoints /api/tags, /api/ps, /api/show and /api/version, and refusals of those in WRITES."""

    def __init__(self, context: HttpContext):
        self._context = context
        self._started = _written(time.time())

    @property
    def operations(self) -> tuple[Operation, ...]:
        summary = "Is refused: no model is written over HTTP."
        return (
            Operation("GET", "/api/tags", self.tags, "List the names by which requests can ask for the model."),
            Operation("GET", "/api/ps", self.ps, "List the loaded model under its names."),
            Operation("POST", SHOW, self.show, "Describe the model.", OllamaShowBody, SHOW_EXAMPLE),
            Operation("GET", "/api/version", self.version, "Return the version of Ollama's API."),
            *(Operation(method, path, self.refuse, summary) for method, path in WRITES),
        )

    async def tags(self, request: Request) -> Response:
        return JSONResponse({"models": [self._entry(name) for name in all_names(self._context.rules)]})

    async def ps(self, request: Request) -> Response:
        if await self._context.backend.not_ready() is not None:
            return JSONResponse({"models": []})
        limit = self._context.backend.max_context_tokens
        more = {
            "expires_at": NEVER,
            "size_vram": self._context.rules.model.facts.num_bytes,
            "context_length": limit,
        }
        return JSONResponse({"models": [{**self._entry(name), **more} for name in all_names(self._context.rules)]})

    async def show(self, request: Request) -> Response:
        address = address_group(client_host(request.scope))
        with self._context.backend.in_flight.enter(request.state.request_id, address):
            parsed = await self._context.read(request, "ollama_show")
        return JSONResponse(self._description(), headers=self._context.ignored_header(parsed))

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": API_VERSION})

    async def refuse(self, request: Request) -> Response:
        raise NoModelWrites(f"{request.method} {request.url.path[:256]}")

    def _entry(self, name: str) -> dict[str, Any]:
        facts, listed = self._context.rules.model.facts, listed_name(name)
        return {
            "name": listed,
            "model": listed,
            "modified_at": self._started,
            "size": facts.num_bytes,
            "digest": facts.digest,
            "details": self._details(),
            "capabilities": self._capabilities(),
        }

    def _details(self) -> dict[str, Any]:
        facts = self._context.rules.model.facts
        return {
            "parent_model": "",
            "format": "safetensors",
            "family": facts.family,
            "families": [facts.family],
            "parameter_size": _written_number(facts.num_parameters),
            "quantization_level": facts.quantization,
        }

    def _capabilities(self) -> list[str]:
        rules = self._context.rules
        facts = rules.model.facts
        if facts.is_embedding_model:
            return ["embedding"]
        if facts.is_reranker:
            return []
        has = {"tools": facts.has_tools, "vision": "image" in rules.media_kinds, "thinking": facts.has_thinking}
        return ["completion", *(name for name, is_there in has.items() if is_there)]

    def _description(self) -> dict[str, Any]:
        model, backend = self._context.rules.model, self._context.backend
        facts = model.facts
        sizes = {"context_length": backend.max_context_tokens, **facts.sizes}
        return {
            "parameters": f"temperature {model.temperature:g}\ntop_p {model.top_p:g}",
            "details": self._details(),
            "model_info": {
                "general.architecture": facts.family,
                "general.basename": backend.model_name,
                **({"general.parameter_count": facts.num_parameters} if facts.num_parameters else {}),
                **{f"{facts.family}.{name}": size for name, size in sizes.items()},
            },
            "capabilities": self._capabilities(),
            "modified_at": self._started,
        }


def _written(seconds: float) -> str:
    return datetime.fromtimestamp(int(seconds), UTC).isoformat().replace("+00:00", "Z")


def _written_number(number: int) -> str:
    """Return a number of weights as Ollama writes it, such as 8.2B or 134.52M; '' for 0."""
    for unit, letter, digits in ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 0)):
        if number >= unit:
            return f"{number / unit:.{0 if number % unit == 0 else digits}f}{letter}"
    return str(number or "")
