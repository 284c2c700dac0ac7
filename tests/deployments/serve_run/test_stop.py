"""Ctrl-C and SIGTERM stop `serve run` as always, but only after running requests have ended."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
import ray
from ray import serve

from deployments.serve_run import stop
from deployments.serve_run.stop import drain_applications
from engine.placement import TakenOver

ROOT = Path(__file__).parents[3]
DEADLINE_S = 60.0

SERVE_RUN = """
import os, threading, time
from deployments.serve_run.stop import GracefulStop

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
        assert self._process.stdin is not None
        assert self._process.stdout is not None and self._process.stderr is not None
        self._stdin: IO[str] = self._process.stdin
        self._stdout: IO[str] = self._process.stdout
        self._stderr: IO[str] = self._process.stderr
        assert self.read() == "up"

    def read(self) -> str:
        return self._stdout.readline().strip()

    def read_complaint(self) -> str:
        """The first one; they are set off by empty lines."""
        return next(line for line in self._stderr if line.strip())

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
def test_signal_interrupts_serve_run_when_all_answers_have_ended(programs: list[Program], signum: signal.Signals):
    programs.append(program := Program())
    program.send(signum)
    assert program.read() == "draining"
    program.let_answers_end()
    assert [program.read(), program.read()] == ["drained", "interrupted"]
    assert program.end() == (0, "")


@BOTH
def test_second_signal_interrupts_serve_run_without_waiting_for_answers(
    programs: list[Program], signum: signal.Signals
):
    programs.append(program := Program())
    program.send(signal.SIGINT)
    assert program.read() == "draining"
    program.send(signum)
    assert program.read() == "interrupted"
    assert program.end()[0] == 0


def test_drain_that_ends_during_the_shutdown_sends_no_second_interrupt(programs: list[Program]):
    shutdown = "released.set(); [t.join() for t in threading.enumerate() if t.name == 'drain']; print('shut down')"
    programs.append(program := Program(drain="released.wait()", shutdown=shutdown))
    for said in ("draining", "interrupted"):
        program.send(signal.SIGINT)
        assert program.read() == said
    assert program.read() == "shut down"
    assert program.end() == (0, "")


@BOTH
@pytest.mark.parametrize("is_waited_for", [True, False])
def test_signal_during_the_shutdown_is_ignored_with_a_message(
    programs: list[Program], signum: signal.Signals, is_waited_for: bool
):
    """It would leave the rest of Serve's processes behind."""
    shutdown = "print(os.read(0, 100).decode().strip(), flush=True)"
    programs.append(program := Program(drain="" if is_waited_for else "released.wait()", shutdown=shutdown))
    program.send(signal.SIGINT)
    assert program.read() == "draining"
    if not is_waited_for:
        program.send(signum)
    assert program.read() == "interrupted"
    program.send(signum)
    assert "already shutting down" in program.read_complaint()
    program.let_answers_end()
    assert program.read() == "drained"
    assert program.end()[0] == 0


@BOTH
def test_signal_before_the_start_of_serving_interrupts_at_once(programs: list[Program], signum: signal.Signals):
    programs.append(program := Program(serving=""))
    program.send(signum)
    assert program.read() == "interrupted"
    assert program.end() == (0, "")


def test_failed_drain_is_reported_and_serve_run_is_interrupted(programs: list[Program]):
    programs.append(program := Program(drain="raise TimeoutError('no answer')"))
    program.send(signal.SIGTERM)
    assert [program.read(), program.read()] == ["draining", "interrupted"]
    code, complaints = program.end()
    assert code == 0
    assert "TimeoutError: no answer" in complaints


class Ingresses:
    """A handle to all ingresses of an application, which answer after so many seconds, or with an error."""

    def __init__(self, *says: float | Exception, after: Exception | None = None):
        self._says = says
        self._after = after
        self.asked: list[str] = []
        self.timeouts_s: list[float] = []

    def broadcast(self, method: str) -> "Ingresses":
        self.asked.append(method)
        return self

    def results(self, timeout_s: float, return_exceptions: bool) -> list[Any]:
        assert return_exceptions, "one that is gone must not keep the others from being waited for"
        self.timeouts_s.append(timeout_s)
        if self._after is not None:
            raise self._after
        time.sleep(min(timeout_s, max((s for s in self._says if isinstance(s, float)), default=0.0)))
        return [s if isinstance(s, Exception) else None for s in self._says]


