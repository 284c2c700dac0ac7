"""What Ctrl-C and SIGTERM do to `serve run`: first what runs comes to its end, then it goes on as it always did."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from ray import serve

from deployments.launch_stop import drain_applications

ROOT = Path(__file__).parent.parent.parent
DEADLINE_S = 60.0

SERVE_RUN = """
import os, threading, time
from deployments.launch_stop import GracefulStop

released = threading.Event()

def drain():
    print("draining", flush=True)
    {drain}

stop = GracefulStop(drain)
stop.install()
{serving}
try:
    print("up", flush=True)
    while True:
        time.sleep(10)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    {shutdown}
"""


class Program:
    """A stand-in for `serve run`, which sleeps in just this way."""

    def __init__(
        self,
        drain: str = "print(os.read(0, 100).decode().strip(), flush=True)",
        serving: str = "stop.serving()",
        shutdown: str = "",
    ):
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVE_RUN.format(drain=drain, serving=serving, shutdown=shutdown)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin: IO[str] = self._process.stdin
        self._stdout: IO[str] = self._process.stdout
        assert self.read() == "up"

    def read(self) -> str:
        return self._stdout.readline().strip()

    def let_answers_end(self) -> None:
        self._stdin.write("drained\n")
        self._stdin.flush()

    def send(self, signum: signal.Signals) -> None:
        self._process.send_signal(signum)

    def end(self) -> tuple[int, str]:
        """Exit code and what it complained about."""
        _, complaints = self._process.communicate(timeout=DEADLINE_S)
        return self._process.returncode, complaints

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def programs() -> Iterator[list[Program]]:
    started: list[Program] = []
    yield started
    for program in started:
        program.kill()


BOTH = pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])


@BOTH
def test_it_is_interrupted_when_all_answers_have_ended(programs: list[Program], signum: signal.Signals):
    programs.append(program := Program())
    program.send(signum)
    assert program.read() == "draining"
    program.let_answers_end()
    assert [program.read(), program.read()] == ["drained", "interrupted"]
    assert program.end() == (0, "")


@BOTH
def test_a_second_signal_does_not_wait_for_them(programs: list[Program], signum: signal.Signals):
    programs.append(program := Program())
    program.send(signal.SIGINT)
    assert program.read() == "draining"
    program.send(signum)
    assert program.read() == "interrupted"
    assert program.end()[0] == 0


def test_answers_that_end_because_serve_is_shut_down_do_not_interrupt_it_again(programs: list[Program]):
    shutdown = "released.set(); [t.join() for t in threading.enumerate() if t.name == 'drain']; print('shut down')"
    programs.append(program := Program(drain="released.wait()", shutdown=shutdown))
    for said in ("draining", "interrupted"):
        program.send(signal.SIGINT)
        assert program.read() == said
    assert program.read() == "shut down"
    assert program.end() == (0, "")


@BOTH
def test_as_long_as_nothing_is_served_there_is_nothing_to_wait_for(programs: list[Program], signum: signal.Signals):
    programs.append(program := Program(serving=""))
    program.send(signum)
    assert program.read() == "interrupted"
    assert program.end() == (0, "")


def test_who_cannot_be_waited_for_is_told_of_and_stopped_all_the_same(programs: list[Program]):
    programs.append(program := Program(drain="raise TimeoutError('nobody answers')"))
    program.send(signal.SIGTERM)
    assert [program.read(), program.read()] == ["draining", "interrupted"]
    code, complaints = program.end()
    assert code == 0
    assert "TimeoutError: nobody answers" in complaints


class Ingresses:
    """A handle to all ingresses of an application."""

    def __init__(self, says: list[Any]):
        self._says = says
        self.asked: list[str] = []
        self.timeouts_s: list[float] = []

    def broadcast(self, method: str) -> "Ingresses":
        self.asked.append(method)
        return self

    def results(self, timeout_s: float, return_exceptions: bool) -> list[Any]:
        assert return_exceptions, "one that is gone must not keep the others from being waited for"
        self.timeouts_s.append(timeout_s)
        return self._says


def test_every_ingress_of_every_application_is_drained_and_one_that_is_gone_is_told_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    applications = {"one": Ingresses([None, ConnectionError("gone")]), "two": Ingresses([None])}
    monkeypatch.setattr(serve, "get_app_handle", applications.__getitem__)
    drain_applications({"one": 3.0, "two": 7.0})
    said = capsys.readouterr().err
    assert "up to 7 s" in said and "ConnectionError: gone" in said
    for ingresses in applications.values():
        assert ingresses.asked == ["drain"]
        assert all(timeout_s > 7 for timeout_s in ingresses.timeouts_s) and len(ingresses.timeouts_s) == 1
