"""The OpenAI dialect: the app with its routes. What a request may say is in wire.py."""

import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deployments.chat import Backend, ChatRequest, Generation, Route
from deployments.http.access import Access, AccessRules, AdministratorOnly
from deployments.http.body_reader import BodyReader
from deployments.http.chat_reader import ChatRules
from deployments.http.config import HttpConfig
from deployments.http.errors import Converter, ErrorMap, ModelNotFound, NotReady, RequestNotFound
from deployments.http.proxy_limits import ProxyLimits, TellProxy
from deployments.http.redaction import administrative_view, public_view
from deployments.http.request_id import RequestId
from deployments.http.stream import Asked, Completion, CompletionResponse
from deployments.http.unread_bodies import UnreadBodies
from engine.protocol import EngineFailed, Unavailable


class OpenAIRoutes:
    """The endpoints, and what they need to know of the model."""

    def __init__(
        self,
        backend: Backend,
        config: HttpConfig,
        media_kinds: frozenset[str],
        keeps_late_system: bool,
        errors: ErrorMap,
    ):
        self._backend = backend
        self._config = config
        rules = ChatRules(
            backend.model_name, media_kinds, keeps_late_system, config.system_policy, config.volatile_patterns
        )
        self._reader = BodyReader(rules, config.max_body_bytes)
        self._errors = errors
        self._bodies = UnreadBodies(config.body_limits)
        self._has_been_ready = False
        self._created = int(time.time())

    async def chat_completions(self, request: Request) -> Response:
        room = self._backend.in_flight, self._bodies
        comment_s = self._config.stream_comment_s
        return CompletionResponse(self._asked, *room, self._errors, request.state.request_id, comment_s)

    async def _asked(self, sent: bytes) -> Asked:
        asked = await self._reader.read(sent)
        completion = Completion(
            id=f"chatcmpl-{secrets.token_hex(16)}",
            model=self._backend.model_name,
            created=int(time.time()),
            stream=asked.stream,
            include_usage=asked.include_usage,
            num_choices=asked.request.num_choices,
            logprobs=asked.request.logprobs is not None,
        )
        waiting = [(replace(asked.request, request_id=completion.id), asked.route)]
        return Asked(completion, lambda: self._start(*waiting.pop()))  # the answer need not keep its conversation

    async def cancel(self, request: Request) -> Response:
        """id: of the completion, or the X-Request-Id that it came with: all requests that have it are cancelled.

        Their clients are told (499, or an error event in the stream) and their rows are freed.
        """
        request_id = request.path_params["id"]
        if not await self._backend.cancel(request_id):
            raise RequestNotFound(request_id)
        return JSONResponse({"id": request_id, "object": "chat.completion.cancel", "cancelled": True})

    async def _start(self, chat: ChatRequest, route: Route) -> Generation:
        if not self._has_been_ready:  # requests do not wait while the first engine is loaded
            if (reason := await self._backend.not_ready()) is not None:
                raise NotReady(reason)
            self._has_been_ready = True
        try:
            return await self._backend.start(chat, route)
        except Exception as error:
            converted = self._errors.convert(error)
            if isinstance(converted, EngineFailed) and (reason := await self._backend.not_ready()) is not None:
                if isinstance(converted, Unavailable):
                    raise Unavailable(f"{converted.message} {reason}", converted.retry_after_s) from error
                raise NotReady(reason) from error
            raise

    def _check_model(self, name: str) -> None:
        if name != self._backend.model_name:
            raise ModelNotFound(name, self._backend.model_name)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["model"])
        return JSONResponse(self._model_card())

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._backend.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "orchard",
        }

    async def live(self, request: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def ready(self, request: Request) -> Response:
        reason = await self._backend.not_ready()
        if reason is None:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready", "reason": reason}, 503)

    async def status(self, request: Request) -> Response:
        return _page(request, {**await self._backend.status(), "bodies": self._bodies.status()})

    async def cache(self, request: Request) -> Response:
        if request.method == "DELETE":
            if not request.state.is_administrative:
                raise AdministratorOnly("DELETE /v1/cache")
            return JSONResponse(await self._backend.clear_cache())
        return _page(request, await self._backend.cache_status())


def _page(request: Request, page: dict[str, Any]) -> Response:
    view = administrative_view if request.state.is_administrative else public_view
    return JSONResponse(view(page))


def create_app(
    backend: Backend,
    config: HttpConfig,
    media_kinds: frozenset[str],
    keeps_late_system: bool = False,
    converters: Mapping[type[Exception], Converter] | None = None,
    is_behind_proxy: bool = False,
) -> FastAPI:
    """The whole HTTP face of a backend.

    is_behind_proxy: whether Serve's HTTP proxy adds the request id to responses, see RequestId.

    media_kinds: what the model reads besides text. keeps_late_system: see normalize. converters: make our errors of
    the transport's. Under Ray this is called from `__serve_build_asgi_app__`, when the backend exists.
    """
    errors = ErrorMap(converters)
    routes = OpenAIRoutes(backend, config, media_kinds, keeps_late_system, errors)
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    app.add_route("/v1/chat/completions", errors.guard(routes.chat_completions), ["POST"])
    app.add_route("/v1/chat/completions/{id:path}/cancel", errors.guard(routes.cancel), ["POST"])
    app.add_route("/v1/models", errors.guard(routes.models), ["GET"])
    app.add_route("/v1/models/{model:path}", errors.guard(routes.model), ["GET"])
    app.add_route("/v1/status", errors.guard(routes.status), ["GET"])
    app.add_route("/v1/cache", errors.guard(routes.cache), ["GET", "DELETE"])  # one route, for a whole Allow header
    app.add_route("/health/live", errors.guard(routes.live), ["GET"])
    app.add_route("/health/ready", errors.guard(routes.ready), ["GET"])
    app.add_exception_handler(HTTPException, errors.handle_http_exception)
    app.add_middleware(Access, rules=AccessRules(config), errors=errors)
    app.add_middleware(RequestId, is_behind_proxy=is_behind_proxy)
    app.add_middleware(TellProxy, limits=ProxyLimits(config.body_limits, config.send_timeout_s))
    return app
