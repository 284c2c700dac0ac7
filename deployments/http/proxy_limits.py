"""How the ingress tells Serve's HTTP proxy the limits that the configuration gives it.

The proxies start before any application and on every node, so that neither the arguments of the application nor the
file of one node's command line reach them. They announce themselves in the ASGI scope, where no client can write, and
learn the limits from a header of a response, which they take away: after the first response on every node, and again
after a deployment that changes them.
"""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.http.unread_bodies import BodyLimits

EXTENSION = "orchard.proxy"
"""Key in the scope's `extensions`; its value is the JSON of the limits that the proxy uses."""

HEADER = "x-orchard-proxy-limits"


@dataclass(frozen=True)
class ProxyLimits:
    """See HttpConfig; the defaults hold in a proxy that has not heard from an ingress yet."""

    body: BodyLimits = field(default_factory=BodyLimits)
    send_timeout_s: float = 60.0  # in which a client must take what waits for it

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "ProxyLimits":
        found: dict[str, Any] = json.loads(text)
        return cls(body=BodyLimits(**found["body"]), send_timeout_s=found["send_timeout_s"])


class TellProxy:
    """Middleware: sends the limits to a proxy that uses others."""

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
