"""The session id by which a caller names the node of a call, and the errors of a call that finds no replica.

Serve pickles the module of a request router by value, so every handle has copies of that module's classes. Classes
that both sides must recognise are therefore in this module.
"""

NODE_SESSION = "node:"
"""Prefix of a session id that pins a call to the replica on one node, see `pin_to`."""

PIN_WAIT_S = 2.0
"""Default time in which a pinned call waits for a replica on its node."""


class NoReplica(Exception):
    """No replica may take the request, and the wait for one is over. The message says why."""


class NoReplicaYet(NoReplica):
    """The deployment has had no running replica since this process connected to it."""


class NoOtherReplica(NoReplica):
    """All running replicas are excluded."""


def pin_to(node_id: str, wait_s: float | None = None) -> str:
    """Return the session id that pins a call to the replica on a node.

    Args:
        node_id: Ray node id, or the id of an engine; '' (Serve's local testing mode) pins to nothing.
        wait_s: Longest wait for a replica on the node, after which NoReplica is raised. None: PIN_WAIT_S.
    """
    if not node_id:
        return ""
    return f"{NODE_SESSION}{node_id}" + ("" if wait_s is None else f"@{wait_s:g}")


def pinned(session_id: str) -> tuple[str | None, float | None]:
    """Return node and longest wait of a session id of `pin_to`; (None, None) for any other session id."""
    if not session_id.startswith(NODE_SESSION):
        return None, None
    node_id, _, wait_s = session_id.removeprefix(NODE_SESSION).partition("@")
    return node_id, float(wait_s) if wait_s else PIN_WAIT_S
