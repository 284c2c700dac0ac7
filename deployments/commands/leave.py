"""Leave the cluster: move the answers and the snapshots of this machine to the others, then stop its Ray."""

import argparse
import os

from deployments.cluster.folder import HEAD_LOCK, ClusterFolder, FolderError
from deployments.cluster.headship import read_headship
from deployments.cluster.membership import Membership, forget_membership, read_membership
from deployments.cluster.ray_node import end_session
from deployments.commands.connection import KEY_VARIABLE, TIMEOUT_S, Connection, Refused, Unreachable
from deployments.commands.drain import DEADLINE_S, add_deadline
from deployments.commands.leaving import drain_member
from deployments.commands.member_process import end_agent
from deployments.commands.output import CommandError, UsageError, say
from engine.process_lock import holder_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("--force", action="store_true", help="stop Ray also if the answers cannot be moved")
    parser.add_argument(
        "--forget",
        action="store_true",
        help="delete the cluster's token and this machine's certificate, without which it needs a token to join again",
    )
    add_deadline(parser)
    parser.add_argument("--key", help=f"administrative API key; default: the variable {KEY_VARIABLE}")


def run(options: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    folder = ClusterFolder()
    try:
        member, headship = read_membership(folder), read_headship(folder)
    except FolderError as error:
        raise CommandError(str(error)) from None
    head = holder_of(folder.path / HEAD_LOCK)
    _refuse(member, head, options)
    if member is None:
        return _forget(folder)
    try:
        if member.is_running:  # else it serves alone, and that server drains by itself
            timeout_s = TIMEOUT_S + (options.deadline or DEADLINE_S)
            server = Connection(member.url, options.key or os.environ.get(KEY_VARIABLE), timeout_s)
            drain_member(server, member, options.deadline)
    except (Unreachable, Refused) as error:
        if not options.force:
            raise CommandError(f"the answers cannot be moved: {error}. `orchard leave --force` ends them") from None
        say(f"The answers were not moved: {error}")
    end_agent(member)
    if member.is_running:
        end_session(member.pid)
    forget_membership(folder)
    folder.forget_copy()
    if head is None:
        folder.tls.authority_key.unlink(missing_ok=True)
    if options.forget:
        folder.forget_secrets()
    say(f"This machine has left the cluster of {member.head if headship is None else headship.address}.")
    return 0


def _refuse(member: Membership | None, head: str | None, options: argparse.Namespace) -> None:
    """Raise CommandError or UsageError if this machine cannot leave as it is asked to."""
    if member is None and head is not None:
        raise CommandError(
            f"this machine is the head of its cluster, by {head}: Ctrl-C there moves its answers and ends it, and the "
            "other machines wait for it to come back"
        )
    if member is None and not options.forget:
        raise CommandError("this machine belongs to no cluster, or its Ray has ended")
    if head is not None and not options.force:
        raise CommandError("this machine is also the head of its cluster: stop `orchard serve` first, or give --force")
    if head is not None and options.forget:
        raise UsageError("--forget would delete what the head of this machine needs: stop `orchard serve` first")


def _forget(folder: ClusterFolder) -> int:
    """Delete the secrets of the cluster that this machine has left; return the exit status."""
    folder.forget_copy()
    folder.forget_secrets()
    say("This machine has no token and no certificate of a cluster now.")
    return 0
