"""List the nodes of a running server: what each engine does, what it has room for, and the copies of the head's log."""

import argparse
from collections.abc import Iterator
from typing import Any

from deployments.cluster.cluster_view import view_line
from deployments.cluster.folder import ClusterFolder
from deployments.commands import connection
from deployments.commands.connection import Connection
from deployments.commands.output import console, show, show_json, size, table

POPULATION_CHARS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    connection.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the engines of /v1/status as JSON")


def run(options: argparse.Namespace) -> int:
    """Run the verb; return its exit status: 1 while no engine is ready."""
    server = connection.connection_of(options)
    status = server.status()
    if options.json:
        show_json(status["engines"])
    else:
        show_nodes(status["engines"])
        if (line := view_line(ClusterFolder())) is not None:
            show(line)
    return 0 if status.get("ready") else 1


def show_nodes(engines: list[dict[str, Any]]) -> None:
    """Print a table of the nodes.

    Args:
        engines: `engines` of /v1/status.
    """
    columns = ("node", "process", "state", "#rows", "#waiting", "#context", "#memory")
    populations = [str(engine.get("population", ""))[:POPULATION_CHARS] for engine in engines]
    rows = list(_rows(engines))
    if len(set(populations)) > 1:  # while a cluster is upgraded
        columns += ("code",)
        rows = [[*row, population] for row, population in zip(rows, populations, strict=True)]
    console().print(table(columns, rows))


def engine_and_node_ids(server: Connection) -> list[str]:
    """Return the ids of the engines and of their nodes, which are the same where a node has one engine."""
    engines = server.status()["engines"]
    ids = [str(engine[key]) for key in ("node_id", "engine_id") for engine in engines if engine.get(key)]
    return list(dict.fromkeys(ids))


def _rows(engines: list[dict[str, Any]]) -> Iterator[list[object]]:
    for replica in engines:
        engine = replica["engine"]
        limit = (engine.get("admission") or {}).get("limit_bytes")
        yield [
            str(replica.get("engine_id") or replica.get("node_id") or "this one"),
            replica.get("pid"),
            engine.get("unavailable") or engine["state"],
            f"{engine.get('num_running')}/{engine.get('max_running')}",
            f"{engine.get('num_waiting')}/{engine.get('max_queue')}",
            engine.get("max_context_tokens"),
            None if limit is None else size(limit),
        ]
