"""Drain a node, or one of its engines: its answers and snapshots move to the others.

It takes no new requests until that is undone.
"""

import argparse

from deployments.commands import connection
from deployments.commands.connection import Connection
from deployments.commands.nodes import engine_and_node_ids
from deployments.commands.output import CommandError, UsageError, say
from deployments.engine_ids import node_of
from engine.placement import TakenOver

MIN_ID_CHARS = 4

DEADLINE_S = 60.0
"""Longest time for the snapshots to move, unless the user names another."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    connection.add_arguments(parser)
    parser.add_argument("--undo", action="store_true", help="let the node take requests again")
    add_deadline(parser)
    parser.add_argument(
        "node",
        help="id of the node as in `orchard nodes`, or its first characters; with a colon and a number one of its "
        "engines",
    )


def run(options: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    if options.undo and options.deadline is not None:
        raise UsageError(f"--undo moves no snapshots: --deadline {options.deadline:g} would have no effect")
    server = connection.connection_of(options, connection.TIMEOUT_S + (options.deadline or DEADLINE_S))
    node_id = _whole(options.node, engine_and_node_ids(server))
    if options.undo:
        server.delete(f"/v1/nodes/{node_id}/drain")
        say(f"{_kind(node_id)} {node_id} takes requests again.")
        return 0
    moved = drain(server, node_id, options.deadline)
    say(f"{_kind(node_id)} {node_id} is drained: its answers go on elsewhere, and it takes no new requests. {moved}")
    return 0


def add_deadline(parser: argparse.ArgumentParser) -> None:
    """Add the option that limits the time of the snapshots."""
    parser.add_argument(
        "--deadline",
        type=float,
        metavar="SECONDS",
        help=f"longest time for the cached conversations to move; 0: they stay; default: {DEADLINE_S:g}",
    )


def drain(server: Connection, node_id: str, deadline_s: float | None) -> str:
    """Drain a node; return what became of its snapshots. Raises Unreachable, Refused.

    Args:
        server: Any node of the cluster; must wait for longer than the deadline.
        node_id: The node.
        deadline_s: Longest time for the snapshots; None: DEADLINE_S.
    """
    seconds = DEADLINE_S if deadline_s is None else deadline_s
    answer = server.post(f"/v1/nodes/{node_id}/drain?deadline_s={seconds:g}", {})
    return str(TakenOver(**answer["snapshots"]))


def _kind(id: str) -> str:
    return "Node" if id == node_of(id) else "Engine"


def _whole(start: str, known: list[str]) -> str:
    """Return the id of the node that begins so, or of its engine with the number after a colon. Raises CommandError."""
    start_of_node = node_of(start)
    number = start.removeprefix(start_of_node)
    found = [id for id in known if id.startswith(start_of_node) and id.removeprefix(node_of(id)) == number]
    if len(start_of_node) < MIN_ID_CHARS:
        raise CommandError(f"the node is {start!r}; give at least {MIN_ID_CHARS} characters of its id")
    if len(found) != 1:
        listed = ", ".join(sorted(known)) or "none"
        raise CommandError(f"{len(found)} nodes have an id that begins with {start!r}; the ids are: {listed}")
    return found[0]
