"""A machine whose Ray has ended joins again until it leaves, or is refused."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from deployments.cluster import rejoin as rejoin_module
from deployments.cluster.folder import ClusterFolder
from deployments.cluster.membership import forget_membership, write_membership
from deployments.cluster.rejoin import REFUSED, rejoin

TIMEOUT_S = 30.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterFolder:
    monkeypatch.setattr(rejoin_module, "POLL_S", 0.02)
    monkeypatch.setattr(rejoin_module, "AGAIN_S", 0.02)
    return ClusterFolder(tmp_path)


def ray() -> "subprocess.Popen[bytes]":
    """Start a process that stands for Ray's, and ends with its input."""
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def joined(folder: ClusterFolder, process: "subprocess.Popen[bytes]") -> None:
    write_membership(folder, process.pid, "192.168.1.10", "http://127.0.0.1:8000")


class Command:
    """A command that counts how often it is given. script: of the shell, run after that."""

    def __init__(self, directory: Path, script: str):
        self._count = directory / "count"
        self.words = ["sh", "-c", f"echo >> {self._count}; {script}"]

    @property
    def num_given(self) -> int:
        return len(self._count.read_text().splitlines()) if self._count.exists() else 0


def test_it_tries_until_another_process_has_joined(folder: ClusterFolder, tmp_path: Path):
    first, second = ray(), ray()
    joined(folder, second)
    (tmp_path / "next.json").write_text((tmp_path / "member.json").read_text())
    joined(folder, first)
    again = Command(tmp_path, f"test $(wc -l < {tmp_path}/count) = 3 && mv {tmp_path}/next.json {tmp_path}/member.json")
    first.communicate(b"\n")
    assert rejoin(folder, first.pid, again.words) == 0
    assert again.num_given == 3
    second.communicate(b"\n")


def test_it_waits_while_ray_runs_and_ends_when_the_machine_leaves(folder: ClusterFolder, tmp_path: Path):
    process, again = ray(), Command(tmp_path, "exit 1")
    joined(folder, process)
    waiting = threading.Thread(target=rejoin, args=(folder, process.pid, again.words))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    forget_membership(folder)
    process.communicate(b"\n")
    waiting.join(TIMEOUT_S)
    assert not waiting.is_alive() and again.num_given == 0


def test_a_machine_that_differs_meanwhile_stays_outside(folder: ClusterFolder, tmp_path: Path):
    process, again = ray(), Command(tmp_path, f"exit {REFUSED}")
    joined(folder, process)
    process.communicate(b"\n")
    assert rejoin(folder, process.pid, again.words) == REFUSED
    assert again.num_given == 1
