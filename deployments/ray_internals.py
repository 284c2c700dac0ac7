"""Every private or alpha name of Ray that the replicas use, and the check at start that this version of Ray has them.

Other modules call these functions. `REQUIRED` lists the names that they need, and
tests/deployments/test_ray_internals.py runs each function against Ray's own classes.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import ray
from ray._common.tls_utils import add_port_to_grpc_server
from ray.serve import context as serve_context
from ray.serve import handle as serve_handle
from ray.serve._private import common, handle_options, local_testing_mode, replica, router
from ray.serve._private.replica_result import ReplicaResult
from ray.serve.request_router import LocalityMixin, RequestRouter, RunningReplica

from engine.protocol import EngineFailed

ALL_ADDRESSES = "[::]:0"
"""Where Serve's replicas listen: any port of all addresses."""


class RayInternal(NamedTuple):
    """A name of Ray that must exist."""

    holder: Any
    """A class or module with this attribute, or a function whose code uses the name."""
    name: str

    @property
    def is_there(self) -> bool:
        if inspect.isfunction(self.holder):
            code = self.holder.__code__
            return self.name in (*code.co_names, *code.co_varnames, *code.co_consts)
        return hasattr(self.holder, self.name) or self.name in getattr(self.holder, "__dataclass_fields__", ())

    def __str__(self) -> str:
        path = self.holder.__name__ if inspect.ismodule(self.holder) else self.holder.__qualname__
        return f"{path}: {self.name}"


_raylet: Any = importlib.import_module("ray._raylet")
_response: Any = serve_handle._DeploymentResponseBase
_handle: Any = serve_handle._DeploymentHandleBase

REQUIRED: tuple[RayInternal, ...] = (
    # The secret of the exchange of snapshots.
    RayInternal(_raylet, "AuthenticationTokenLoader"),
    # NodeRouter: Ray's router chooses a replica in one method.
    RayInternal(RequestRouter, "_choose_replica_for_request"),
    RayInternal(router.AsyncioRouter._route_and_send_request_once, "_choose_replica_for_request"),
    RayInternal(RequestRouter._choose_replica_for_request, "is_retry"),
    RayInternal(RequestRouter, "curr_replicas"),
    RayInternal(RequestRouter, "update_replicas"),
    RayInternal(LocalityMixin.__init__, "_self_node_id"),
    # Calls: a response has the future of the sent call, which can be cancelled.
    RayInternal(_response.__init__, "_replica_result_future"),
    RayInternal(ReplicaResult, "cancel"),
    RayInternal(ReplicaResult, "get_async"),
    RayInternal(serve_handle.DeploymentBroadcastResponse, "_fetch_replica_results_async"),
    RayInternal(serve_handle.DeploymentHandle, "broadcast"),
    RayInternal(common.RequestMetadata, "session_id"),
    RayInternal(handle_options.DynamicHandleOptions, "_by_reference"),
    RayInternal(handle_options.DynamicHandleOptions, "response_serialization"),
    # The running replicas of a deployment, as this process knows them.
    RayInternal(_handle.__init__, "_router"),
    RayInternal(router.CurrentLoopRouter.__init__, "_asyncio_router"),
    RayInternal(router.SingletonThreadRouter.__init__, "_asyncio_router"),
    RayInternal(router.AsyncioRouter, "request_router"),
    RayInternal(RunningReplica, "replica_metadata"),
    RayInternal(replica, "RECORD_REPLICA_METADATA_METHOD"),
    # This process's own replica.
    RayInternal(replica.ReplicaActor.__init__, "_replica_impl"),
    RayInternal(replica.Replica.__init__, "_shutting_down"),
    RayInternal(replica.Replica, "get_num_ongoing_requests"),
    # The address at which this process's replica takes calls.
    RayInternal(replica.Replica._on_initialized, "add_port_to_grpc_server"),
    RayInternal(replica.Replica._on_initialized, ALL_ADDRESSES),
    # The id of the HTTP request that a call belongs to.
    RayInternal(serve_context, "_get_serve_request_context"),
    RayInternal(serve_context._RequestContext, "request_id"),
    # The Ingress builds its FastAPI app in the replica.
    RayInternal(replica, "SERVE_BUILD_ASGI_APP_METHOD"),
)


def check_ray(required: tuple[RayInternal, ...] = REQUIRED) -> None:
    """Raise EngineFailed if this version of Ray lacks a required name; the message lists all missing ones."""
    missing = [str(need) for need in required if not need.is_there]
    if missing:
        raise EngineFailed(
            f"Orchard does not support Ray {ray.__version__}: {len(missing)} of the {len(required)} internal names "
            f"that deployments/ray_internals.py uses are missing: {'; '.join(missing)}"
        )


