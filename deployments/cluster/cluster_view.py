"""ClusterView: what this machine knows of its cluster: the head, and the copies of its log."""

import json
from dataclasses import dataclass
from typing import Any

from deployments.cluster import ports
from deployments.cluster.folder import HEAD_LOCK, ClusterFolder, FolderError
from deployments.cluster.head_service import MEMBER_PATH
from deployments.cluster.head_watch import ASK_S, MAX_ANSWER_BYTES, ask_all
from deployments.cluster.membership import read_membership
from deployments.cluster.mutual_tls import machine_tls
from deployments.cluster.own_address import addresses_here
from deployments.cluster.proof_client import NoAnswer, NotOfCluster, ProofClient
from engine.process_lock import holder_of

FRESH_S = 30.0
"""Age up to which a copy of the log is up to date, and a head is not silent."""


class NoView(Exception):
    """A process of this machine that knows the cluster does not answer; the message is for the operator."""


@dataclass(frozen=True)
class Copy:
    """A copy of the log on a member."""

    address: str
    age_s: float
    """Seconds since it was equal to the log."""


@dataclass(frozen=True)
class ClusterView:
    """The cluster."""

    head: str
    """Address of the head."""
    heard_age_s: float
    """Seconds since the head has answered; 0 on the head."""
    num_members: int
    copies: tuple[Copy, ...]
    """The newest first."""

    @property
    def num_fresh(self) -> int:
        """Number of copies that are up to date."""
        return sum(copy.age_s <= FRESH_S for copy in self.copies)

    def describe(self) -> str:
        """Return a line for the operator."""
        copies = ", ".join(f"{copy.address} ({copy.age_s:.0f} s old)" for copy in self.copies) or "none"
        return f"head {self.head}, heard {self.heard_age_s:.0f} s ago; copies of its log: {copies}"


def read_view(folder: ClusterFolder) -> ClusterView | None:
    """Return what this machine knows of its cluster; None if it belongs to none.

    Raises:
        NoView: The process that knows it does not answer.
        FolderError: A file cannot be read.
    """
    if holder_of(folder.path / HEAD_LOCK) is not None:
        return _view(_ask_own_head(folder))
    if read_membership(folder) is None:
        return None
    for told in ask_all(addresses_here(), folder.token(), machine_tls(folder)).values():
        return _view(told)
    raise NoView(
        f"the member process of this machine does not answer at port {ports.MEMBER}; its Ray loses the head within "
        "minutes: `orchard leave --force` and `orchard join` start both again"
    )


def _ask_own_head(folder: ClusterFolder) -> dict[str, Any]:
    address = folder.started().get("address", "")
    client = ProofClient(address, ports.JOIN, folder.token(), ASK_S, machine_tls(folder))
    try:
        told = json.loads(client.ask(MEMBER_PATH, MAX_ANSWER_BYTES)[0])
    except (NoAnswer, NotOfCluster, ValueError) as reason:
        raise NoView(f"the head on this machine does not answer its members yet ({reason})") from None
    return {"heard_age_s": 0.0, **told}


def _view(told: dict[str, Any]) -> ClusterView:
    aged = [(one["copy_age_s"], one["address"]) for one in told["members"] if one["copy_age_s"] is not None]
    copies = tuple(Copy(address, age_s + told["heard_age_s"]) for age_s, address in sorted(aged))
    return ClusterView(told["address"], told["heard_age_s"], len(told["members"]), copies)


def view_line(folder: ClusterFolder) -> str | None:
    """Return the cluster in a line, or why it is not known; None without a cluster."""
    try:
        view = read_view(folder)
    except (NoView, FolderError) as reason:
        return str(reason)
    return None if view is None else view.describe()
