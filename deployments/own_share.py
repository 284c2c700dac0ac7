"""Which engine of its node a replica is. The kernel frees the number when the process ends, however it ends."""

import asyncio
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import ray

from deployments.autoscaling import engines_by_node
from deployments.process import node_id
from engine.errors import EngineFailed
from engine.node_share import NodeShare
from engine.process_lock import LockHeld, ProcessLock, holder_of

WAIT_S = 20.0
"""Wait for the number of an engine that is shutting down, as when a replica is replaced."""

LOOK_S = 0.2

OLD_S = 24 * 3600.0
"""Age from which the file of a number that no process has is removed."""


async def claim_share(num_without_resources: int) -> tuple[NodeShare, ProcessLock | None]:
    """Return which of its node's engines this process is, and the lock that keeps the number, None for the only one.

    Args:
        num_without_resources: See autoscaling.engines_by_node.

    Raises:
        EngineFailed: The node has all its engines already, or the file of a number cannot be written.
    """
    if not ray.is_initialized():  # Serve's local testing mode
        return NodeShare(), None
    own = node_id()
    num_engines = (await asyncio.to_thread(engines_by_node, num_without_resources)).get(own, 1)
    if num_engines == 1:
        return NodeShare(), None
    _remove_old_files()
    until_s = time.monotonic() + WAIT_S
    while True:
        holders = []
        for number in range(num_engines):
            try:
                return NodeShare(number, num_engines), ProcessLock(_path(own, number))
            except LockHeld as held:
                holders.append(f"{number} in {held.holder}")
            except OSError as error:
                raise EngineFailed(
                    f"the number of this engine cannot be taken: {_path(own, number)} cannot be written ({error}). "
                    "Make it and its directory writable"
                ) from None
        if time.monotonic() >= until_s:
            break
        await asyncio.sleep(LOOK_S)
    raise EngineFailed(
        f"node {own} has had its {num_engines} engines for {WAIT_S:g} s: {'; '.join(holders)}. Stop those that are "
        "left over, or let the node offer more of the resource `mlx`"
    )


def _remove_old_files() -> None:
    """Remove the files of earlier nodes, each of which has another id. Files in use are kept, and those of today."""
    for path in Path(tempfile.gettempdir()).glob(_name("*", "*")):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > OLD_S and holder_of(path) is None:
                path.unlink()


def _path(node_id: str, number: int) -> Path:
    return Path(tempfile.gettempdir()) / _name(node_id, number)


def _name(node_id: str, number: object) -> str:
    return f"orchard-engine-{node_id}-{number}.lock"
