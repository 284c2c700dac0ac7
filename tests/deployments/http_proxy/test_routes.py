"""The attributes that ServeRoutes reads from Ray's own proxy, route table and routers; it fails when Ray changes them.

Over HTTP the same is seen in tests/e2e: a server that starts answers 503 from its first moment on.
"""

import asyncio
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentID, EndpointInfo
from ray.serve._private.http_util import _apply_middlewares
from ray.serve._private.proxy import HTTPProxy
from ray.serve._private.proxy_router import ProxyRouter
from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve._private.router import AsyncioRouter, CurrentLoopRouter, SingletonThreadRouter
from ray.serve.handle import DeploymentHandle

from deployments.http_proxy import CALLBACK, HOOK, is_guarded
from deployments.http_proxy.routes import ServeRoutes
from deployments.serve_run.environment import DEFAULTS
from tests.deployments.calls.test_router import FakeReplica, make_router

INGRESS = DeploymentID(name="Ingress", app_name="orchard")


class Proxy:
    """The attributes of HTTPProxy that ServeRoutes needs, around a real route table."""

    def __init__(self, handle: Any):
        self.proxy_router = ProxyRouter(lambda endpoint, info: handle)

    def deploy(self) -> None:
        self.proxy_router.update_routes({INGRESS: EndpointInfo(route="/", app_is_cross_language=False)})


def test_server_is_starting_until_its_first_ingress_has_run():
    async def go() -> None:
        router = make_router(PowerOfTwoChoicesRequestRouter, [])
        handle: Any = SimpleNamespace(_router=SimpleNamespace(_asyncio_router=SimpleNamespace()), has_had=False)
        handle.running_replicas_populated = lambda: handle.has_had
        proxy: Any = Proxy(handle)
        routes = ServeRoutes(_apply_middlewares(proxy, []))
        assert routes.is_starting("/v1/models")
        proxy.deploy()
        assert routes.is_starting("/v1/models")
        handle.has_had = True
        assert not routes.is_starting("/v1/models")
        assert not routes.has_no_replica("/v1/models"), "it is not known"
        handle._router._asyncio_router = SimpleNamespace(_request_router=None, _running_replicas=["one"])
        assert not routes.has_no_replica("/v1/models")
        handle._router._asyncio_router._running_replicas = []
        assert routes.has_no_replica("/v1/models")
        handle._router._asyncio_router._request_router = router
        assert routes.has_no_replica("/v1/models")
        router.update_replicas([FakeReplica("a", "node-0")])
        assert not routes.has_no_replica("/v1/models")

    asyncio.run(go())


def test_objects_of_ray_have_the_attributes_that_orchard_reads():
    assert "self.proxy_router = proxy_router" in inspect.getsource(HTTPProxy.__mro__[1].__init__)
    assert callable(DeploymentHandle.running_replicas_populated)
    assert "self._router" in inspect.getsource(DeploymentHandle.__mro__[1].running_replicas_populated)
    for router in (CurrentLoopRouter, SingletonThreadRouter):
        assert "self._asyncio_router" in inspect.getsource(router.__init__)
    written = inspect.getsource(AsyncioRouter.__init__)
    assert "self._request_router:" in written and "self._running_replicas:" in written


def test_requests_without_a_route_table_are_not_refused():
    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    routes = ServeRoutes(app)
    assert not routes.is_starting("/") and not routes.has_no_replica("/")


def test_launcher_installs_the_proxy_middleware_unless_the_operator_sets_another(monkeypatch: pytest.MonkeyPatch):
    assert {default.name: default.value for default in DEFAULTS}[HOOK] == CALLBACK
    assert is_guarded(), "orchard_launch.pth has set it in this process"
    monkeypatch.setenv(HOOK, "mine:middlewares")
    assert not is_guarded()
