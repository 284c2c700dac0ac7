"""Adoption: a member takes the cluster over from a head that is gone, with its copy of the head's log.

The other members' Ray goes on: each reaches the GCS through its own relay, which follows the head with the highest
term. A head that comes back finds by its members that it was replaced, or is told by the new head.
"""

import contextlib
import json
import shutil
import socket
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from deployments.cluster import ports
from deployments.cluster.folder import ClusterFolder, FolderError
from deployments.cluster.head_service import ADOPTED_PATH
from deployments.cluster.head_watch import ask_all
from deployments.cluster.headship import Headship, read_headship, write_headship
from deployments.cluster.log_copy import copied_s
from deployments.cluster.members import noted_addresses
from deployments.cluster.membership import read_membership
from deployments.cluster.mutual_tls import MachineTls, machine_tls
from deployments.cluster.own_address import addresses_here
from deployments.cluster.proof_client import NoAnswer, NotOfCluster, ProofClient
from deployments.cluster.ray_node import RECONNECT_S
from deployments.serve_run.checks import CannotStart
from deployments.serve_run.stop import say

CONFIG = "head.yaml"
MAX_LAG_S = 30.0
"""How much older than the head's last answer a copy may be."""
HEARD_S = 10.0
"""A head that another member has heard within so many seconds is not gone."""
CONNECT_S = 2.0
TELL_S = 2.0
MAX_TOLD_BYTES = 4096


@dataclass(frozen=True)
class Adoption:
    """A cluster that this machine may take over."""

    old: Headship
    own_address: str
    members: tuple[str, ...]
    """Addresses of the other members."""
    copied_s: float
    """When the copy of the log was equal to it, in seconds since 1970."""
    started: dict[str, Any]
    """Settings with which the cluster was started, changed so that this machine is its head."""


def find_adoption(folder: ClusterFolder, is_forced: bool) -> Adoption:
    """Check that this machine may take its cluster over.

    Args:
        folder: Of this machine.
        is_forced: Whether a copy that is older than MAX_LAG_S is used.

    Raises:
        CannotStart: The old head answers, another machine is the head, or there is no copy, or only an old one.
        FolderError: A file cannot be read.
    """
    member = read_membership(folder)
    if member is None or not (member.has_agent and member.is_running):
        raise CannotStart(
            "--adopt takes over a cluster that this machine belongs to, and it belongs to none, or its Ray has ended, "
            f"as it does when a head is away for {RECONNECT_S} s. Start a new cluster by --new-cluster, which the "
            "other machines must join."
        )
    noted = read_headship(folder)
    known = _ask_own_agent(folder)
    old = Headship(known["address"], known["term"])
    if noted is not None and noted.term > old.term:
        old = noted
    others = tuple(one["address"] for one in known["members"] if one["address"] != known["own_address"])
    asked = [address for address in others if address != old.address]
    _refuse_living(old, ask_all(asked, folder.token(), machine_tls(folder)))
    since = _copied_s(folder, old, time.time() - known["heard_age_s"], is_forced)
    return Adoption(old, known["own_address"], others, since, _started(folder, old, known["own_address"]))


def _ask_own_agent(folder: ClusterFolder) -> dict[str, Any]:
    for told in ask_all(addresses_here(), folder.token(), machine_tls(folder)).values():
        return told
    raise CannotStart(
        f"the member process of this machine does not answer at port {ports.MEMBER}; `orchard leave --force` and "
        "`orchard join` start it again"
    )


def _refuse_living(old: Headship, told: dict[str, dict[str, Any]]) -> None:
    """Raise CannotStart if the old head answers here or to another member, or was replaced already."""
    for port in (ports.JOIN, ports.GCS):
        with contextlib.suppress(OSError), socket.create_connection((old.address, port), CONNECT_S):
            raise CannotStart(
                f"the head at {old.address} answers (port {port}): a cluster is adopted only when its head is gone. "
                "Stop it there first, or let it go on."
            )
    for address, view in told.items():
        if view["term"] > old.term:
            raise CannotStart(f"{view['address']} has taken this cluster over already, as {address} says.")
        if view["address"] == old.address and view["heard_age_s"] < HEARD_S:
            raise CannotStart(
                f"{address} has heard the head at {old.address} {view['heard_age_s']:.0f} s ago: only this machine "
                "cannot reach it. A cluster is adopted only when its head is gone."
            )


