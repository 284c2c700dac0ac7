"""HeadSecrets: what the head of a cluster proves to the other machines, and what they prove to it."""

from dataclasses import dataclass, field
from typing import Any

from deployments.cluster.folder import ClusterFolder
from deployments.cluster.issuing import prepare_head
from deployments.cluster.join_token import JoinToken, read_join_token, renew_join_token
from deployments.cluster.mutual_tls import MachineTls
from deployments.serve_run.checks import CannotStart


@dataclass(frozen=True)
class HeadSecrets:
    """The secrets."""

    token: str = field(repr=False)
    """Shared by all machines."""
    tls: MachineTls | None
    """This machine's end of the connections; None: they are not encrypted."""
    authority: str
    """Certificate of the cluster's authority, as PEM; '' without TLS."""


def forget_old_secrets(folder: ClusterFolder, is_new: bool) -> None:
    """Forget the secrets of an earlier cluster of this machine, which belongs to none now.

    Args:
        folder: Of this machine.
        is_new: Whether the operator has asked for a new cluster, else only those of another head's are forgotten.
    """
    is_foreign = folder.tls.authority.exists() and not folder.tls.authority_key.exists()
    if is_new or (is_foreign and not folder.started()):
        folder.forget_secrets()


def refuse_other_tls(folder: ClusterFolder, started: dict[str, Any], has_tls: bool) -> None:
    """Raise CannotStart if a cluster that goes on was started with TLS and now is not, or the other way round.

    Args:
        folder: Of this machine.
        started: What the cluster was started with; empty: it is new.
        has_tls: Whether TLS is asked for.
    """
    known = bool(started.get("tls", False))
    if not started or known == has_tls:
        return
    was, remedy = ("with", "Leave --no-tls out") if known else ("without", "Give --no-tls")
    raise CannotStart(
        f"The cluster in {folder.store_log} was started {was} TLS, which its running machines keep. {remedy}, or start "
        "a new cluster with --new-cluster, which the other machines must join again with its token."
    )


def head_secrets(folder: ClusterFolder, address: str, has_tls: bool) -> HeadSecrets:
    """Return the secrets of the head at an address; make those that do not exist. Raises FolderError."""
    token = folder.token()
    if has_tls:
        prepare_head(folder, address)
        return HeadSecrets(token, MachineTls(folder.tls), folder.tls.authority.read_text())
    if read_join_token(folder) != JoinToken(token, None):
        renew_join_token(folder, None)
    return HeadSecrets(token, None, "")


def guest_secret(folder: ClusterFolder) -> str:
    """Return the secret of machines that join, which `orchard revoke` changes. Raises FolderError."""
    token = read_join_token(folder)
    assert token is not None, "head_secrets has made it"
    return token.secret
