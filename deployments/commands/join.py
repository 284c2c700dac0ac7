"""Join a cluster: compare this machine with the head, copy its models, then start Ray and wait for the engine here."""

import argparse
import os
import subprocess
import sys
import time
from typing import Any

from deployments.cluster.comparison import Line
from deployments.cluster.folder import HEAD_LOCK, ClusterFolder, FolderError
from deployments.cluster.join_client import HeadAnswer, HeadClient, HeadRefused, compare_with_head, enrol, guest_client
from deployments.cluster.join_token import BadToken, JoinToken, read_join_token
from deployments.cluster.membership import Membership, read_membership
from deployments.cluster.model_copy import CannotCopy, copy_model, missing_models
from deployments.cluster.mutual_tls import machine_tls
from deployments.cluster.own_address import NoAddress, own_address
from deployments.cluster.ray_node import contradiction_in, set_variables
from deployments.commands.connection import KEY_VARIABLE, Connection, Refused, Unreachable
from deployments.commands.member_process import OUTPUT, MemberSettings, start_agent
from deployments.commands.nodes import show_nodes
from deployments.commands.output import CommandError, UsageError, bytes_progress, say, show, show_json, size
from deployments.commands.staying import leave_at_stop, stay
from deployments.serve_run.environment import raise_open_files, set_defaults
from engine.errors import EngineFailed
from engine.gpus import num_engines
from engine.process_lock import holder_of

