"""create_app: assembles all endpoints and the middleware in front of them."""

from collections.abc import Mapping

from fastapi import FastAPI
from starlette.exceptions import HTTPException

from deployments.http.access import Access, AccessRules
from deployments.http.answer_id import tag_of_node
from deployments.http.backend import Backend
from deployments.http.body_reader import BodyReader
from deployments.http.config import HttpConfig
from deployments.http.context import HttpContext
from deployments.http.dialects import DIALECTS
from deployments.http.documentation import Documentation
from deployments.http.error_map import Converter, ErrorMap
from deployments.http.errors import Failure
from deployments.http.figures import HttpFigures
from deployments.http.limit_names import limit_of
from deployments.http.metrics import Metrics
from deployments.http.models import Models
from deployments.http.openapi import ApiDocument
from deployments.http.operation import Operation
from deployments.http.operations import Operations
from deployments.http.parsed_request import ModelDefaults, ReadingRules
from deployments.http.proxy_limits import ProxyLimits, TellProxy
from deployments.http.request_id import RequestId
from deployments.http.requests import Requests
from deployments.http.response_counter import ResponseCounter
from deployments.http.shared_limits import SharedLimits
from deployments.http.shared_responses import SharedResponses
from deployments.http.status_stream import StatusStream
from deployments.http.web_page import WebPage

ENDPOINTS = (Models, Operations, StatusStream, Requests, Metrics, Documentation, WebPage)
"""Those that are no dialect's."""


def create_app(
    backend: Backend,
    config: HttpConfig,
    media_kinds: frozenset[str],
    keeps_late_system: bool = False,
    converters: Mapping[type[Exception], Converter] | None = None,
    is_behind_proxy: bool = False,
    model: ModelDefaults | None = None,
    limits: SharedLimits | None = None,
    responses: SharedResponses | None = None,
    tag: str = tag_of_node(""),
) -> FastAPI:
    """Create the HTTP API of a backend.

    Under Ray the Ingress calls this from `__serve_build_asgi_app__`.

    Args:
        backend: The graph.
        config: HTTP settings.
        media_kinds: Kinds of media that the model reads besides text.
        keeps_late_system: See `normalize`.
        converters: Convert foreign exceptions to OrchardErrors, by exception class.
        is_behind_proxy: Whether Serve's HTTP proxy adds the request id to responses, see RequestId.
        model: Facts of the checkpoint.
        limits: Limits of the API keys; None: they are counted here alone.
        responses: Responses of all ingresses; None: there is this one alone.
        tag: Tag of this ingress in the ids of its answers, see answer_id.py.
    """
    errors = ErrorMap(DIALECTS, converters, lambda error, failure: _count(backend.figures, error, failure))
    limits = limits or SharedLimits()
    responses = responses or SharedResponses(config)
    api = ApiDocument(DIALECTS, config.unknown_fields == "refuse", backend.model_name)
    rules = _rules(backend, config, media_kinds, keeps_late_system, model or ModelDefaults())
    reader = BodyReader(rules, config.max_body_bytes)
    context = HttpContext(backend, config, rules, reader, errors, api, limits, responses, tag, DIALECTS.greeting())
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    _add_endpoints(app, context)
    app.add_exception_handler(HTTPException, errors.handle_http_exception)
    app.add_middleware(Access, rules=AccessRules(config, DIALECTS), errors=errors, limits=limits)
    app.add_middleware(ResponseCounter, dialects=DIALECTS, figures=backend.figures)
    app.add_middleware(RequestId, dialects=DIALECTS, is_behind_proxy=is_behind_proxy)
    app.add_middleware(TellProxy, limits=ProxyLimits(config.body_limits, config.send_timeout_s))
    return app


def _add_endpoints(app: FastAPI, context: HttpContext) -> None:
    """Serve and describe the operations of all dialects, then those of ENDPOINTS."""
    routes: dict[str, list[Operation]] = {}
    for make in (*(make for dialect in DIALECTS for make in dialect.endpoints), *ENDPOINTS):
        for operation in make(context).operations:
            context.api.add(operation)
            routes.setdefault(operation.path, []).append(operation)
    for path, operations in routes.items():  # one route per path has a complete Allow header
        methods = [operation.method for operation in operations]
        app.add_route(path, context.errors.guard(operations[0].endpoint), methods)


def _rules(
    backend: Backend, config: HttpConfig, media_kinds: frozenset[str], keeps_late_system: bool, model: ModelDefaults
) -> ReadingRules:
    return ReadingRules(
        backend.model_name,
        media_kinds,
        keeps_late_system,
        config.system_policy,
        config.volatile_patterns,
        frozenset(config.served_model_names),
        config.unknown_fields,
        model,
        config.store_responses,
    )


def _count(figures: HttpFigures, error: Exception, failure: Failure) -> None:
    figures.failed(failure.status, failure.code or failure.type, limit_of(error))
