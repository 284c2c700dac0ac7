"""Each function of ray_internals against Ray's own classes: a Ray that does it in another way is found out here."""

import asyncio
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import psutil
import pytest
from ray.serve._private import replica as ray_replica
from ray.serve._private import router as ray_router
from ray.serve._private.common import DeploymentHandleSource, RequestMetadata
from ray.serve._private.replica import SERVE_BUILD_ASGI_APP_METHOD
from ray.serve.handle import DeploymentResponseGenerator

from deployments import ray_internals
from deployments.calls.router import NodeRouter
from deployments.ingress import Ingress
from deployments.ray_internals import (
    RAY_VERSION,
    RunningNode,
    answer_of,
    cancel_call,
    check_ray,
    listen_on_node_address,
    replica_calls,
    running_nodes,
)
from engine.errors import EngineFailed
from tests.deployments.calls.test_router import DEPLOYMENT, FakeReplica, make_router
from tests.deployments.fake_handle import FakeCall, FakeHandle
from tests.deployments.ray_names import REQUIRED, RayInternal

METADATA = RequestMetadata(request_id="r", internal_request_id="i", is_streaming=True)


class Sent:
    """A call on its way to a replica, as Ray's router keeps it."""

    def __init__(self) -> None:
        self.is_cancelled = False

    def add_done_callback(self, callback: Callable[[Any], None]) -> None: ...

    def cancel(self) -> None:
        self.is_cancelled = True

    async def get_rejection_response(self) -> Any:
        await asyncio.sleep(0)
        return SimpleNamespace(accepted=True, num_ongoing_requests=1)


class Replica(FakeReplica):
    """One that keeps the calls that are sent to it."""

    actor_id = None
    is_cross_language = False
    availability_zone = None
    _replica_info = SimpleNamespace(node_ip="127.0.0.1", port=1)

    def __init__(self, name: str = "a", node_id: str = "node-0"):
        super().__init__(name, node_id)
        self.replica_metadata = {"model": "demo"}
        self.sent: list[Sent] = []

    def try_send_request(self, request: Any, with_rejection: bool) -> Sent:
        self.sent.append(Sent())
        return self.sent[-1]


class NoLongPoll:
    """The controller, of which nothing is heard."""

    def __init__(self, *args: Any, **kwargs: Any): ...

    @classmethod
    def get_or_create(cls, *args: Any) -> "NoLongPoll":
        return cls()

    def register(self, router: Any) -> None: ...


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[[Replica], Any]:
    """Ray's own router on a running event loop, without a controller."""
    monkeypatch.setattr(ray_router, "LongPollClient", NoLongPoll)
    monkeypatch.setattr(ray_router, "SharedRouterLongPollClient", NoLongPoll)

    def make(replica: Replica) -> Any:
        router = ray_router.CurrentLoopRouter(
            controller_handle=None,
            deployment_id=DEPLOYMENT,
            handle_id="h",
            self_actor_id="a",
            handle_source=DeploymentHandleSource.REPLICA,
            enable_strict_max_ongoing_requests=True,
            node_id="node-0",
            availability_zone=None,
            prefer_local_node_routing=False,
            request_router=make_router(NodeRouter, [replica]),
        )
        router._asyncio_router._request_router_initialized.set()
        return router

    return make


@pytest.mark.parametrize("num_turns", [0, 1, 5])
def test_call_that_was_never_read_is_cancelled(make: Callable[[Replica], Any], num_turns: int):
    """num_turns: of the event loop between call and cancel; Ray sends a call in a task of its own."""

    async def go() -> tuple[list[bool], list[bool]]:
        replica = Replica()
        router = make(replica)
        response = DeploymentResponseGenerator(router.assign_request(METADATA), METADATA, False)
        for _ in range(num_turns):
            await asyncio.sleep(0)
        response.cancel()
        by_ray = [call.is_cancelled for call in replica.sent]
        cancel_call(response)
        for _ in range(5):
            await asyncio.sleep(0)
        return by_ray, [call.is_cancelled for call in replica.sent]

    by_ray, both = asyncio.run(go())
    assert all(both) and len(both) == (num_turns > 0)
    if num_turns == 5:
        assert by_ray == [False], "if it is cancelled, Ray's own cancel is enough"


