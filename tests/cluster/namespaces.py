"""Machines that are network namespaces of this one, each with an address of its own: a cable can be pulled.

Needs root and iproute2. No address outside of the namespaces is touched: the bridge has none.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

CLONE_NEWNET = 0x40000000
MAX_THREADS = 16
END_TIMEOUT_S = 20.0
GIVES_WAY = 5
"""Niceness of sessions that give way."""


def ip(*arguments: str) -> str:
    """Raises RuntimeError with what `ip` complains of."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def why_there_are_none() -> str | None:
    """Why this machine can make no network namespaces, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need iproute2 (apt-get install iproute2)"
    name = f"orc-try-{os.getpid()}"
    try:
        ip("netns", "add", name)
        ip("netns", "del", name)
    except RuntimeError as error:
        return f"network namespaces cannot be made here: {error}"
    return None


class Machine:
    """One namespace, with the interface eth0."""

    def __init__(self, name: str, address: str, cable: str, bridge: str):
        """
        Args:
            cable: Name of the other end of eth0, which is plugged into the bridge.
        """
        self.name = name
        self.address = address
        self._cable = cable
        self._processes: list[subprocess.Popen[str]] = []
        ip("netns", "add", name)
        ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("link", "set", cable, "master", bridge, "up")
        for command in (f"addr add {address}/24 dev eth0", "link set eth0 up", "link set lo up"):
            ip("-n", name, *command.split())
        self._threads = ThreadPoolExecutor(MAX_THREADS, initializer=self._enter)

    def _enter(self) -> None:
        """Moves the calling thread, and the sockets that it will make, into the namespace."""
        with open(f"/run/netns/{self.name}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"namespace {self.name} cannot be entered")

    def submit(self, work: Callable[..., T], *arguments: Any) -> Any:
        """Does it in a thread on that machine, whose own addresses it reaches as 127.0.0.1. A concurrent Future."""
        return self._threads.submit(work, *arguments)

    def start(self, command: list[str], env: dict[str, str], log: Path, niceness: int = 5) -> subprocess.Popen[str]:
        """Starts a process on that machine. Its output goes to `log`, its stdin is a pipe."""
        with log.open("w") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, "nice", "-n", str(niceness), *command],
                env=env,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def pull_the_cable(self) -> None:
        """Nothing reaches the machine or leaves it from now on, and nobody is told: no FIN, no RST."""
        ip("link", "set", self._cable, "down")

    def plug_the_cable(self) -> None:
        """Undo `pull_the_cable`."""
        ip("link", "set", self._cable, "up")

    def pids(self) -> list[int]:
        return [int(pid) for pid in ip("netns", "pids", self.name).split()]

    def give_way(self) -> None:
        """Let sessions that start on other machines go before those of this one, as on cores of their own.

        Linux shares the cores among sessions first, whatever the niceness of their processes (sched(7), autogroup).
        """
        for pid in self.pids():
            if pid != os.getpid():
                with contextlib.suppress(OSError):
                    Path(f"/proc/{pid}/autogroup").write_text(f"{GIVES_WAY}\n")

    def end_processes(self) -> None:
        deadline = time.monotonic() + END_TIMEOUT_S
        while (pids := [pid for pid in self.pids() if pid != os.getpid()]) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.2)
        for process in self._processes:
            process.kill()
            process.communicate()
        self._processes.clear()

    def remove(self) -> None:
        """Ends all processes of the machine, and the machine."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.end_processes()
        ip("link", "del", self._cable)
        ip("netns", "del", self.name)


@contextlib.contextmanager
def machines(num_machines: int) -> Iterator[list[Machine]]:
    """So many machines on one bridge: 10.213.77.1, 10.213.77.2, ..."""
    tag = str(os.getpid())
    bridge = f"orb{tag}"
    ip("link", "add", bridge, "type", "bridge")
    with contextlib.ExitStack() as stack:
        stack.callback(ip, "link", "del", bridge)
        ip("link", "set", bridge, "up")
        made = []
        for i in range(1, num_machines + 1):
            made.append(Machine(f"orc{tag}-{i}", f"10.213.77.{i}", f"orv{tag}-{i}", bridge))
            stack.callback(made[-1].remove)
        yield made
