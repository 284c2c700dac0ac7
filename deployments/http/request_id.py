"""RequestId: assigns each request an id, the client's X-Request-Id if valid, and returns it in one X-Request-Id header.

Responses of some dialects have it in a header of their own as well, from which their SDKs read it.
"""

import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.http.dialect import DialectTable

_SANE = re.compile(r"[!-~]{1,128}")


def request_id_of(scope: Scope) -> str:
    """Return the client's id if it is valid (1 to 128 visible ASCII characters, sent once), else a new one."""
    sent = Headers(scope=scope).getlist("x-request-id")
    return sent[0] if len(sent) == 1 and _SANE.fullmatch(sent[0]) else f"req_{secrets.token_hex(16)}"


class RequestId:
    """Middleware: sets `request.state.request_id` and adds it to the response.

    Args:
        app: The wrapped app.
        dialects: The dialects of the server.
        is_behind_proxy: Whether Serve's HTTP proxy adds the request's X-Request-Id to the response; the header is then
            added here only if the id differs.
    """

    def __init__(self, app: ASGIApp, dialects: DialectTable, is_behind_proxy: bool = False):
        self._app = app
        self._dialects = dialects
        self._is_behind_proxy = is_behind_proxy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        request_id = request_id_of(scope)
        scope["state"] = {**scope.get("state", {}), "request_id": request_id}
        is_sent_by_proxy = self._is_behind_proxy and Headers(scope=scope).get("x-request-id") == request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start" and not is_sent_by_proxy:
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            if message["type"] == "http.response.start":
                for name in self._dialects.of(scope["path"]).id_headers:
                    MutableHeaders(scope=message)[name] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)
