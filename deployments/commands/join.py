"""Join a cluster: compare this machine with the head, line by line, then start Ray and wait for the engine here."""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from deployments.cluster.comparison import Line, Link, compare
from deployments.cluster.facts import read_facts
from deployments.cluster.folder import ClusterFolder, FolderError
from deployments.cluster.join_client import HeadAnswer, HeadClient, HeadRefused
from deployments.cluster.membership import Membership, read_membership, write_membership
from deployments.cluster.own_address import NoAddress, own_address
from deployments.cluster.ray_node import NodeOptions, RayFailed, RayNode, contradiction_in, set_variables
from deployments.cluster.rejoin import start_rejoiner
from deployments.commands.connection import KEY_VARIABLE, Connection, Refused, Unreachable
from deployments.commands.nodes import show_nodes
from deployments.commands.output import CommandError, say, show, show_json
from deployments.serve_run.environment import raise_open_files, set_defaults

REFUSED = 2
TOKEN_VARIABLE = "ORCHARD_CLUSTER_TOKEN"
READY_S = 900.0
"""Time for the engine to load the model."""
OTHERS_S = 15.0
"""Time for the ingress on this machine to hear of the other engines."""
POLL_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("head", metavar="HEAD", help="address of the head, as `orchard serve --cluster` prints it")
    parser.add_argument(
        "--token",
        help=f"the cluster's token, visible to other users of the machine; default: the variable {TOKEN_VARIABLE}, "
        "else that of the last time",
    )
    parser.add_argument("--interface", metavar="NAME|ADDRESS", help="by which the others reach this machine")
    parser.add_argument("--check", action="store_true", help="compare, and start nothing")
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")
    parser.add_argument("--object-store-mib", type=int, default=512, help="shared memory for images; default: 512")
    parser.add_argument("--key", help=f"API key with which to wait for the engine; default: {KEY_VARIABLE}")


def run(options: argparse.Namespace) -> int:
    """Run the verb; return its exit status: 2 if this machine may not join."""
    folder = ClusterFolder()
    try:
        if (member := read_membership(folder)) is not None:
            raise CommandError(f"this machine belongs to the cluster of {member.head}: run `orchard leave` first")
        token = _token(options.token, folder)
        head = HeadClient(options.head, token)
        answer = head.facts()
        lines = _compare(head, answer, options)
    except (FolderError, HeadRefused, NoAddress) as error:
        raise CommandError(str(error)) from None
    _show(lines, options.json)
    if not all(line.is_green for line in lines):
        say("This machine has not joined: repair what is marked, then give the command again.")
        return REFUSED
    if options.check:
        return 0
    address = own_address(options.interface) if options.interface else answer.own_address
    _start(folder, token, answer, address, options)
    member = read_membership(folder)
    if member is None:
        raise CommandError(f"Ray has ended on this machine; see {folder.ray_output}")
    return _await_engine(member, options.key or os.environ.get(KEY_VARIABLE))


def _token(given: str | None, folder: ClusterFolder) -> str:
    token = given or os.environ.get(TOKEN_VARIABLE)
    if token:
        return token
    if not folder.token_file.exists():
        raise CommandError("give the token that the head has printed, by --token")
    return folder.token()


def _compare(head: HeadClient, answer: HeadAnswer, options: argparse.Namespace) -> list[Line]:
    own = read_facts((checkpoint.model, checkpoint.revision) for checkpoint in answer.facts.checkpoints)
    address = own_address(options.interface) if options.interface else answer.own_address
    link = Link(
        answer.clock_difference_s, head.bytes_per_s(), address, answer.seen_address, answer.gcs.rpartition(":")[0]
    )
    return compare(answer.facts, own, link)


def _show(lines: list[Line], as_json: bool) -> None:
    if as_json:
        fields = ("name", "is_green", "text", "remedy")
        show_json([{field: getattr(line, field) for field in fields} for line in lines])
        return
    width = max(len(line.name) for line in lines)
    for line in lines:
        show(f"{'✓' if line.is_green else '✗'} {line.name:<{width}}  {line.text}")
        if not line.is_green:
            show(f"  {'':<{width}}  → {line.remedy}")
    sys.stdout.flush()


def _start(folder: ClusterFolder, token: str, answer: HeadAnswer, address: str, options: argparse.Namespace) -> None:
    """Start Ray, whose processes outlive this one. Raises CommandError."""
    environ = dict(os.environ)
    if (reason := contradiction_in(environ)) is not None:
        raise CommandError(reason)
    try:
        folder.make()
        folder.write_token(token)
        set_variables(environ, folder.token_file)
        set_defaults(environ, "ray")
        raise_open_files()
        node = NodeOptions(address, answer.resources, options.object_store_mib * 2**20, answer.gcs)
        ray = RayNode(node, environ, folder.ray_output)
        say("Starting Ray.")
        ray.start()
        write_membership(folder, ray.pid, options.head, answer.url)
        start_rejoiner(folder, ray.pid, _command(options))
    except (FolderError, RayFailed) as error:
        raise CommandError(str(error)) from None


def _command(options: argparse.Namespace) -> list[str]:
    """Return the command that joins as this one, with the token of the folder."""
    command = [str(Path(sys.executable).parent / "orchard"), "join", options.head]
    if options.interface is not None:
        command.append(f"--interface={options.interface}")
    return [*command, f"--object-store-mib={options.object_store_mib}"]


def _await_engine(member: Membership, key: str | None) -> int:
    """Wait until the engine on this machine answers; show the nodes. Return the exit status."""
    say("This machine has joined. Waiting until its engine has loaded the model.")
    server, deadline, alone_since = Connection(member.url, key), time.monotonic() + READY_S, None
    while time.monotonic() < deadline:
        if not member.is_running:
            raise CommandError("Ray has ended on this machine; `orchard join` starts it again")
        try:
            status = server.status()
        except Unreachable:
            status = None
        except Refused as refused:
            if refused.status == 401:
                say(f"{refused}. The engine is starting; `orchard nodes` shows it.")
                return 0
            status = None
        if status is not None and _has_engine_of(member.node_id(), status):
            alone_since = alone_since or time.monotonic()
            if len(status["engines"]) > 1 or time.monotonic() - alone_since > OTHERS_S:
                show_nodes(status["engines"])
                return 0
        time.sleep(POLL_S)
    raise CommandError(f"the engine on this machine has not answered within {READY_S:.0f} s; see `orchard nodes`")


def _has_engine_of(node_id: str | None, status: dict[str, Any]) -> bool:
    return any(one["node_id"] == node_id and one["engine"].get("state") == "ready" for one in status["engines"])
