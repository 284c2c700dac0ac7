"""Membership: the Ray of a machine that has joined a cluster, which runs on after `orchard join` and until `leave`."""

import contextlib
import json
import os
from dataclasses import asdict, dataclass

import psutil

from deployments.cluster.folder import ClusterFolder, FolderError
from deployments.cluster.ray_node import RAYLET

NODE_ID_OPTION = "--node_id="
"""Option of Ray's raylet (ray 2.60.0, _private/services.py)."""

FILE = "member.json"


@dataclass(frozen=True)
class Membership:
    """The facts that `orchard leave` needs."""

    pid: int
    """Process of `ray start --block`."""
    started_s: float
    """When that process was started, as the system counts it: with the pid it names one process."""
    head: str
    """HOST[:PORT] as it was given to `orchard join`."""
    url: str
    """URL of the server on this machine."""

    @property
    def is_running(self) -> bool:
        """Whether its Ray still runs; one that has ended is a zombie while `orchard join` waits for the engine."""
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.pid)
            return process.create_time() == self.started_s and process.status() != psutil.STATUS_ZOMBIE
        return False

    def node_id(self) -> str | None:
        """Return Ray's id of this machine, None if its raylet does not run."""
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.pid).children():
                for word in child.cmdline() if child.name() == RAYLET else ():
                    if word.startswith(NODE_ID_OPTION):
                        return word.removeprefix(NODE_ID_OPTION)
        return None


def read_membership(folder: ClusterFolder) -> Membership | None:
    """Return the membership of this machine whose Ray still runs; None if there is none. Raises FolderError."""
    found = noted_membership(folder)
    return found if found is not None and found.is_running else None


def noted_membership(folder: ClusterFolder) -> Membership | None:
    """Return the membership of a machine that has not left, whether or not its Ray runs. Raises FolderError."""
    file = folder.path / FILE
    try:
        return Membership(**json.loads(file.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise FolderError(f"{file} cannot be read: {error}; run `ray stop`, then delete it") from None


def write_membership(folder: ClusterFolder, pid: int, head: str, url: str) -> None:
    """Note that this machine has joined. Raises FolderError."""
    membership = Membership(pid, psutil.Process(pid).create_time(), head, url)
    folder.write(folder.path / FILE, json.dumps(asdict(membership), indent=2) + "\n")


def forget_membership(folder: ClusterFolder) -> None:
    """Remove the note."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(folder.path / FILE)
