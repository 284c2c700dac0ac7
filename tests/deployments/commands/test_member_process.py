"""The member process over loopback, with other programs instead of Ray and of the server that serves alone."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from deployments.cluster import ports
from deployments.cluster.comparison import Line
from deployments.cluster.facts import read_facts
from deployments.cluster.folder import ClusterFolder
from deployments.cluster.headship import Headship, write_headship
from deployments.cluster.join_client import HeadAnswer, HeadClient, compare_with_head
from deployments.cluster.join_server import JoinServer
from deployments.cluster.membership import Membership, read_membership, write_membership
from deployments.cluster.ray_node import NodeOptions
from deployments.commands import member_process, member_supervisor
from deployments.commands.alone import CONFIG, AloneServer, note_of_ray
from deployments.commands.member_process import MemberProcess, MemberSettings
from tests.deployments.cluster.machines import FIRST, HEAD, TOKEN, HeadMachine, choose_ports

RAY = [sys.executable, "-c", "import time; print('Ray runtime started.', flush=True); time.sleep(600)"]
ALONE = [sys.executable, "-c", "import time; time.sleep(600)"]
TIMEOUT_S = 60.0
KILLED_ONCE = """
import os, signal, sys
print(sys.argv[1:], sys.stdin.read(), flush=True)
if not sys.argv[1:]:
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(3)
"""


class ToldHead(HeadMachine):
    """A head that also answers `orchard join`."""

    def __init__(self, directory: Path):
        super().__init__(directory)
        self.server.stop()
        self.server = JoinServer(HEAD, ports.JOIN, TOKEN, self.facts, self.service.answers())
        self.server.start()

    def facts(self) -> dict[str, Any]:
        url, gcs = "http://127.0.0.1:1", f"{HEAD}:{ports.GCS}"
        return {
            "facts": read_facts([]).as_json(),
            "gcs": gcs,
            "url": url,
            "resources": {"mlx": 1.0},
            "engines_per_node": "all",
            "device": "auto",
            "term": 1,
        }


def compare_without_address(head: HeadClient, answer: HeadAnswer, address: str) -> list[Line]:
    """Leave out the line that refuses addresses of loopback."""
    return [line for line in compare_with_head(head, answer, address) if line.name != "address"]


class Member:
    """The process, as a thread of this one."""

    def __init__(self, folder: ClusterFolder, alone_after_s: float | None, is_again: bool = False):
        self.folder = folder
        url, gcs = "http://127.0.0.1:1", f"{HEAD}:{ports.GCS}"
        settings = MemberSettings(HEAD, gcs, 1, FIRST, url, {"mlx": 1.0}, 2**27, alone_after_s)
        self.process = MemberProcess(settings, folder)
        self._thread = threading.Thread(target=self.process.run, args=(is_again,))
        self._thread.start()

    @property
    def membership(self) -> Membership | None:
        return read_membership(self.folder)

    def wait_for(self, condition: Callable[[Membership], bool]) -> Membership:
        deadline = time.monotonic() + TIMEOUT_S
        while (found := self.membership) is None or not condition(found):
            assert time.monotonic() < deadline and self._thread.is_alive(), found
            time.sleep(0.05)
        return found

    def end(self) -> None:
        self.process.end()
        self._thread.join()


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    choose_ports(monkeypatch)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(NodeOptions, "command", lambda self: RAY)
    monkeypatch.setattr(AloneServer, "command", lambda self, config: ALONE)
    monkeypatch.setattr(member_process, "compare_with_head", compare_without_address)
    for name in ("TICK_S", "ALONE_TICK_S", "AGAIN_S"):
        monkeypatch.setattr(member_process, name, 0.1)
    with ExitStack() as made:
        yield made


def start(stack: ExitStack, tmp_path: Path, alone_after_s: float | None = None) -> tuple[ToldHead, Member]:
    folder = ClusterFolder(tmp_path / FIRST)
    folder.make()
    folder.write_token(TOKEN)
    head = ToldHead(tmp_path / HEAD)
    stack.callback(head.stop)
    member = Member(folder, alone_after_s)
    stack.callback(member.end)
    return head, member


def test_a_silent_head_makes_the_machine_serve_alone_and_an_answer_lets_it_join_again(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    head, member = start(stack, tmp_path, alone_after_s=1.0)
    first = member.wait_for(lambda found: found.is_running)
    assert first.agent_pid == os.getpid() and first.head == HEAD
    deadline = time.monotonic() + TIMEOUT_S
    while not member.folder.log_copy.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert member.folder.log_copy.read_bytes() == head.folder.store_log.read_bytes()
    note = note_of_ray(os.environ)
    note.parent.mkdir()
    note.touch()
    head.stop()
    member.wait_for(lambda found: not found.pid)
    assert not psutil.pid_exists(first.pid) and not note.exists()
    while (server := children_with(ALONE)) == [] and time.monotonic() < deadline:
        time.sleep(0.05)
    config = json.loads((member.folder.path / CONFIG).read_text())
    assert config["http_options"] == {"host": "127.0.0.1", "port": 8000}, "the head's, on loopback"
    again = ToldHead(tmp_path / HEAD)
    stack.callback(again.stop)
    second = member.wait_for(lambda found: found.is_running)
    assert second.pid != first.pid and not server[0].is_running()
    member.end()
    assert not psutil.pid_exists(second.pid), "the member process ends Ray"


def children_with(command: list[str]) -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.cmdline()[1:] == command[1:]]


def test_a_process_that_follows_a_killed_one_goes_on_with_its_ray_and_the_newest_head(stack: ExitStack, tmp_path: Path):
    _, member = start(stack, tmp_path)
    ray = psutil.Process(member.wait_for(lambda found: found.is_running).pid)
    started, member.process._ray._process = member.process._ray._process, None  # a killed process ends nothing
    assert started is not None
    member.end()
    write_headship(member.folder, Headship("127.0.0.9", 7))
    write_membership(member.folder, ray.pid, HEAD, "http://127.0.0.1:1")
    again = Member(member.folder, None, is_again=True)
    stack.callback(again.end)
    second = again.wait_for(lambda found: found.has_agent)
    assert second.pid == ray.pid and again.process._relay.target == ("127.0.0.9", ports.GCS)
    again.end()
    started.wait(TIMEOUT_S)
    assert not psutil.pid_exists(ray.pid)


def test_the_supervisor_starts_a_killed_process_again_and_ends_with_one_that_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    package = tmp_path / "deployments" / "commands"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    shutil.copy(str(member_supervisor.__file__), package)
    (package / "member_process.py").write_text(KILLED_ONCE)
    done = subprocess.run(
        [sys.executable, "-m", "deployments.commands.member_supervisor"],
        input="the settings",
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 3 and done.stdout == "[] the settings\n['--again'] the settings\n"
    assert done.stderr == "The member process was ended by signal 9; it is started again.\n"


def test_ray_that_has_ended_is_started_again_while_the_head_answers(stack: ExitStack, tmp_path: Path):
    _, member = start(stack, tmp_path)
    first = member.wait_for(lambda found: found.is_running)
    psutil.Process(first.pid).kill()
    second = member.wait_for(lambda found: found.is_running and found.pid != first.pid)
    assert second.agent_pid == os.getpid()


def test_a_machine_that_differs_from_the_head_by_now_stays_out(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    head, member = start(stack, tmp_path)
    first = member.wait_for(lambda found: found.is_running)
    told = head.facts()
    other = {**told, "facts": {**told["facts"], "python": "3.11.99"}}
    head.server.stop()
    head.server = JoinServer(HEAD, ports.JOIN, TOKEN, lambda: other, head.service.answers())
    head.server.start()
    psutil.Process(first.pid).kill()
    said, deadline = "", time.monotonic() + TIMEOUT_S
    while "does not join again: Python: " not in said and time.monotonic() < deadline:
        time.sleep(0.1)
        said += capsys.readouterr().err
    assert "3.11.99 on the head" in said
    membership = member.membership
    assert membership is not None and not membership.is_running
