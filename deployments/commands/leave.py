"""Leave the cluster: move the answers of this machine to the others, then stop its Ray."""

import argparse
import os
import time

from deployments.cluster.folder import ClusterFolder, FolderError
from deployments.cluster.membership import Membership, forget_membership, noted_membership, read_membership
from deployments.cluster.ray_node import end_session
from deployments.commands.connection import KEY_VARIABLE, Connection, Refused, Unreachable
from deployments.commands.output import CommandError, say
from engine.process_lock import holder_of

IN_FLIGHT_S = 30.0
"""Time for the answers that clients read through this machine to end, which their engine's move does not do."""
POLL_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("--force", action="store_true", help="stop Ray also if the answers cannot be moved")
    parser.add_argument("--key", help=f"administrative API key; default: the variable {KEY_VARIABLE}")


def run(options: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    folder = ClusterFolder()
    try:
        member, noted = read_membership(folder), noted_membership(folder)
    except FolderError as error:
        raise CommandError(str(error)) from None
    if member is None:
        if (head := holder_of(folder.head_lock)) is not None:
            raise CommandError(
                f"this machine is the head of its cluster, by {head}: Ctrl-C there moves its answers and ends it, and "
                "the other machines wait for it to come back"
            )
        if noted is not None:
            forget_membership(folder)
            say(f"Ray had ended on this machine; it does not join the cluster of {noted.head} again.")
            return 0
        raise CommandError("this machine belongs to no cluster")
    try:
        _drain(Connection(member.url, options.key or os.environ.get(KEY_VARIABLE)), member)
    except (Unreachable, Refused) as error:
        if not options.force:
            raise CommandError(f"the answers cannot be moved: {error}. `orchard leave --force` ends them") from None
        say(f"The answers were not moved: {error}")
    forget_membership(folder)  # first, so that the rejoiner does not take the end of Ray for an accident
    end_session(member.pid)
    say(f"This machine has left the cluster of {member.head}.")
    return 0


def _drain(server: Connection, member: Membership) -> None:
    """Move the answers away, and wait for those that go through this machine's ingress. Raises Unreachable, Refused."""
    node_id = member.node_id()
    if node_id is None:
        return  # Ray has ended meanwhile
    server.post(f"/v1/nodes/{node_id}/drain", {})
    deadline = time.monotonic() + IN_FLIGHT_S
    while (num_left := _num_in_flight(server, node_id)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    if num_left:
        say(f"{num_left} answers that clients read through this machine have not ended within {IN_FLIGHT_S:g} s.")


def _num_in_flight(server: Connection, node_id: str) -> int:
    ingresses = server.status()["ingress"]
    return sum(ingress["num_in_flight"] for ingress in ingresses if ingress["node_id"] == node_id)
