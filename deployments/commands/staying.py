"""stay: what `orchard join --stay` does once its machine has joined: wait, so that a service can run a member."""

import argparse
import signal
import time
from collections.abc import Callable
from types import FrameType

from deployments.cluster.folder import ClusterFolder
from deployments.cluster.membership import FILE, read_membership
from deployments.commands import leave
from deployments.commands.output import say

POLL_S = 1.0
LEAVE_S = 20.0
"""Longest time for snapshots to move when the service is stopped."""


def stay(folder: ClusterFolder, leave_cluster: Callable[[], object], poll_s: float = POLL_S) -> int:
    """Wait as long as this machine belongs to a cluster. On SIGTERM and SIGINT it leaves.

    Args:
        folder: Of the cluster.
        leave_cluster: Makes this machine leave.
        poll_s: Seconds between two looks at the member's processes.

    Returns:
        Exit status: 0 once the machine has left, 1 if the member's processes have ended without that.
    """
    asked: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    earlier = {one: signal.signal(one, ask) for one in (signal.SIGTERM, signal.SIGINT)}
    try:
        while not asked and read_membership(folder) is not None:
            time.sleep(poll_s)  # a signal does not cut it short
        if not asked:
            has_left = not (folder.path / FILE).exists()
            say("This machine has left the cluster." if has_left else "The member's processes have ended.")
            return 0 if has_left else 1
        leave_cluster()
        return 0
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def leave_at_stop(key: str | None) -> None:
    """Leave as `orchard leave` does, with LEAVE_S for snapshots, and also if the answers cannot be moved."""
    leave.run(argparse.Namespace(force=True, forget=False, deadline=LEAVE_S, key=key))
