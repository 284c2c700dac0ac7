"""The end of a member's answers before its Ray ends: they move to the other machines, or have time to end."""

import time

from deployments.cluster.membership import Membership
from deployments.commands.connection import Connection
from deployments.commands.drain import drain
from deployments.commands.output import say

IN_FLIGHT_S = 30.0
"""Time for the answers that clients read through this machine to end, which their engine's move does not do."""
POLL_S = 0.5


def drain_member(server: Connection, member: Membership, deadline_s: float | None) -> None:
    """Move answers and snapshots away, and wait for the answers that go through this machine's ingress.

    Args:
        server: The server at this machine.
        member: This machine's place in the cluster.
        deadline_s: Longest time for the snapshots, see drain.drain.

    Raises:
        Unreachable: The server does not answer.
        Refused: It refuses.
    """
    node_id = member.node_id()
    if node_id is None:
        return  # Ray has ended meanwhile
    say(drain(server, node_id, deadline_s))
    await_in_flight(server, node_id)


def await_in_flight(server: Connection, node_id: str) -> None:
    """Wait until this machine's ingress has no answer, at most IN_FLIGHT_S. Raises Unreachable, Refused."""
    deadline = time.monotonic() + IN_FLIGHT_S
    while (num_left := _num_in_flight(server, node_id)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    if num_left:
        say(f"{num_left} answers that clients read through this machine have not ended within {IN_FLIGHT_S:g} s.")


def _num_in_flight(server: Connection, node_id: str) -> int:
    ingresses = server.status()["ingress"]
    return sum(ingress["num_in_flight"] for ingress in ingresses if ingress["node_id"] == node_id)
