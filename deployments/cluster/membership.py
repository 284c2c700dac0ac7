"""Membership: the processes of a machine that has joined a cluster, which run on after `orchard join` until `leave`."""

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
    """Process of `ray start --block`; 0 while this machine serves alone."""
    started_s: float
    """When that process was started, as the system counts it: with the pid it names one process."""
    head: str
    """HOST[:PORT] as it was given to `orchard join`."""
    url: str
    """URL of the server on this machine."""
    agent_pid: int = 0
    """The member process."""
    agent_started_s: float = 0.0
    """When it was started."""

    @property
    def is_running(self) -> bool:
        """Whether its Ray still runs; one that has ended is a zombie while its parent waits for something else."""
        return _is(self.pid, self.started_s)

    @property
    def has_agent(self) -> bool:
        """Whether its member process still runs."""
        return _is(self.agent_pid, self.agent_started_s)

    def node_id(self) -> str | None:
        """Return Ray's id of this machine, None if its raylet does not run."""
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.pid).children():
                for word in child.cmdline() if child.name() == RAYLET else ():
                    if word.startswith(NODE_ID_OPTION):
                        return word.removeprefix(NODE_ID_OPTION)
        return None


def read_membership(folder: ClusterFolder) -> Membership | None:
    """Return the membership of this machine, of which a process still runs; None if there is none.

    Raises:
        FolderError: The note cannot be read.
    """
    file = folder.path / FILE
    try:
        found = Membership(**json.loads(file.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise FolderError(f"{file} cannot be read: {error}; run `ray stop`, then delete it") from None
    return found if found.is_running or found.has_agent else None


def write_membership(folder: ClusterFolder, pid: int, head: str, url: str, agent_pid: int = 0) -> None:
    """Note that this machine has joined. Raises FolderError."""
    membership = Membership(pid, _started(pid), head, url, agent_pid, _started(agent_pid))
    folder.write(folder.path / FILE, json.dumps(asdict(membership), indent=2) + "\n")


def forget_membership(folder: ClusterFolder) -> None:
    """Remove the note."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(folder.path / FILE)


def _started(pid: int) -> float:
    return psutil.Process(pid).create_time() if pid else 0.0


def _is(pid: int, started_s: float) -> bool:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid) if pid else None
        return process is not None and process.create_time() == started_s and process.status() != psutil.STATUS_ZOMBIE
    return False
