"""`orchard service` with a real systemd: a user manager in a mount namespace whose /run says that it has booted."""

import json
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.programs.run import ORCHARD

pytestmark = pytest.mark.night("starts a server three times under systemd, of which the gate checks the unit file")

SYSTEMD = Path("/usr/lib/systemd/systemd")
READY_S, END_S = 240.0, 60.0
MANAGER = """
mount -t tmpfs tmpfs /run && mkdir -p /run/systemd/system /run/user && mkdir -m 700 "$XDG_RUNTIME_DIR"
dbus-daemon --session --address="$DBUS_SESSION_BUS_ADDRESS" --nofork &
"$0" --user &
wait $!
"""


class Manager:
    """A user's systemd, and commands that see it as theirs."""

    def __init__(self, home: Path):
        runtime = f"/run/user/{os.getuid()}"
        self._env = {
            **os.environ,
            "HOME": str(home),
            "XDG_RUNTIME_DIR": runtime,
            "DBUS_SESSION_BUS_ADDRESS": f"unix:path={runtime}/bus",
        }
        self._env.pop("XDG_CONFIG_HOME", None)
        with (home / "systemd.log").open("wb") as log:
            self._process = subprocess.Popen(
                ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c", MANAGER, str(SYSTEMD)],
                env=self._env,
                stdout=log,
                stderr=log,
            )
        self._home = home
        wait_for(lambda: self.run("systemctl", "--user", "is-system-running").stdout.strip() in ("running", "degraded"))

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command beside the manager, in the folder of its home."""
        inside = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        if not inside:
            return subprocess.CompletedProcess(command, 1, "", "the manager has not started")
        enter = ["nsenter", "--mount", "--pid", "--target", inside[0], f"--wdns={self._home}"]
        return subprocess.run([*enter, *command], env=self._env, capture_output=True, text=True)

    def stop(self) -> None:
        """End the manager and all that it has started: its first process is that of the namespace."""
        self._process.kill()
        self._process.wait()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    if os.getuid() != 0 or not SYSTEMD.exists() or shutil.which("dbus-daemon") is None:
        pytest.skip("needs root, systemd and dbus-daemon")
    manager = Manager(tmp_path)
    yield manager
    manager.stop()


def test_a_service_starts_comes_back_after_a_kill_and_is_removed(manager: Manager):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    install = (ORCHARD, "service", "install", "--", "--port", str(port))
    assert (installed := manager.run(*install)).returncode == 0, installed.stderr
    wait_for(lambda: answers(port), READY_S)
    first = process_of(manager)
    assert first is not None and "installed as it should be" in manager.run(*install).stderr
    assert process_of(manager) == first, "installing it again does not disturb it"

    manager.run("kill", "-9", first)
    wait_for(lambda: process_of(manager) not in (first, None))
    wait_for(lambda: answers(port), READY_S)

    assert (removed := manager.run(ORCHARD, "service", "remove")).returncode == 0, removed.stderr
    wait_for(lambda: not is_open(port))
    gone = manager.run(ORCHARD, "service", "status", "--json")
    assert gone.returncode == 1 and not json.loads(gone.stdout)["installed"]
    wait_for(lambda: "ray::" not in manager.run("ps", "-ax", "-o", "args").stdout)


def process_of(manager: Manager) -> str | None:
    """Return the id of the running service's process, in its namespace."""
    state = json.loads(manager.run(ORCHARD, "service", "status", "--json").stdout)
    runs = re.fullmatch(r"installed, runs as process (\d+)", state["state"])
    return runs[1] if runs is not None and state["running"] else None


def is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def answers(port: int) -> bool:
    try:
        asked = {"model": "demo", "messages": [{"role": "user", "content": "What is 12 + 30?"}]}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=asked, timeout=20)
        return "42" in answer.text
    except httpx.HTTPError:
        return False


def wait_for(holds: Callable[[], bool], limit_s: float = END_S) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {limit_s} s"
        time.sleep(0.5)
