"""The private and alpha names of Ray that deployments/ray_internals.py and the router use."""

import importlib
import inspect
from typing import Any, NamedTuple

from ray.serve import context as serve_context
from ray.serve import handle as serve_handle
from ray.serve._private import common, handle_options, replica, router
from ray.serve._private.replica_result import ReplicaResult
from ray.serve.request_router import LocalityMixin, RequestRouter, RunningReplica

from deployments.ray_internals import ALL_ADDRESSES


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
