"""ProxyLimits: the limits for Serve's HTTP proxies, and how the ingress sends them.

The proxies start before any application and on every node, so the application's arguments do not reach them. A proxy
announces the limits that it uses in the ASGI scope, which clients cannot write to. If they differ from the configured
ones, the ingress sends the new limits in a response header, which the proxy removes.
"""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.http.unread_bodies import BodyLimits

EXTENSION = "orchard.proxy"
"""Key in the scope's `extensions`; its value is the proxy's limits as JSON."""

HEADER = "x-orchard-proxy-limits"


@dataclass(frozen=True)
class ProxyLimits:
    """The limits of a proxy, see HttpConfig; the defaults hold until the first response of an ingress."""

    body: BodyLimits = field(default_factory=BodyLimits)
    send_timeout_s: float = 60.0
    """Time in which a client must read pending data."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "ProxyLimits":
        found: dict[str, Any] = json.loads(text)
        return cls(body=BodyLimits(**found["body"]), send_timeout_s=found["send_timeout_s"])


class TellProxy:
    """Middleware of the ingress: sends the limits to a proxy that uses different ones."""

    def __init__(self, app: ASGIApp, limits: ProxyLimits):
        self._app = app
        self._told = limits.to_json()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        used = scope.get("extensions", {}).get(EXTENSION)
        if used is None or used == self._told:
            return await self._app(scope, receive, send)

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = self._told
            await send(message)

        await self._app(scope, receive, send_with_limits)
