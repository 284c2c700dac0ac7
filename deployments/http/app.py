"""create_app: assembles all endpoints and the middleware in front of them."""

from collections.abc import Mapping

from fastapi import FastAPI
from starlette.exceptions import HTTPException

from deployments.http.access import Access, AccessRules
from deployments.http.answer_id import tag_of_node
from deployments.http.anthropic.messages import Messages
from deployments.http.config import HttpConfig
from deployments.http.context import HttpContext
from deployments.http.documentation import Documentation
from deployments.http.errors import Converter, ErrorMap, Failure
from deployments.http.limit_names import limit_of
from deployments.http.metrics import Metrics
from deployments.http.openai.chat import ChatCompletions
from deployments.http.openai.completions import Completions
from deployments.http.openai.embeddings import EmbeddingsEndpoint
from deployments.http.openai.models import Models
from deployments.http.openai.tokenization import Tokenization
from deployments.http.operations import Operations
from deployments.http.parsed_request import ModelDefaults
from deployments.http.proxy_limits import ProxyLimits, TellProxy
from deployments.http.request_id import RequestId
from deployments.http.requests import Requests
from deployments.http.response_counter import ResponseCounter
from deployments.http.responses.endpoints import Responses
from deployments.http.shared_limits import SharedLimits
from deployments.http.status_stream import StatusStream
from deployments.http.web_page import WebPage
from deployments.http_figures import HttpFigures
from deployments.protocol import Backend


def create_app(
    backend: Backend,
    config: HttpConfig,
    media_kinds: frozenset[str],
    keeps_late_system: bool = False,
    converters: Mapping[type[Exception], Converter] | None = None,
    is_behind_proxy: bool = False,
    model: ModelDefaults | None = None,
    limits: SharedLimits | None = None,
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
        tag: Tag of this ingress in the ids of its answers, see answer_id.py.
    """
    errors = ErrorMap(converters, lambda error, failure: _count(backend.figures, error, failure))
    limits, model = limits or SharedLimits(), model or ModelDefaults()
    context = HttpContext(backend, config, media_kinds, keeps_late_system, errors, model, limits, tag)
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    endpoints = (
        ChatCompletions(context),
        Completions(context),
        EmbeddingsEndpoint(context),
        Tokenization(context),
        Responses(context),
        Messages(context),
        Models(context),
        Operations(context),
        StatusStream(context),
        Requests(context),
        Metrics(context),
        Documentation(context),
        WebPage(context),
    )
    for endpoint in endpoints:
        endpoint.add_to(app)
    app.add_exception_handler(HTTPException, errors.handle_http_exception)
    app.add_middleware(Access, rules=AccessRules(config), errors=errors, limits=limits)
    app.add_middleware(ResponseCounter, figures=backend.figures)
    app.add_middleware(RequestId, is_behind_proxy=is_behind_proxy)
    app.add_middleware(TellProxy, limits=ProxyLimits(config.body_limits, config.send_timeout_s))
    return app


def _count(figures: HttpFigures, error: Exception, failure: Failure) -> None:
    figures.failed(failure.status, failure.code or failure.type, limit_of(error))
