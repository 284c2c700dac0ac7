"""Which engine of its node a replica is. The kernel frees the number when the process ends, however it ends."""

import asyncio
import tempfile
from pathlib import Path

import ray

from deployments.autoscaling import engines_by_node
from deployments.process import node_id
from engine.node_share import NodeShare
from engine.process_lock import LockHeld, ProcessLock
from engine.protocol import EngineFailed

WAIT_S = 20.0
"""Wait for the number of an engine that is shutting down, as when a replica is replaced."""

LOOK_S = 0.2


async def claim_share(num_without_resources: int) -> tuple[NodeShare, ProcessLock | None]:
    """Return which of its node's engines this process is, and the lock that keeps the number, None for the only one.

    Args:
        num_without_resources: See autoscaling.engines_by_node.

    Raises:
        EngineFailed: The node has all its engines already.
    """
    if not ray.is_initialized():  # Serve's local testing mode
        return NodeShare(), None
    own = node_id()
    num_engines = (await asyncio.to_thread(engines_by_node, num_without_resources)).get(own, 1)
    if num_engines == 1:
        return NodeShare(), None
    for _ in range(int(WAIT_S / LOOK_S)):
        for number in range(num_engines):
            try:
                return NodeShare(number, num_engines), ProcessLock(_path(own, number))
            except LockHeld:
                continue
        await asyncio.sleep(LOOK_S)
    raise EngineFailed(f"node {own} has its {num_engines} engines already, in other processes")


def _path(node_id: str, number: int) -> Path:
    return Path(tempfile.gettempdir()) / f"orchard-engine-{node_id}-{number}.lock"
