"""ServeRoutes: tells whether Serve's HTTP proxy has a replica for a request.

The proxy has no interface for this: it answers 404 while no application is deployed, and a request waits without limit
while an application has no ingress. This module reads private attributes of Ray 2.60.0 (ray/serve/_private/proxy.py,
proxy_router.py, router.py); tests/deployments/http_proxy/test_routes.py fails when they are missing. Without them the
proxy behaves like Serve's own.
"""

import logging
from typing import Any

from starlette.types import ASGIApp

log = logging.getLogger("ray.serve")


class ServeRoutes:
    """The route table of a proxy.

    Args:
        app: Serve's HTTPProxy inside its own middleware.
    """

    def __init__(self, app: ASGIApp):
        self._router = _proxy_router(app)
        if self._router is None:
            log.warning("Orchard's proxy guard finds no route table in this version of Serve: requests are not refused "
                        "while no ingress runs")  # fmt: skip

    def is_starting(self, path: str) -> bool:
        """Tell whether no application is deployed, or this path's has had no ingress since the proxy started."""
        if self._router is None:
            return False
        if not self._router.endpoints:
            return True
        handle = self._handle(path)
        return handle is not None and not handle.running_replicas_populated()

    def has_no_replica(self, path: str) -> bool:
        """Tell whether the application for this path has no ingress now."""
        replicas = _running_replicas(self._handle(path))
        return replicas is not None and not replicas

    def _handle(self, path: str) -> Any | None:
        matched = self._router.match_route(path) if self._router is not None else None
        return matched[1] if matched is not None else None


def _proxy_router(app: Any) -> Any | None:
    while not hasattr(app, "proxy_router"):
        app = getattr(app, "_app", None)
        if app is None:
            return None
    return app.proxy_router


def _running_replicas(handle: Any | None) -> Any | None:
    """Return a sized collection of the running replicas; None if unknown."""
    router = getattr(getattr(handle, "_router", None), "_asyncio_router", None)
    chosen_from = getattr(router, "_request_router", None)
    if chosen_from is None:
        return getattr(router, "_running_replicas", None)  # before the first request
    return getattr(chosen_from, "curr_replicas", None)