def _copied_s(folder: ClusterFolder, old: Headship, heard_s: float, is_forced: bool) -> float:
    """Return when the copy was equal to the log. Raises CannotStart if there is none, or only an old one."""
    since = copied_s(folder.log_copy)
    if since is None:
        raise CannotStart(
            f"this machine has no copy of the log of {old.address}; two machines of a cluster have one, see "
            "`orchard nodes`. Give the command there."
        )
    if (lag := heard_s - since) > MAX_LAG_S and not is_forced:
        raise CannotStart(
            f"the copy of the log here is {lag:.0f} s older than the last answer of {old.address}, at most "
            f"{MAX_LAG_S:g} s: another machine has a newer one, see `orchard nodes`. Give the command there, or "
            "--force: then what has changed since is lost, such as deployments and machines that have joined."
        )
    return since


def _started(folder: ClusterFolder, old: Headship, own_address: str) -> dict[str, Any]:
    """Return what the cluster was started with, with this machine as its head. Raises FolderError."""
    try:
        started = json.loads(folder.shared.read_text())["started"]
        replaced = [address for address in started.get("replaced", []) if address != own_address]
        mine = {"address": own_address, "term": old.term + 1, "replaced": [*replaced, old.address]}
        return {**started, **mine}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FolderError(f"{folder.shared}, what the head has told, cannot be read: {error!r}") from None


def take_over(folder: ClusterFolder, adoption: Adoption) -> None:
    """Make this machine the head, in its files: the member process finds the new headship there.

    Raises:
        FolderError: A file cannot be written.
    """
    try:
        new = folder.store_log.with_name(f"{folder.store_log.name}.adopted")
        shutil.copyfile(folder.log_copy, new)
        new.chmod(0o600)
        new.replace(folder.store_log)
    except OSError as error:
        raise FolderError(f"the log of {adoption.old.address} cannot be taken over: {error}") from None
    folder.note_started(adoption.started)
    folder.write(folder.path / "members.json", json.dumps(list(adoption.members)) + "\n")
    write_headship(folder, Headship(adoption.own_address, adoption.started["term"]))


def refuse_if_adopted(folder: ClusterFolder, own: Headship) -> None:
    """Raise CannotStart if another machine has taken over the cluster of which this machine was the head.

    Raises:
        FolderError: A file cannot be read.
    """
    noted = read_headship(folder)
    if noted is not None and noted.term > own.term:
        raise CannotStart(_replaced(noted))
    addresses = [address for address in noted_addresses(folder) if address != own.address]
    told = ask_all(addresses, folder.token(), machine_tls(folder))
    newest = max(told.values(), key=lambda view: view["term"], default=None)
    if newest is not None and newest["term"] > own.term:
        raise CannotStart(_replaced(Headship(newest["address"], newest["term"])))
    if addresses and not told:
        say(
            f"None of the {len(addresses)} other machines of this cluster answers ({', '.join(addresses)}). If one of "
            "them has taken the cluster over, this head ends when it hears of it."
        )


def _replaced(headship: Headship) -> str:
    return (
        f"{headship.address} has taken over the cluster of this machine, which is no longer its head. Join it: orchard "
        f"join {headship.address}. Or start a new cluster with --new-cluster."
    )


def tell_replaced(
    addresses: list[str], own: Headship, cluster: str, token: str, tls: MachineTls | None = None
) -> list[str]:
    """Tell heads that were replaced, if they answer; return the addresses of those that end now.

    Args:
        addresses: Of machines that were heads before.
        own: This machine as the head.
        cluster: Id of the cluster.
        token: Of the cluster.
        tls: This machine's end of the connections; None: they are not encrypted.
    """
    ended = []
    for address in addresses:
        path = f"{ADOPTED_PATH}?{urlencode({'by': own.address, 'term': own.term, 'cluster': cluster})}"
        with contextlib.suppress(NoAnswer, NotOfCluster):
            ProofClient(address, ports.JOIN, token, TELL_S, tls).ask(path, MAX_TOLD_BYTES)
            ended.append(address)
    return ended


def write_shared_config(folder: ClusterFolder) -> str:
    """Write the configuration of the old head into a file, and return its path. Raises FolderError."""
    try:
        config = json.loads(folder.shared.read_text())["config"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FolderError(
            f"{folder.shared}, the configuration of the head, cannot be read: {error!r}. Give MODEL, or --config"
        ) from None
    file = folder.path / CONFIG
    folder.write(file, json.dumps(config, indent=2) + "\n")
    return str(file)
