"""Reserves the HTTP port, and names the process that uses it.

Ray's proxy binds with SO_REUSEPORT, so a second server would also bind and receive half of the connections. (Without
that option Ray also drops SO_REUSEADDR, and a restarted server would fail for a minute, while old connections are in
TIME_WAIT.)
"""

import contextlib
import errno
import os
import socket
from collections.abc import Iterator

import psutil

from engine.process_lock import LockHeld, ProcessLock, lock_path

CONNECT_S = 1.0
COMMANDS = ("serve", "orchard")


class PortTaken(Exception):
    """The port cannot be used; the message names the process."""


def take_port(host: str, port: int) -> ProcessLock | None:
    """Reserve the port until this process ends, and check that no program listens on it.

    A lock file keeps two servers apart that start at the same time, since a proxy binds only after many seconds.

    Args:
        host: Address to listen on.
        port: Port to listen on.

    Returns:
        The lock; None if the user's cache directory is not writable and there is no lock.

    Raises:
        PortTaken: Names the process.
    """
    lock = None
    try:
        lock = ProcessLock(lock_path(f"port-{port}"))
    except LockHeld as held:
        raise PortTaken(
            f"port {port} is reserved by an Orchard server in {held.holder}. Stop it first, or choose another "
            "http_options.port."
        ) from None
    except OSError:
        pass
    try:
        check_port(host, port)
    except PortTaken:
        if lock is not None:
            lock.release()
        raise
    return lock


def check_port(host: str, port: int) -> None:
    """Raise PortTaken if a program listens on the port, or the address cannot be bound."""
    for family, address in _addresses(host, port):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise PortTaken(_refusal(host, port)) from None
                reason = "is not an address of this machine" if error.errno == errno.EADDRNOTAVAIL else str(error)
                raise PortTaken(f"{host}:{port} cannot be served: {host} {reason}.") from None
    # On macOS SO_REUSEADDR lets a wildcard address and a specific one be bound beside each other.
    with contextlib.suppress(OSError), socket.create_connection((_connectable(host), port), CONNECT_S):
        raise PortTaken(_refusal(host, port))


def _addresses(host: str, port: int) -> list[tuple[int, tuple]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise PortTaken(f"{host}:{port} cannot be served: {host} is not a host name or address ({error}).") from None
    return [(family, address) for family, _, _, _, address in found[:1]]  # as Ray's proxy does


def _connectable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _refusal(host: str, port: int) -> str:
    holders = sorted(set(_listeners(port)))
    by = " and ".join(map(_described, holders)) if holders else "a process of another user"
    return f"port {port} of {host} is in use by {by}. Stop it first, or choose another http_options.port."


def _listeners(port: int) -> Iterator[int]:
    """Yield the processes that listen on a TCP port, as far as this user may inspect them."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            for connection in process.net_connections(kind="tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
                    yield process.pid


def _described(pid: int) -> str:
    """Describe a process, and the server command that started it, if any."""
    try:
        process = psutil.Process(pid)
        text = f"process {pid} ({_command(process)})"
        ancestors = process.parents()
    except psutil.Error:
        return f"process {pid}"
    for ancestor in ancestors:
        with contextlib.suppress(psutil.Error):  # on macOS launchd may not be inspected
            words = {os.path.basename(word) for word in ancestor.cmdline()[:2]}
            if words & set(COMMANDS):
                return f"{text}, which process {ancestor.pid} ({_command(ancestor)}) has started"
    return text


def _command(process: psutil.Process) -> str:
    words = process.cmdline()
    return " ".join([os.path.basename(words[0]), *words[1:]])[:200].strip() if words else process.name()
