"""Revoke the certificate of a machine, on the head: it is refused, and the head gets a new token; or list them all."""

import argparse
import sys
import time

from deployments.cluster.folder import ClusterFolder, FolderError
from deployments.cluster.join_token import renew_join_token
from deployments.cluster.ledger import Ledger, Machine, fingerprint_of, revoke
from deployments.commands.output import CommandError, say, show

RAY_REMAINS = (
    "Ray knows no revocation: who has kept the files of that machine can still use Ray's ports, and so run code on the "
    "others, until the cluster is started anew by `orchard serve --cluster --new-cluster`. If the machine was stolen, "
    "do that now."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("address", nargs="?", metavar="ADDRESS", help="of the machine; without it, all are listed")


def run(options: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    folder = ClusterFolder()
    try:
        own = folder.started().get("address")
        if own is None or not folder.tls.authority_key.exists():
            raise CommandError("this machine is not the head of a cluster with TLS; give the command there")
        if options.address is None:
            return _list(Ledger(folder.tls.ledger).machines())
        if options.address == own:
            raise CommandError(f"{own} is the head itself: only --new-cluster replaces its certificate")
        if not revoke(folder, options.address):
            machines = Ledger(folder.tls.ledger).machines()
            valid = ", ".join(one.address for one in machines if one.revoked_s is None and one.address != own)
            raise CommandError(
                f"{options.address} has no valid certificate; the other machines with one: {valid or 'none'}"
            )
        token = renew_join_token(folder, fingerprint_of(folder.tls.authority.read_text()))
    except (FolderError, OSError) as error:
        raise CommandError(str(error)) from None
    shown = token if sys.stderr.isatty() else f"TOKEN (in {folder.join_token})"
    say(
        f"The certificate of {options.address} is revoked: the other machines refuse it within seconds, and its Ray "
        "ends when it asks the head next. The earlier token is void; machines join from now on by: orchard join "
        f"{own} --token {shown}\n{RAY_REMAINS}"
    )
    return 0


def _list(machines: list[Machine]) -> int:
    """Print the certificates; return the exit status."""
    for one in machines:
        state = "valid" if one.revoked_s is None else f"revoked {_date(one.revoked_s)}"
        show(f"{one.address:<15}  issued {_date(one.issued_s)}  {state}")
    return 0


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
