"""The process of a replica: its identity and resources for `/v1/status`."""

import os
import sys
from typing import Any

import psutil
import ray
from ray import serve

from deployments.ray_internals import num_ongoing_requests


def node_id() -> str:
    """Return the id of this process's Ray node; '' without Ray."""
    return ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""


def in_replica() -> bool:
    """Tell whether this process is a replica; False outside Serve and in its local testing mode."""
    return ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None


def replica_info() -> dict[str, Any]:
    """Return this replica's entry of `/v1/status`: its place, the memory of its process, and whether it loaded MLX.

    num_ongoing_requests counts running calls, the status call included.
    """
    return {
        "node_id": node_id(),
        "replica_id": serve.get_replica_context().replica_id.unique_id,
        "pid": os.getpid(),
        "rss_bytes": psutil.Process().memory_info().rss,
        "has_mlx": "mlx.core" in sys.modules,
        "num_ongoing_requests": num_ongoing_requests(),
    }