def drain(monkeypatch: pytest.MonkeyPatch, applications: dict[str, Any], **timeouts_s: float) -> None:
    def get_app_handle(name: str) -> Any:
        handle = applications[name]
        if isinstance(handle, Exception):
            raise handle
        return handle

    monkeypatch.setattr(serve, "get_app_handle", get_app_handle)
    drain_applications(timeouts_s)


def test_every_ingress_is_drained_and_a_lost_ingress_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    applications = {"one": Ingresses(0.0, ConnectionError("gone")), "two": Ingresses(0.0)}
    drain(monkeypatch, applications, one=3.0, two=7.0)
    said = capsys.readouterr().err
    assert "up to 7 s" in said and "'one' could not be drained: ConnectionError: gone" in said
    for ingresses in applications.values():
        assert ingresses.asked == ["drain"]
        assert all(timeout_s > 7 for timeout_s in ingresses.timeouts_s) and len(ingresses.timeouts_s) == 1


def test_application_that_fails_to_drain_does_not_keep_other_applications_from_draining(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    failed: Any = KeyError("never started")
    last = Ingresses(0.0)
    drain(monkeypatch, {"a": failed, "b": Ingresses(after=TimeoutError("too late")), "c": last}, a=1.0, b=1.0, c=1.0)
    said = capsys.readouterr().err
    assert "Application 'a' could not be drained: KeyError" in said
    assert "Application 'b' could not be drained: TimeoutError: too late" in said
    assert last.asked == ["drain"] and len(last.timeouts_s) == 1


def test_applications_share_the_time_of_the_drain(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stop, "CLOSE_MARGIN_S", 1.0)
    applications = {name: Ingresses(60.0) for name in "abc"}
    drain(monkeypatch, applications, a=0.5, b=0.5, c=0.5)
    first, *others = [ingresses.timeouts_s[0] for ingresses in applications.values()]
    assert first == pytest.approx(1.5, abs=0.2) and others == [1.0, 1.0]


class Leaving(Ingresses):
    """A handle to the ingresses of a cluster: calls of single methods answer at once."""

    def __init__(self, says: TakenOver | Exception):
        super().__init__(0.0)
        self.moved = says
        self.called: list[tuple[Any, ...]] = []
        self.is_shut_down = False

    def __getattr__(self, method: str) -> Any:
        def remote(*args: Any) -> Any:
            self.called.append((method, *args))
            return SimpleNamespace(result=lambda timeout_s: self._result(method))

        return SimpleNamespace(remote=remote)

    def _result(self, method: str) -> TakenOver:
        self.asked.append(f"result of {method}")
        if isinstance(self.moved, Exception):
            raise self.moved
        return self.moved

    def broadcast(self, method: str, *args: Any) -> "Leaving":
        self.called.append((method, *args))
        super().broadcast(method)
        return self

    def shutdown(self) -> None:
        self.is_shut_down = True


def leave(monkeypatch: pytest.MonkeyPatch, ingresses: Leaving, num_nodes: int = 2) -> None:
    monkeypatch.setattr(serve, "get_app_handle", lambda name: ingresses)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "own"))
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True}] * num_nodes)
    stop.drain_this_node("orchard", 20.0)


def test_a_machine_that_stops_hands_its_snapshots_over_while_its_own_answers_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    ingresses = Leaving(TakenOver(5, 4, 6, 10**6, 2.0, {"room": 1}))
    leave(monkeypatch, ingresses)
    (_, own, none), (_, node_id, left_s), last = ingresses.called
    assert [name for name, *_ in ingresses.called] == ["drain_node", "hand_over", "drain_on"]
    assert own == node_id == "own" and none == 0.0 and 15 < left_s <= 20 and last == ("drain_on", "own")
    assert ingresses.asked == ["result of drain_node", "drain_on", "result of hand_over"]
    said = capsys.readouterr().err
    assert "4 of 5 snapshots are at other nodes: 1.0 MB in 2.0 s; not moved: 1 room." in said
    assert ingresses.is_shut_down


def test_a_machine_whose_answers_cannot_be_moved_still_ends_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    ingresses = Leaving(TimeoutError("no answer"))
    leave(monkeypatch, ingresses)
    assert ingresses.asked == ["result of drain_node", "drain_on", "result of hand_over"]
    assert "TimeoutError: no answer" in capsys.readouterr().err


def test_a_machine_without_others_hands_nothing_over(monkeypatch: pytest.MonkeyPatch):
    ingresses = Leaving(TakenOver())
    leave(monkeypatch, ingresses, num_nodes=1)
    assert ingresses.called == [("drain_on", "own")]
