import os
import subprocess
import sys
from pathlib import Path

import pytest

from deployments.cluster.folder import ClusterFolder, FolderError
from deployments.cluster.membership import FILE, forget_membership, read_membership, write_membership


@pytest.fixture
def folder(tmp_path: Path) -> ClusterFolder:
    return ClusterFolder(tmp_path)


def test_a_machine_is_a_member_while_its_ray_runs(folder: ClusterFolder):
    assert read_membership(folder) is None
    ray = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    write_membership(folder, ray.pid, "192.168.1.10", "http://127.0.0.1:8000")
    member = read_membership(folder)
    assert member is not None and (member.pid, member.head) == (ray.pid, "192.168.1.10")
    ray.communicate(b"\n")
    assert read_membership(folder) is None


def test_a_ray_that_has_ended_is_none_although_its_parent_has_not_noticed(folder: ClusterFolder):
    ray = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    write_membership(folder, ray.pid, "192.168.1.10", "http://127.0.0.1:8000")
    assert ray.stdin is not None
    ray.stdin.close()
    os.waitid(os.P_PID, ray.pid, os.WEXITED | os.WNOWAIT)
    assert read_membership(folder) is None
    ray.wait()


def test_another_process_with_its_pid_is_not_taken_for_it(folder: ClusterFolder):
    write_membership(folder, os.getpid(), "192.168.1.10", "http://127.0.0.1:8000")
    file = folder.path / FILE
    file.write_text(file.read_text().replace('"started_s": ', '"started_s": 1'))
    assert read_membership(folder) is None


def test_a_broken_note_is_named_and_can_be_forgotten(folder: ClusterFolder):
    (folder.path / FILE).write_text("{")
    with pytest.raises(FolderError, match=r"member.json cannot be read"):
        read_membership(folder)
    forget_membership(folder)
    forget_membership(folder)
    assert read_membership(folder) is None


def test_a_machine_that_serves_alone_is_a_member_by_its_member_process(folder: ClusterFolder):
    agent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    write_membership(folder, 0, "192.168.1.10", "http://127.0.0.1:8000", agent.pid)
    member = read_membership(folder)
    assert member is not None and member.has_agent and not member.is_running and member.node_id() is None
    agent.communicate(b"\n")
    assert read_membership(folder) is None
