"""GET /metrics: the metrics of this node in Prometheus's text format."""

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from deployments.http.context import HttpContext
from deployments.http.response_counter import METRICS_PATH

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """The endpoint /metrics. Only administrators see the names of API keys."""

    def __init__(self, context: HttpContext):
        self._context = context

    def add_to(self, app: FastAPI) -> None:
        app.add_route(METRICS_PATH, self._context.errors.guard(self.metrics), ["GET"])
        summary = "Return the metrics of this node for Prometheus."
        self._context.api.describe(METRICS_PATH, "GET", None, summary, media_type="text/plain")

    async def metrics(self, request: Request) -> Response:
        text = await self._context.backend.metrics(shows_names=request.state.is_administrative)
        return Response(text, media_type=CONTENT_TYPE)
