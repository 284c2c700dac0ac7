"""Drain a node: its answers go on at the other nodes, and it takes no new requests until it is told otherwise."""

import argparse

from deployments.commands import connection
from deployments.commands.nodes import node_ids
from deployments.commands.output import CommandError, say

MIN_ID_CHARS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    connection.add_arguments(parser)
    parser.add_argument("--undo", action="store_true", help="let the node take requests again")
    parser.add_argument("node", help="id of the node as in `orchard nodes`, or its first characters")


def run(options: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    server = connection.connection_of(options)
    node_id = _whole(options.node, node_ids(server))
    if options.undo:
        server.delete(f"/v1/nodes/{node_id}/drain")
        say(f"Node {node_id} takes requests again.")
        return 0
    server.post(f"/v1/nodes/{node_id}/drain", {})
    say(f"Node {node_id} is drained: its answers go on elsewhere, and it takes no new requests.")
    return 0


def _whole(start: str, known: list[str]) -> str:
    """Return the id that begins so. Raises CommandError."""
    found = [node_id for node_id in known if node_id.startswith(start)]
    if len(start) < MIN_ID_CHARS:
        raise CommandError(f"the node is {start!r}; give at least {MIN_ID_CHARS} characters of its id")
    if len(found) != 1:
        listed = ", ".join(sorted(known)) or "none"
        raise CommandError(f"{len(found)} nodes have an id that begins with {start!r}; the nodes are: {listed}")
    return found[0]
