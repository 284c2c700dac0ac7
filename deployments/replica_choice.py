"""Arguments that a caller passes to the request router, and the errors with which the router refuses.

Serve pickles the module of a request router by value, so every handle has copies of that module's classes. Classes
that both sides must recognise are therefore in this module.
"""

from dataclasses import dataclass

NODE_SESSION = "node:"
"""Prefix of a session id that pins a call to the replica on one node, see `pin_to`."""

QUESTION_SESSION = "question:"
"""Prefix of a session id that sends a call to the replica on one node at once, however busy it is, see `ask_node`."""

PIN_WAIT_S = 2.0
"""Default time in which a pinned request waits for a replica on its node."""


class NoReplica(Exception):
    """No replica may take the request, and the wait for one is over. The message says why."""


class NoReplicaYet(NoReplica):
    """The deployment has had no running replica since this router was created."""


class NoOtherReplica(NoReplica):
    """All running replicas are excluded."""


def pin_to(node_id: str, wait_s: float | None = None) -> str:
    """Return the session id that pins a call to the replica on a node.

    Args:
        node_id: Ray node id.
        wait_s: Longest wait for a replica on the node, after which NoReplica is raised. None: PIN_WAIT_S.
    """
    return f"{NODE_SESSION}{node_id}" + ("" if wait_s is None else f"@{wait_s:g}")


def ask_node(node_id: str) -> str:
    """Return the session id of a short question to the replica on a node, which waits neither for room nor for it."""
    return f"{QUESTION_SESSION}{node_id}"


@dataclass(frozen=True)
class Choice:
    """Preferences of a caller of `choose_replica(choice=...)`, in addition to a pin."""

    excluded: frozenset[str] = frozenset()
    """Unique ids of replicas that must not be chosen."""
    last: frozenset[str] = frozenset()
    """Unique ids of replicas that are chosen only if no other one has a free slot."""
    node_id: str | None = None
    """The node whose replica is chosen if it has one that is not excluded."""
    waits: bool = True
    """Whether to wait for a new replica if all running ones are excluded, instead of raising NoOtherReplica."""
