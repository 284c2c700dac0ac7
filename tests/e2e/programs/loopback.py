"""Loopback: a network in which programs reach a recorder and nothing else."""

import contextlib
import ctypes
import os
import signal
import socket
import threading
from collections.abc import Sequence

from tests.cluster.namespaces import CLONE_NEWNET, ip, why_there_are_none


class Loopback:
    """A network namespace with nothing but loopback. Without root or iproute2 it is the machine's own network.

    Attributes:
        why_open: Why programs here could reach other networks, or None if they cannot.
    """

    def __init__(self, name: str | None = None):
        self.why_open = why_there_are_none()
        self._name = name or f"orc-programs-{os.getpid()}"
        if self.why_open is None:
            ip("netns", "add", self._name)
            ip("-n", self._name, "link", "set", "lo", "up")

    def listen(self) -> socket.socket:
        """Return a listening socket of 127.0.0.1 inside; the thread that accepts its connections may be outside."""
        made: list[socket.socket] = []

        def make() -> None:
            if self.why_open is None:
                with open(f"/run/netns/{self._name}") as namespace:
                    if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), f"namespace {self._name} cannot be entered")
            made.append(socket.create_server(("127.0.0.1", 0), backlog=64))

        thread = threading.Thread(target=make)  # setns moves a thread for good, so it gets one of its own
        thread.start()
        thread.join()
        return made[0]

    def inside(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` in this network."""
        return [*(("ip", "netns", "exec", self._name) if self.why_open is None else ()), *command]

    def pids(self) -> list[int]:
        return [] if self.why_open is not None else [int(pid) for pid in ip("netns", "pids", self._name).split()]

    def end_processes(self) -> None:
        """Kill what a program has left running inside, such as a daemon of its own."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        self.end_processes()
        if self.why_open is None:
            ip("netns", "del", self._name)
