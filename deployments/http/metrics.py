"""GET /metrics: the metrics of this node in Prometheus's text format."""

from starlette.requests import Request
from starlette.responses import Response

from deployments.http.context import HttpContext
from deployments.http.operation import Operation
from deployments.http.response_counter import METRICS_PATH

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """The endpoint /metrics. Only administrators see the names of API keys."""

    def __init__(self, context: HttpContext):
        self._context = context

    @property
    def operations(self) -> tuple[Operation, ...]:
        summary = "Return the metrics of this node for Prometheus."
        return (Operation("GET", METRICS_PATH, self.metrics, summary, media_type="text/plain"),)

    async def metrics(self, request: Request) -> Response:
        text = await self._context.backend.metrics(shows_names=request.state.is_administrative)
        return Response(text, media_type=CONTENT_TYPE)
