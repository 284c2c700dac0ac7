"""ResponseCounter: middleware that counts the responses of an ingress."""

from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.http.dialect import DialectTable
from deployments.http.figures import HttpFigures

METRICS_PATH = "/metrics"
"""Its answers are not counted, so that a scrape does not change what it reads; its refusals are."""

APIS = {
    "/v1/models": "models",
    "/v1/status": "status",
    "/v1/cache": "status",
    "/v1/requests": "status",
    "/health": "health",
    "/ping": "health",
}
"""Path at or under which a request belongs to an API that is no dialect's; other paths are of the API `other`."""


class ResponseCounter:
    """Middleware: counts each response when its status is sent, except a scrape of the metrics that is answered.

    Args:
        app: The wrapped app.
        dialects: The dialects of the server.
        figures: Where to count.
    """

    def __init__(self, app: ASGIApp, dialects: DialectTable, figures: HttpFigures):
        self._app = app
        self._apis = {**APIS, **dialects.apis}
        self._figures = figures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        async def send_counted(message: Message) -> None:
            is_start = message["type"] == "http.response.start"
            if is_start and not (scope["path"] == METRICS_PATH and message["status"] < 400):
                self._figures.responses[api_of(scope["path"], self._apis), message["status"]] += 1
            await send(message)

        await self._app(scope, receive, send_counted)


def api_of(path: str, apis: Mapping[str, str]) -> str:
    """Return the API that a path belongs to: the value of the longest path in `apis` that it is under, or `other`."""
    while path:
        if path in apis:
            return apis[path]
        path = path.rpartition("/")[0]
    return "other"
