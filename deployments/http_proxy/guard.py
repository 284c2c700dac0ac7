"""ProxyGuard: ASGI middleware in the process of Serve's HTTP proxy, for limits that only the proxy can enforce.

Serve calls `middlewares` when a proxy starts (its documented hook, RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH). The
ingress applies the same body limits, so without this module everything but the connections is still bounded.
"""

import asyncio
import logging

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.http.dialects import DIALECTS
from deployments.http.error_map import ErrorMap
from deployments.http.proxy_limits import EXTENSION, HEADER, ProxyLimits
from deployments.http.request_id import request_id_of
from deployments.http.timeline import ARRIVED_HEADER, arrival_header
from deployments.http.unread_bodies import UnreadBodies
from deployments.http_proxy.protocol import use_guarded_protocol
from deployments.http_proxy.routes import ServeRoutes
from deployments.serve_log import join_serve_log
from engine import retry_after
from engine.errors import OrchardError, Unavailable

log = logging.getLogger("ray.serve")

BRIDGE_S = 10.0
"""Longest wait of a request, before its body is read, for an ingress that is being replaced."""

POLL_S = 0.1


_SERVE_PREFIX = "/-/"
"""Serve's own health and route pages."""


def middlewares() -> list[Middleware]:
    """Return the middleware for Serve's HTTP proxy, install the guarded HTTP protocol, and join Serve's log."""
    join_serve_log()
    state = ProxyState()
    use_guarded_protocol(lambda: state.limits.send_timeout_s)
    return [Middleware(ProxyGuard, state=state)]


class ProxyState:
    """State that all requests of one proxy share: the limits and the arriving bodies."""

    def __init__(self, limits: ProxyLimits | None = None):
        self.limits = limits or ProxyLimits()
        self.bodies = UnreadBodies(self.limits.body)

    def use(self, limits: ProxyLimits) -> None:
        """Apply new limits, also to bodies that are arriving."""
        self.limits = limits
        self.bodies.limits = limits.body


class ProxyGuard:
    """Middleware around Serve's HTTP proxy.

    * Without an ingress a request gets a 503 with Retry-After: at once while the server starts, after BRIDGE_S while an
      ingress is being replaced. Serve itself would answer 404 in the first case and wait without limit in the second.
    * Bodies are bounded (see UnreadBodies) before the proxy buffers them.
    * Each response has exactly one X-Request-ID, a valid one.
    * If the ingress dies before it answers, the client gets a 503 with an error body instead of a plain 500.
    """

    def __init__(self, app: ASGIApp, state: ProxyState, bridge_s: float = BRIDGE_S):
        self._app = app
        self._state = state
        self._bridge_s = bridge_s
        self._routes = ServeRoutes(app)
        self._errors = ErrorMap(DIALECTS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(_SERVE_PREFIX):
            return await self._app(scope, receive, send)
        request_id = request_id_of(scope)
        headers = MutableHeaders(scope=scope)
        headers["x-request-id"] = request_id
        headers[ARRIVED_HEADER] = arrival_header()
        del headers["x-request-disconnect-disabled"]  # a disconnected client must not keep its rows
        scope["extensions"] = {**scope.get("extensions", {}), EXTENSION: self._state.limits.to_json()}
        exchange = Exchange(self._state, request_id, receive, send)
        try:
            await self._wait_for_ingress(scope["path"])
            await exchange.run(self._app, scope)
        except OrchardError as error:
            exchange.error = error
        except Exception:
            log.exception("request %s failed in the HTTP proxy", request_id, extra={"request_id": request_id})
        if exchange.left and not exchange.is_started:
            log.info("request %s: %s", request_id, exchange.left, extra={"request_id": request_id})
        elif not exchange.is_started:
            error = exchange.error or Unavailable(
                "The process that handled the request was lost. Please send the request again.",
                retry_after.PROCESS_LOST_S,
            )
            await self._errors.response(error, request_id, scope)(scope, receive, exchange.send)

    async def _wait_for_ingress(self, path: str) -> None:
        """Wait up to BRIDGE_S for an ingress for this path. Raises Unavailable."""
        if self._routes.is_starting(path):
            raise Unavailable("The server is starting: it accepts no requests yet.", retry_after.NOT_READY_S)
        waited_s = 0.0
        while self._routes.has_no_replica(path):
            if waited_s >= self._bridge_s:
                raise Unavailable(
                    f"The server is being deployed: no ingress was available within {waited_s:.0f} s.",
                    retry_after.NOT_READY_S,
                )
            await asyncio.sleep(POLL_S)
            waited_s += POLL_S


class Exchange:
    """One request and its response passing through the proxy.

    Attributes:
        error: Reason why the proxy ended the request; None if it did not.
        is_started: Whether a response has started.
        left: When the client disconnected, and what was done, for the log; None if it did not.
    """

    def __init__(self, state: ProxyState, request_id: str, receive: Receive, send: Send):
        self.error: OrchardError | None = None
        self.left: str | None = None
        self.is_started = self._is_reading = False
        self._state = state
        self._request_id = request_id
        self._receive = receive
        self._send = send

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        """Call the app with a bounded body. Raises what UnreadBodies.enter raises."""
        if not _has_body(scope):
            return await app(scope, self._receive_or_leave, self.send)
        with self._state.bodies.enter(scope) as body:
            self._is_reading = True

            async def receive() -> Message:
                """Report a body that exceeds a limit as a client disconnect, which ends the request in the app."""
                if not self._is_reading:
                    return await self._receive_or_leave()
                try:
                    message = await body.receive(self._receive_or_leave)
                except OrchardError as error:
                    self.error = error
                    return {"type": "http.disconnect"}
                self._is_reading = message.get("more_body", False)
                return message

            await app(scope, receive, self.send)

    async def _receive_or_leave(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" and self.left is None:
            did = (
                "while its body arrived; it was not started" if self._is_reading else "before its answer; it was ended"
            )
            self.left = f"the client disconnected {did}"
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.is_started = True
            headers = MutableHeaders(scope=message)
            if (told := headers.get(HEADER)) is not None:
                self._state.use(ProxyLimits.from_json(told))
                del headers[HEADER]
            del headers["x-request-id"]
            headers["X-Request-ID"] = self._request_id
        await self._send(message)


def _has_body(scope: Scope) -> bool:
    headers = Headers(scope=scope)
    return "transfer-encoding" in headers or headers.get("content-length", "0").strip("0") != ""