def test_running_nodes_are_the_nodes_of_the_routers_replicas(make: Callable[[Replica], Any]):
    async def go() -> Any:
        handle = SimpleNamespace(_router=make(Replica(node_id="node-7")))
        return running_nodes(handle), running_nodes(SimpleNamespace())

    assert asyncio.run(go()) == ([RunningNode("node-7", "a", {"model": "demo"})], None)


def test_broadcast_has_an_answer_from_each_replica():
    class Handle(FakeHandle):
        async def results(self, method: str, *arguments: Any) -> list[Any]:
            assert (method, arguments) == ("status", (1,))
            return [FakeCall(42), FakeCall(42)]

    async def go() -> list[Any]:
        return [await answer_of(call) for call in await replica_calls(Handle(), "status", 1)]

    assert asyncio.run(go()) == [42, 42]


def test_the_ingress_builds_its_app_where_ray_looks_for_it():
    assert hasattr(Ingress.func_or_class, SERVE_BUILD_ASGI_APP_METHOD)


@pytest.mark.parametrize("need", REQUIRED, ids=str)
def test_ray_has_each_required_name(need: RayInternal):
    assert need.is_there


def test_a_missing_a_renamed_and_a_moved_name_are_noticed():
    def changed(self: Any) -> None:
        """A method of Ray that no longer uses the names that it did."""

    gone = RayInternal(FakeReplica, "_gone"), RayInternal(changed, "_renamed"), RayInternal(ray_internals, "_moved")
    assert not any(need.is_there for need in gone)


def test_another_version_of_ray_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch):
    check_ray()
    monkeypatch.setattr(ray_internals.ray, "__version__", "2.61.0")
    with pytest.raises(EngineFailed, match=rf"Ray {re.escape(RAY_VERSION)}, and this is Ray 2\.61\.0"):
        check_ray()


def test_the_supported_version_of_ray_is_the_one_that_is_installed_with_orchard():
    pyproject = tomllib.loads((Path(ray_internals.__file__).parents[1] / "pyproject.toml").read_text())
    assert f"ray[serve]=={RAY_VERSION}" in pyproject["project"]["dependencies"]


def test_requests_and_stop_flag_are_read_from_the_replica_object_of_ray(monkeypatch: pytest.MonkeyPatch):
    class OwnReplica:
        _shutting_down = False

        def get_num_ongoing_requests(self) -> int:
            return 5

    actor = SimpleNamespace(_replica_impl=OwnReplica())
    monkeypatch.setattr("ray._private.worker.global_worker", SimpleNamespace(actor_id=7, actors={7: actor}))
    assert ray_internals.num_ongoing_requests() == 5
    assert ray_internals.stop_flag()() is False


def test_a_replica_listens_at_the_address_of_its_node_alone(monkeypatch: pytest.MonkeyPatch):
    serving: Any = ray_replica
    monkeypatch.setattr(serving, "add_port_to_grpc_server", serving.add_port_to_grpc_server)
    monkeypatch.setattr(ray_internals.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray_internals.ray.util, "get_node_ip_address", lambda: "127.0.0.1")

    async def addresses() -> set[str]:
        server = grpc.aio.server()
        port = serving.add_port_to_grpc_server(server, ray_internals.ALL_ADDRESSES)
        await server.start()
        found = {c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.laddr.port == port}
        await server.stop(None)
        return found

    assert asyncio.run(addresses()) == {"::"}
    listen_on_node_address()
    assert asyncio.run(addresses()) <= {"127.0.0.1", "::ffff:127.0.0.1"}
