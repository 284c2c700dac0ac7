"""Every private or alpha name of Ray that the replicas use. Other modules call these functions.

tests/deployments/ray_names.py lists the names that they need, and test_ray_internals.py beside it runs each function
against Ray's own classes.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import ray
from ray._common.tls_utils import add_port_to_grpc_server
from ray.serve import context as serve_context
from ray.serve._private import local_testing_mode, replica

from deployments.engine_ids import routing_id
from engine.errors import EngineFailed

ALL_ADDRESSES = "[::]:0"
"""Where Serve's replicas listen: any port of all addresses."""


_raylet: Any = importlib.import_module("ray._raylet")

RAY_VERSION = "2.60.0"
"""The version of Ray whose private names these functions use."""


def check_ray() -> None:
    """Raise EngineFailed for another version of Ray, which may lack a name or mean something else by it."""
    if ray.__version__ != RAY_VERSION:
        raise EngineFailed(
            f"Orchard uses private names of Ray {RAY_VERSION}, and this is Ray {ray.__version__}. Install "
            f"ray[serve]=={RAY_VERSION}, which `uv sync` does"
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
    """For an engine this is the engine's id, see engine_ids.py."""
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
        RunningNode(
            routing_id(replica.node_id, replica.replica_metadata),
            replica.replica_id.unique_id,
            replica.replica_metadata,
        )
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
