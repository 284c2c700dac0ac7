"""RayNode: Ray on this machine as `ray start --block` runs it; a start that hangs is repeated."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from deployments.cluster import ports
from deployments.cluster.folder import TlsFiles

STARTED = "Ray runtime started"
"""The last line of `ray start` (ray 2.60.0, scripts/scripts.py)."""

RAYLET = "raylet"
"""Name of the process that every node has."""

STARTS = 6
START_S = 150.0
"""Time for one start. On a busy machine it takes half a minute, and raylets give up before."""
RAYLET_WAIT_S = 120
STOP_S = 8.0
"""Time for Ray's processes to end by themselves, which they do not with Serve's actors. A kill loses nothing: the store
has each change before it is answered."""
KILL_S = 5.0
POLL_S = 0.2
SHOWN_CHARS = 1500

RECONNECT_S = 600
"""How long the machines of a cluster wait for a head that is gone."""


class RayFailed(Exception):
    """Ray does not start; the message is for the operator."""


@dataclass(frozen=True)
class NodeOptions:
    """How Ray runs on this machine."""

    address: str
    """Address of this machine by which the others reach it."""
    resources: Mapping[str, float]
    object_store_bytes: int
    head_address: str | None = None
    """ADDRESS:PORT of the head's GCS; None: this machine is the head."""
    dashboard: bool = False
    """Whether the head has Ray's dashboard."""
    is_beside: bool = False
    """Whether the head runs beside the Ray of a member on this machine, which has the engine: it then only leads."""
    secret_options: tuple[str, ...] = field(default=(), repr=False)

    @property
    def ports(self) -> Mapping[str, int]:
        """Option of `ray start` to port."""
        return ports.BESIDE if self.is_beside else ports.NODE

    def command(self) -> list[str]:
        """Return the command that starts it."""
        numbers = dict(self.ports)
        if self.head_address is None:
            numbers |= {"port": ports.GCS, **ports.HEAD_ONLY}
            own = ["--head", f"--include-dashboard={str(self.dashboard).lower()}", "--dashboard-host=127.0.0.1"]
        else:
            own = [f"--address={self.head_address}"]
        return [
            str(Path(sys.executable).parent / "ray"),
            "start",
            *own,
            f"--node-ip-address={self.address}",
            *(f"--{name}={port}" for name, port in numbers.items()),
            f"--resources={json.dumps(dict(self.resources))}",
            f"--object-store-memory={self.object_store_bytes}",
            *(["--num-cpus=0"] if self.is_beside else ()),
            *self.secret_options,
            "--block",
        ]


def set_variables(environ: MutableMapping[str, str], token_file: Path, tls: TlsFiles | None = None) -> None:
    """Set the environment variables of every process that belongs to the cluster; the operator's waits are kept.

    Args:
        environ: Where to set them.
        token_file: Token of the cluster.
        tls: Certificate of this machine; None: Ray's traffic is not encrypted.
    """
    if tls is not None:
        environ["RAY_USE_TLS"] = "1"
        environ["RAY_TLS_SERVER_CERT"] = str(tls.certificate)
        environ["RAY_TLS_SERVER_KEY"] = str(tls.key)
        environ["RAY_TLS_CA_CERT"] = str(tls.authority)
    environ["RAY_AUTH_MODE"] = "token"
    environ["RAY_AUTH_TOKEN_PATH"] = str(token_file)
    environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "1"
    environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(RECONNECT_S))
    environ.setdefault("RAY_raylet_start_wait_time_s", str(RAYLET_WAIT_S))
    for name, port in ports.VARIABLES.items():
        environ[name] = str(port)


def contradiction_in(environ: Mapping[str, str]) -> str | None:
    """Return why a variable contradicts those that a cluster sets itself; None if none does."""
    for name in ("RAY_AUTH_TOKEN", "RAY_ADDRESS", "RAY_REDIS_ADDRESS", "RAY_USE_TLS"):
        if environ.get(name):
            return f"{name} is set, which a cluster of Orchard's sets itself: unset it"
    mode = environ.get("RAY_AUTH_MODE", "token")
    return None if mode == "token" else f"RAY_AUTH_MODE is {mode!r}; the machines of a cluster need 'token': unset it"


class RayNode:
    """Ray's processes on this machine, children of a `ray start --block` that ends when one of them does."""

    def __init__(self, options: NodeOptions, environ: Mapping[str, str], output: Path):
        """Store the settings.

        Args:
            options: How Ray runs.
            environ: Environment of its processes.
            output: File for what `ray start` prints.
        """
        self._options = options
        self._environ = environ
        self._output = output
        self._process: subprocess.Popen[bytes] | None = None
        self._attached: psutil.Process | None = None

    @property
    def pid(self) -> int:
        """Process of `ray start`."""
        process = self._process or self._attached
        assert process is not None
        return process.pid

    @property
    def has_ended(self) -> bool:
        """Whether a node that was started runs no longer."""
        if self._attached is not None:
            return not _runs(self._attached)
        return self._process is not None and self._process.poll() is not None

    def attach(self, pid: int) -> None:
        """Take over a node that a process before this one has started. Raises psutil.NoSuchProcess."""
        self._attached = psutil.Process(pid)

    def start(self) -> None:
        """Start Ray; return when it runs. Raises RayFailed."""
        for attempt in range(STARTS):
            with self._output.open("wb") as output:
                self._process = subprocess.Popen(
                    self._options.command(),
                    env=dict(self._environ),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            if self._is_up():
                return
            self.stop()
            if attempt < STARTS - 1:
                sys.stderr.write("Ray has not started in time, as on a busy machine: it is started once more.\n")
        printed = self._printed()[-SHOWN_CHARS:]
        raise RayFailed(f"Ray has not started in {STARTS} tries. It has printed, in {self._output}:\n{printed}")

    def stop(self) -> None:
        """End Ray's processes on this machine."""
        if self._attached is not None:
            end_session(self._attached.pid)
        if self._process is not None:
            end_session(self._process.pid)
            self._process.wait()

    def _is_up(self) -> bool:
        """Wait for the start. A raylet whose agents are too slow ends after 15 s, and `ray start` waits on for it."""
        deadline, had_raylet = time.monotonic() + START_S, False
        while time.monotonic() < deadline and not self.has_ended:
            if STARTED in self._printed():
                return True
            has_raylet = self._has_raylet()
            if had_raylet and not has_raylet:
                return False
            had_raylet = has_raylet
            time.sleep(POLL_S)
        return False

    def _has_raylet(self) -> bool:
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(self.pid).children()
            return any(child.name() == RAYLET and child.status() != psutil.STATUS_ZOMBIE for child in children)
        return False

    def _printed(self) -> str:
        return self._output.read_text(errors="replace")


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def end_session(pid: int) -> None:
    """End the leader of a session, which ends its children, and then whatever is left of the session."""
    family = set(_members(pid))
    with contextlib.suppress(psutil.NoSuchProcess):
        leader = psutil.Process(pid)
        family |= {leader, *leader.children(recursive=True)}
        leader.terminate()
        psutil.wait_procs([leader], STOP_S)
    _, left = psutil.wait_procs(family | set(_members(pid)), KILL_S)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, KILL_S)


def _members(session: int) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getsid(process.pid) == session:
                yield process