def cancel_call(response: Any) -> None:
    """Cancel a call in any state. Ray's own `cancel()` misses a call that was sent but not read from yet."""
    sent = response._replica_result_future
    response.cancel()
    if sent.done() and not sent.cancelled() and sent.exception() is None:
        sent.result().cancel()


async def replica_calls(handle: Any, method: str, *args: Any) -> list[Any]:
    """Call a method of every running replica. Returns one `ReplicaResult` each, to be awaited with `answer_of`.

    Ray's own `results_async` loses all answers when one is late.
    """
    return await handle.broadcast(method, *args)._fetch_replica_results_async()


async def answer_of(call: Any) -> Any:
    """Wait for the answer of one `ReplicaResult` of `replica_calls`; raise the error of its call."""
    return await call.get_async()


class RunningNode(NamedTuple):
    """A node with a running replica of a deployment; both ids are '' in Serve's local testing mode."""

    node_id: str
    replica_id: str
    """Unique id of the replica."""
    metadata: dict[str, Any]
    """The result of the replica's `record_replica_metadata` at its start; {} without that method."""


LOCAL_NODE = RunningNode("", "", {})
"""The node of every deployment in Serve's local testing mode."""


def by_reference(deployment: Any) -> Any:
    """Make Serve send a deployment's class by its name, so that each node runs the class of its own sources.

    The module's name of the class is that of the Deployment, so that cloudpickle would send the class of the head's
    sources as code, to run with the modules of the node's.
    """
    deployment.func_or_class.__qualname__ = f"{deployment.name}.func_or_class"
    return deployment


def running_replicas(handle: Any) -> Mapping[Any, Any] | None:
    """Return a deployment's running replicas, as this process knows them; None if it does not know.

    It is the router's own mapping, which another thread may change: replicas leave it, and a new one takes its place
    when others have joined.
    """
    outer = getattr(handle, "_router", None)
    inner = getattr(outer, "_asyncio_router", None)
    request_router = getattr(inner, "request_router", None)
    return None if request_router is None else request_router.curr_replicas


def running_nodes(handle: Any) -> list[RunningNode] | None:
    """Return the nodes of a deployment's running replicas, as this process knows them; None if it does not know."""
    if isinstance(getattr(handle, "_router", None), local_testing_mode.LocalRouter):
        return [LOCAL_NODE]
    if (replicas := running_replicas(handle)) is None:
        return None
    return [
        RunningNode(replica.node_id, replica.replica_id.unique_id, replica.replica_metadata)
        for replica in list(replicas.values())
    ]


def own_replica() -> Any:
    """Return Ray's object of this process's replica. Raises EngineFailed if it has not the expected attributes."""
    from ray._private.worker import global_worker as worker

    found = getattr(worker.actors.get(worker.actor_id), "_replica_impl", None)
    if not isinstance(getattr(found, "_shutting_down", None), bool):
        raise EngineFailed(
            f"Orchard does not support Ray {ray.__version__}: the replica has no flag _shutting_down, which tells that "
            "Serve stops it (deployments/ray_internals.py)"
        )
    return found


def stop_flag() -> Callable[[], bool]:
    """Return a function that tells whether Serve has begun to stop this replica. Raises EngineFailed."""
    found = own_replica()
    return lambda: found._shutting_down


def num_ongoing_requests() -> int:
    """Return the number of running calls, the current one included."""
    return own_replica().get_num_ongoing_requests()


def listen_on_node_address() -> None:
    """Make this process's replica take calls at its node's address alone, where the others of the graph call it.

    On a server of one machine that is the loopback address, which no firewall asks about. It must be called by the
    constructor of the deployment, before the replica begins to listen.
    """
    if not ray.is_initialized():  # Serve's local testing mode
        return
    host = ray.util.get_node_ip_address()
    listen, address = add_port_to_grpc_server, f"[{host}]:0" if ":" in host else f"{host}:0"
    own: Any = replica
    own.add_port_to_grpc_server = lambda server, given: listen(server, address if given == ALL_ADDRESSES else given)


def cluster_token() -> str:
    """Return the token by which the cluster's processes authenticate; '' if Ray runs without token authentication."""
    return _raylet.AuthenticationTokenLoader.instance().get_raw_token()


def http_request_id() -> str:
    """Return the X-Request-ID of the HTTP request that the current task belongs to; '' outside of one."""
    return serve_context._get_serve_request_context().request_id