REFUSED = 2
TOKEN_VARIABLE = "ORCHARD_CLUSTER_TOKEN"
READY_S = 900.0
"""Time for the engine to load the model."""
OTHERS_S = 15.0
"""Time for the ingress on this machine to hear of the other engines."""
POLL_S = 1.0
MIN_ALONE_S = 15.0
"""A head that is only busy is silent for some seconds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("head", metavar="HEAD", help="address of the head, as `orchard serve --cluster` prints it")
    parser.add_argument(
        "--token",
        help=f"the cluster's token, visible to other users of the machine; default: the variable {TOKEN_VARIABLE}, "
        "else the certificate that this machine got the last time",
    )
    parser.add_argument("--interface", metavar="NAME|ADDRESS", help="by which the others reach this machine")
    parser.add_argument("--check", action="store_true", help="compare, and start nothing")
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")
    parser.add_argument("--object-store-mib", type=int, default=512, help="shared memory for images; default: 512")
    parser.add_argument(
        "--alone-after",
        type=float,
        metavar="SECONDS",
        help="when the head has been silent for so long, leave and serve alone on loopback until it answers again; "
        f"at least {MIN_ALONE_S:g}; default: never",
    )
    parser.add_argument(
        "--stay",
        action="store_true",
        help="do not return while this machine belongs to the cluster; SIGTERM and Ctrl-C make it leave. With a member "
        "that has joined already it only waits",
    )
    parser.add_argument("--key", help=f"API key with which to wait for the engine; default: {KEY_VARIABLE}")


def run(options: argparse.Namespace) -> int:
    """Run the verb; return its exit status: 2 if this machine may not join."""
    if options.alone_after is not None and not options.alone_after >= MIN_ALONE_S:
        raise UsageError(f"--alone-after is {options.alone_after:g} s; it must be at least {MIN_ALONE_S:g} s")
    folder = ClusterFolder()
    try:
        if (head := holder_of(folder.path / HEAD_LOCK)) is not None:
            raise CommandError(f"this machine is the head of a cluster, by {head}: stop that first")
        if (member := read_membership(folder)) is not None:
            if options.stay and member.head == options.head:
                return _stay(folder, options)
            raise CommandError(f"this machine belongs to the cluster of {member.head}: run `orchard leave` first")
        token = _token(options.token, folder)
        head = _head(options.head, token, folder)
        answer = head.facts()
        address = own_address(options.interface) if options.interface else answer.own_address
        lines = compare_with_head(head, answer, address)
    except (BadToken, FolderError, HeadRefused, NoAddress) as error:
        raise CommandError(str(error)) from None
    _show(lines, options.json)
    if not all(line.is_green for line in lines):
        say("This machine has not joined: repair what is marked, then give the command again.")
        return REFUSED
    if options.check:
        return 0
    try:
        _copy_models(head, answer)
        enrol(folder, head, token, address)
    except (CannotCopy, FolderError, HeadRefused) as error:
        raise CommandError(str(error)) from None
    _start(folder, answer, address, options)
    member = read_membership(folder)
    if member is None:
        raise CommandError(f"Ray has ended on this machine; see {folder.ray_output}")
    status = _await_engine(member, options.key or os.environ.get(KEY_VARIABLE))
    return _stay(folder, options) if options.stay and status == 0 else status


def _stay(folder: ClusterFolder, options: argparse.Namespace) -> int:
    say("This command waits while this machine belongs to the cluster; Ctrl-C makes it leave.")
    return stay(folder, lambda: leave_at_stop(options.key))


def _token(given: str | None, folder: ClusterFolder) -> JoinToken | None:
    """Return the token; None: this machine has a certificate of the cluster. Raises BadToken, FolderError."""
    text = given or os.environ.get(TOKEN_VARIABLE)
    if text:
        return JoinToken.parse(text)
    if folder.tls.certificate.exists():
        return None
    token = read_join_token(folder)
    if token is None:
        earlier = " (that of the last time is of an earlier version of Orchard)" if folder.token_file.exists() else ""
        raise CommandError(f"give the token that the head has printed, by --token{earlier}")
    return token


def _head(head: str, token: JoinToken | None, folder: ClusterFolder) -> HeadClient:
    """Return the head, which with TLS has been recognized by its certificate. Raises HeadRefused, FolderError."""
    if token is None:
        return HeadClient(head, folder.token(), tls=machine_tls(folder))
    if token.fingerprint is None:
        say("The head was started with --no-tls: what the machines send can be read on its way, the token too.")
    return guest_client(head, token)


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


def _copy_models(head: HeadClient, answer: HeadAnswer) -> None:
    """Copy the models that are missing here, and show the progress. Raises CannotCopy, HeadRefused."""
    for model in missing_models(answer.facts.checkpoints):
        say(f"Copying {model.model} from the head, {size(model.num_bytes)}; Ctrl-C stops, the same command continues.")
        try:
            with bytes_progress(model.num_bytes) as advance:
                say(f"It is in {copy_model(head, model, advance)}.")
        except HeadRefused as error:
            raise HeadRefused(f"{error}. The same command continues the copy") from None


def _start(folder: ClusterFolder, answer: HeadAnswer, address: str, options: argparse.Namespace) -> None:
    """Start the member process and Ray, which outlive this one. Raises CommandError."""
    ray_environ = dict(os.environ)
    if (reason := contradiction_in(ray_environ)) is not None:
        raise CommandError(reason)
    try:
        folder.forget_cluster()  # that this machine was the head of
        set_variables(ray_environ, folder.token_file, folder.tls if folder.tls.certificate.exists() else None)
        set_defaults(ray_environ, "ray")
        raise_open_files()
        settings = MemberSettings(
            head=options.head,
            gcs=answer.gcs,
            term=answer.term,
            address=address,
            url=answer.url,
            resources={**answer.resources, "mlx": float(num_engines(answer.engines_per_node, answer.device))},
            object_store_bytes=options.object_store_mib * 2**20,
            alone_after_s=options.alone_after,
            ray_environ={name: value for name, value in ray_environ.items() if os.environ.get(name) != value},
        )
        say("Starting Ray.")
        agent = start_agent(settings, folder)
        try:
            _await_ray(agent, folder)
        except BaseException:
            agent.terminate()
            raise
    except (FolderError, EngineFailed) as error:
        raise CommandError(str(error)) from None


def _await_ray(agent: "subprocess.Popen[str]", folder: ClusterFolder) -> None:
    """Wait until the member process has started Ray. Raises CommandError."""
    while read_membership(folder) is None:
        if agent.poll() is not None:
            raise CommandError((folder.path / OUTPUT).read_text(errors="replace").strip())
        time.sleep(POLL_S)


def _await_engine(member: Membership, key: str | None) -> int:
    """Wait until the engine on this machine answers; show the nodes. Return the exit status."""
    say("This machine has joined. Waiting until its engine has loaded the model.")
    server, deadline, alone_since = Connection(member.url, key), time.monotonic() + READY_S, None
    while time.monotonic() < deadline:
        if not member.is_running:
            raise CommandError(
                "Ray has ended on this machine; see `orchard nodes`, or run `orchard leave` and `orchard join`"
            )
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
