"""What every replica does with its own process: says where it is, and keeps refused requests short in the log."""

import logging
import os
import sys
from typing import Any

import psutil
import ray
from ray import serve

from deployments.ray_seams import num_ongoing_requests, num_reserved_slots
from engine.protocol import Cancelled, InvalidRequest, Overloaded, Unavailable


def node_id() -> str:
    """The Ray node that this process runs on, '' without Ray."""
    return ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""


def in_replica() -> bool:
    """False outside of Serve, and in its local testing mode."""
    return ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None


def replica_info() -> dict[str, Any]:
    """For `/v1/status`: where the replica is, how much memory its process holds, and whether MLX is in it.

    num_ongoing_requests: calls that run in it, the question for its status included. num_reserved_slots: reservations
    for calls that are still to come.
    """
    return {
        "node_id": node_id(),
        "replica_id": serve.get_replica_context().replica_id.unique_id,
        "pid": os.getpid(),
        "rss_bytes": psutil.Process().memory_info().rss,
        "has_mlx": "mlx.core" in sys.modules,
        "num_ongoing_requests": num_ongoing_requests(),
        "num_reserved_slots": num_reserved_slots(),
    }


class _OneLine(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, InvalidRequest | Overloaded | Unavailable | Cancelled):
            record.msg, record.args, record.exc_info = "Request refused: %s", (error,), None
            record.levelno, record.levelname = logging.INFO, "INFO"
        return True


def log_refusals_in_one_line() -> None:
    """Serve logs all that a replica raises with its traceback, also where the caller is at fault, the queue full, or
    the engine not to be had for a while."""
    logging.getLogger("ray.serve").addFilter(_OneLine())
