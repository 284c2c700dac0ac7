"""What a caller tells the request router, and what the router answers when no replica may take the request.

Serve pickles the module of a request router by value, so that every handle has copies of that module's classes: what
both sides must recognise lies in this module.
"""

from dataclasses import dataclass

NODE_SESSION = "node:"
"""A handle with the session id of `pin_to` reaches the replica on that node, and no other."""

PIN_WAIT_S = 2.0
"""How long a pinned request waits for its node to have a replica, unless the pin says otherwise."""


class NoReplica(Exception):
    """No replica may take the request, and none is waited for any longer. The message says why."""


class NoReplicaYet(NoReplica):
    """The deployment has had no running replica since this router was made."""


class NoOtherReplica(NoReplica):
    """All running replicas are excluded."""


def pin_to(node_id: str, wait_s: float | None = None) -> str:
    """A session id that reaches the replica on that node.

    Args:
        wait_s: How long to wait for the node to have one, in seconds; then NoReplica is raised. None: PIN_WAIT_S.
    """
    return f"{NODE_SESSION}{node_id}" + ("" if wait_s is None else f"@{wait_s:g}")


@dataclass(frozen=True)
class Choice:
    """What a caller of `choose_replica(choice=...)` asks for, beside a pin."""

    excluded: frozenset[str] = frozenset()
    """Unique ids of replicas that must not be chosen."""
    last: frozenset[str] = frozenset()
    """Unique ids of replicas that are chosen only when no other has room."""
    waits: bool = True
    """Whether to wait for a new replica when all that run are excluded; otherwise NoOtherReplica is raised."""
