"""ResponseCounter: middleware that counts the responses of an ingress."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.http.figures import METRICS_PATH, HttpFigures, api_of


class ResponseCounter:
    """Middleware: counts each response when its status is sent, except those to METRICS_PATH.

    Args:
        app: The wrapped app.
        figures: Where to count.
    """

    def __init__(self, app: ASGIApp, figures: HttpFigures):
        self._app = app
        self._figures = figures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == METRICS_PATH:
            return await self._app(scope, receive, send)

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._figures.responses[api_of(scope["path"]), message["status"]] += 1
            await send(message)

        await self._app(scope, receive, send_counted)
