"""A server of the tests: `serve run` or `orchard serve` with a changed serve_config.yaml, or one that runs already."""

import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import httpx
import psutil
import yaml

log = logging.getLogger(__name__)

ROOT = Path(__file__).parent.parent.parent
SHIPPED_CONFIG = ROOT / "serve_config.yaml"
START_TIMEOUT_S = 300.0  # half a minute on two idle cores
STOP_TIMEOUT_S = 60.0

MAX_RUNNING, MAX_QUEUE, DRAIN_S, SPARSE_THRESHOLD = 4, 12, 10.0, 512
"""Settings of the small server. SPARSE_THRESHOLD: tokens."""
SCORING_DEADLINE_S = 110.0
"""`spec_prefill.deadline_s` of the small server. Other test processes on its cores can make scoring 10 times slower."""

SERVE_RUN, ORCHARD_SERVE = ("serve", "run"), ("orchard", "serve", "--config")

LATE = ("mllm", "spec_prefill")
"""Deployments that may start after the first engine, as `/v1/status` names them."""

Change = Callable[[dict[str, Any]], None]


class Server(Protocol):
    """A server of this machine.

    Attributes:
        base_url: Without a path.
        pid: Of the command that has started it.
        ray_dir: Where Ray and all processes of the cluster write their logs, unless the environment says otherwise.
        output: What the command has printed so far.
    """

    base_url: str

    @property
    def pid(self) -> int: ...

    @property
    def ray_dir(self) -> Path: ...

    @property
    def output(self) -> str: ...

    def stop(self) -> object: ...


class RunningServer:
    """A server that runs before and after the tests: ORCHARD_SERVER names its URL, process and output, with blanks."""

    def __init__(self, named: str):
        self.base_url, pid, log = named.split(" ")
        self.pid, self._log, self.ray_dir = int(pid), Path(log), Path("/tmp/ray/session_latest").resolve()

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def stop(self) -> None:
        """Stop the server as Ctrl-C does; .ci/run checks its exit code."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            process.send_signal(signal.SIGINT)
            process.wait(STOP_TIMEOUT_S)


class ServeRun:
    """One `serve run`, or `orchard serve`, with a Ray cluster of its own under /tmp (socket paths must stay short)."""

    def __init__(self, change: Change, env: dict[str, str] | None = None, command: Sequence[str] = SERVE_RUN):
        config = yaml.safe_load(SHIPPED_CONFIG.read_text())
        config["http_options"]["port"] = free_port()
        change(config)
        self.base_url = f"http://127.0.0.1:{config['http_options']['port']}"
        self.answers_while_starting: list[httpx.Response] = []
        self._dir = Path(tempfile.mkdtemp(prefix="orc-", dir="/tmp"))
        self._log = self._dir / "serve_run.log"
        path = self._dir / "serve_config.yaml"
        path.write_text(yaml.safe_dump(config))
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self._command = [str(Path(sys.executable).parent / command[0]), *command[1:], str(path)]
        self._env = {**inherited, "RAY_TMPDIR": str(self._dir), **(env or {})}
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("w") as log:
            return subprocess.Popen(
                self._command, cwd=ROOT, env=self._env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def ray_dir(self) -> Path:
        return self._dir

    def wait_ready(self) -> None:
        """Wait for the line that the server prints when it is ready."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while "Orchard is ready" not in self.output:
            assert self.process.poll() is None, (
                f"the command ended with {self.process.returncode}:\n{self.output[-8000:]}"
            )
            assert time.monotonic() < deadline, f"not ready after {START_TIMEOUT_S} s:\n{self.output[-8000:]}"
            with contextlib.suppress(httpx.TransportError):
                self.answers_while_starting.append(httpx.get(f"{self.base_url}/v1/models", timeout=10))
            time.sleep(0.2)

    def wait_complete(self) -> None:
        """Wait until the scorer runs, too: it starts when requests are answered already."""
        self.wait_ready()
        wait_for_late(self.base_url)

    def stop(self) -> int:
        """Stop the server as Ctrl-C does. Returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        return self.process.wait(STOP_TIMEOUT_S)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(STOP_TIMEOUT_S)

    def clean_up(self) -> None:
        self._kill()
        shutil.rmtree(self._dir, ignore_errors=True)


def wait_for_late(base_url: str) -> None:
    """Wait until a server that is ready also has its scorer, and an image planner if its model reads text alone."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not all((status := httpx.get(f"{base_url}/v1/status", timeout=30).json())[name] for name in LATE):
        assert time.monotonic() < deadline, status
        time.sleep(0.5)


@contextlib.contextmanager
def serve_run(
    change: Change = lambda config: None, env: dict[str, str] | None = None, command: Sequence[str] = SERVE_RUN
) -> Iterator[ServeRun]:
    server = ServeRun(change, env, command)
    try:
        yield server
    finally:
        server.clean_up()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
