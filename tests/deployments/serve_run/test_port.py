"""A port that is in use is refused with the process that has it: real sockets, real processes."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from deployments.serve_run.port import PortTaken, check_port, take_port
from tests.e2e.server import free_port

ROOT = Path(__file__).parents[3]

LISTEN = """
import socket, sys
with socket.socket() as listener:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind((sys.argv[1], int(sys.argv[2])))
    listener.listen()
    print("up", flush=True)
    sys.stdin.read()
"""

TAKE = """
import sys
from deployments.serve_run.port import take_port
take_port("127.0.0.1", int(sys.argv[1]))
print("up", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """start(code, *arguments): another process, that is up."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str, *arguments: str | int) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("listens", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_a_port_that_another_process_listens_on_is_refused_with_its_pid(
    start: Callable[..., subprocess.Popen[str]], host: str, listens: str
):
    """With SO_REUSEPORT, as Ray's proxy does: a second proxy would bind as well."""
    port = free_port()
    listener = start(LISTEN, listens, port)
    with pytest.raises(PortTaken, match=rf"port {port} of {host} is in use by process {listener.pid} \(python"):
        check_port(host, port)


def test_a_listener_is_named_although_its_ancestors_may_not_be_inspected(
    start: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
):
    """As launchd and login on macOS."""
    port = free_port()
    listener, cmdline = start(LISTEN, "127.0.0.1", port), psutil.Process.cmdline

    def of_own_processes(process: psutil.Process) -> list[str]:
        if process.pid != listener.pid:
            raise psutil.AccessDenied(process.pid)
        return cmdline(process)

    monkeypatch.setattr(psutil.Process, "cmdline", of_own_processes)
    with pytest.raises(PortTaken, match=rf"is in use by process {listener.pid} \(python"):
        check_port("127.0.0.1", port)


def test_second_server_on_a_port_is_refused_with_the_pid_until_the_first_ends(
    start: Callable[..., subprocess.Popen[str]],
):
    port = free_port()
    first = start(TAKE, port)
    with pytest.raises(PortTaken, match=rf"port {port} is reserved by an Orchard server in process {first.pid} "):
        take_port("127.0.0.1", port)
    first.kill()
    first.wait(30)
    lock = take_port("127.0.0.1", port)
    assert lock is not None
    lock.release()


def test_port_with_old_connections_in_time_wait_is_free():
    """A server may be started again as soon as the one before has ended."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        connection, _ = server.accept()
        connection.close()  # the side that closes first keeps the port in TIME_WAIT
        assert client.recv(1) == b""
        client.close()
    with socket.socket() as strict, pytest.raises(OSError):
        strict.bind(("127.0.0.1", port))
    check_port("127.0.0.1", port)


def test_free_port_is_accepted_without_a_lock_when_the_cache_is_not_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("HOME", str(blocked))
    assert take_port("127.0.0.1", free_port()) is None


@pytest.mark.parametrize(
    ("host", "reason"), [("192.0.2.77", "is not an address of this machine"), ("no.such.invalid", "is not a host name")]
)
def test_unusable_host_is_named_with_the_reason(host: str, reason: str):
    with pytest.raises(PortTaken, match=f"{host}.*{reason}"):
        check_port(host, free_port())


def test_lock_of_a_refused_port_is_released(start: Callable[..., subprocess.Popen[str]]):
    port = free_port()
    listener = start(LISTEN, "127.0.0.1", port)
    with pytest.raises(PortTaken, match=f"process {listener.pid} "):
        take_port("127.0.0.1", port)
    listener.kill()
    listener.wait(30)
    lock = take_port("127.0.0.1", port)
    assert lock is not None and os.getpid()
    lock.release()
