"""`orchard nodes` shows the cluster as a head and as a member know it; over loopback."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from deployments.cluster import cluster_view
from deployments.cluster.cluster_view import NoView, read_view, view_line
from deployments.cluster.folder import HEAD_LOCK, ClusterFolder
from deployments.cluster.membership import write_membership
from tests.deployments.cluster.machines import FIRST, HEAD, SHARED, HeadMachine, MemberMachine, choose_ports

LOCK = """
import sys
from pathlib import Path
from engine.process_lock import ProcessLock
lock = ProcessLock(Path(sys.argv[1]))
print("locked", flush=True)
input()
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[HeadMachine, MemberMachine]]:
    choose_ports(monkeypatch)
    monkeypatch.setattr(cluster_view, "addresses_here", lambda: [FIRST])
    with ExitStack() as stack:
        head, member = HeadMachine(tmp_path / HEAD), MemberMachine(tmp_path / FIRST, FIRST)
        stack.callback(head.stop)
        stack.callback(member.stop)
        for _ in range(2):
            assert member.watch.tick()
        yield head, member


def test_head_and_member_see_the_same_copy(cluster: tuple[HeadMachine, MemberMachine]):
    head, member = cluster
    write_membership(member.folder, os.getpid(), HEAD, "http://127.0.0.1:8000")
    head.folder.note_started(SHARED["started"])
    lock = subprocess.Popen(  # the lock must be that of another process
        [sys.executable, "-c", LOCK, str(head.folder.path / HEAD_LOCK)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert lock.stdout is not None and lock.stdout.readline() == b"locked\n"
    try:
        for folder in (head.folder, member.folder):
            view = read_view(folder)
            assert view is not None and (view.head, view.num_members, view.num_fresh) == (HEAD, 1, 1)
            assert [copy.address for copy in view.copies] == [FIRST] and view.copies[0].age_s < 30
            assert view_line(folder) == view.describe() and f"copies of its log: {FIRST} (" in view.describe()
    finally:
        lock.communicate(b"\n")


def test_a_silent_head_and_its_copies_grow_old(cluster: tuple[HeadMachine, MemberMachine]):
    _, member = cluster
    write_membership(member.folder, os.getpid(), HEAD, "http://127.0.0.1:8000")
    member.be_silent(100)
    view = read_view(member.folder)
    assert view is not None and view.heard_age_s >= 100 and view.num_fresh == 0
    member.stop()
    with pytest.raises(NoView, match=r"does not answer at port .*orchard leave --force"):
        read_view(member.folder)


def test_a_machine_without_a_cluster_has_none(tmp_path: Path):
    folder = ClusterFolder(tmp_path)
    assert read_view(folder) is None and view_line(folder) is None
