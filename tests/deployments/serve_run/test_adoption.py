"""A member may take a cluster over under conditions, and a replaced head is refused; loopback, without Ray."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from deployments.cluster.headship import Headship, read_headship, write_headship
from deployments.cluster.membership import write_membership
from deployments.serve_run import adoption
from deployments.serve_run.adoption import find_adoption, refuse_if_adopted, take_over, tell_replaced
from deployments.serve_run.checks import CannotStart
from tests.deployments.cluster.machines import (
    CLUSTER,
    FIRST,
    HEAD,
    SECOND,
    TOKEN,
    HeadMachine,
    MemberMachine,
    choose_ports,
)


class Cluster:
    """A head and two members that have copied its log; the Ray of the first one is another process."""

    def __init__(self, directory: Path, stack: ExitStack):
        self.head = HeadMachine(directory / HEAD)
        self.first, self.second = (
            MemberMachine(directory / FIRST, FIRST),
            MemberMachine(directory / SECOND, SECOND, 2.0),
        )
        for machine in (self.head, self.first, self.second):
            stack.callback(machine.stop)
        for member in (self.first, self.second, self.first):
            assert member.watch.tick()
        ray = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        stack.callback(ray.communicate, b"\n")
        write_membership(self.first.folder, ray.pid, HEAD, "http://127.0.0.1:8000", os.getpid())

    def lose_head(self) -> None:
        self.head.stop()
        for member in (self.first, self.second):
            member.be_silent(20)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    choose_ports(monkeypatch)
    monkeypatch.setattr(adoption, "addresses_here", lambda: [FIRST])
    with ExitStack() as stack:
        yield Cluster(tmp_path, stack)


def refusal(cluster: Cluster, is_forced: bool = False) -> str:
    with pytest.raises(CannotStart) as refused:
        find_adoption(cluster.first.folder, is_forced)
    return str(refused.value)


def test_a_machine_without_a_cluster_adopts_none(cluster: Cluster):
    with pytest.raises(CannotStart, match="it belongs to none"):
        find_adoption(cluster.second.folder, False)


def test_a_head_that_answers_is_not_replaced(cluster: Cluster):
    assert f"the head at {HEAD} answers" in refusal(cluster, is_forced=True)


def test_a_head_that_another_member_hears_is_not_replaced(cluster: Cluster):
    cluster.lose_head()
    cluster.second.be_silent(3)
    assert f"{SECOND} has heard the head at {HEAD} 3 s ago" in refusal(cluster, is_forced=True)


def test_a_machine_without_a_copy_or_with_an_old_one_is_refused_until_it_is_forced(cluster: Cluster):
    cluster.lose_head()
    copy = cluster.first.folder.log_copy
    old_s = time.time() - 600
    os.utime(copy, (old_s, old_s))
    said = refusal(cluster)
    assert "s older than the last answer" in said and "at most 30 s" in said and "--force" in said
    assert find_adoption(cluster.first.folder, True).copied_s == pytest.approx(old_s)
    copy.unlink()
    assert f"no copy of the log of {HEAD}" in refusal(cluster, is_forced=True)


def test_a_member_takes_over_and_no_other_one_does_it_again(cluster: Cluster):
    cluster.lose_head()
    found = find_adoption(cluster.first.folder, False)
    assert (found.old, found.own_address, found.members) == (Headship(HEAD, 1), FIRST, (SECOND,))
    take_over(cluster.first.folder, found)
    assert cluster.first.folder.store_log.read_bytes() == cluster.head.folder.store_log.read_bytes()
    started = cluster.first.folder.started()
    assert (started["address"], started["term"], started["replaced"]) == (FIRST, 2, [HEAD])
    assert started["application"] == {"args": 1}
    cluster.first.watch.tick()
    cluster.second.watch.tick()
    assert cluster.first.heads == cluster.second.heads == [Headship(FIRST, 2)]


def test_a_cluster_that_was_taken_over_is_not_taken_over_from_the_old_head(cluster: Cluster):
    cluster.lose_head()
    write_headship(cluster.second.folder, Headship(SECOND, 2))
    cluster.second.watch.tick()
    assert f"{SECOND} has taken this cluster over already, as {SECOND} says" in refusal(cluster, is_forced=True)


def test_a_head_that_comes_back_asks_its_members_and_refuses(cluster: Cluster, capsys: pytest.CaptureFixture[str]):
    own = Headship(HEAD, 1)
    refuse_if_adopted(cluster.head.folder, own)
    assert capsys.readouterr().err == "", "the members still follow this head"
    cluster.lose_head()
    write_headship(cluster.first.folder, Headship(FIRST, 2))
    cluster.first.watch.tick()
    with pytest.raises(CannotStart, match=f"{FIRST} has taken over .*orchard join {FIRST}"):
        refuse_if_adopted(cluster.head.folder, own)
    for member in (cluster.first, cluster.second):
        member.stop()
    refuse_if_adopted(cluster.head.folder, own)
    assert "None of the 2 other machines of this cluster answers" in capsys.readouterr().err


def test_a_head_that_hears_of_its_successor_ends_and_refuses_from_then_on(cluster: Cluster):
    assert tell_replaced([HEAD, "127.0.0.9"], Headship(FIRST, 1), CLUSTER, TOKEN) == [], "no higher term"
    assert tell_replaced([HEAD], Headship(FIRST, 2), "a new cluster", TOKEN) == []
    assert tell_replaced([HEAD], Headship(FIRST, 2), CLUSTER, "another token") == []
    assert tell_replaced([HEAD, "127.0.0.9"], Headship(FIRST, 2), CLUSTER, TOKEN) == [HEAD]
    assert cluster.head.adopted_by == [Headship(FIRST, 2)]
    write_headship(cluster.head.folder, Headship(FIRST, 2))
    assert read_headship(cluster.head.folder) == Headship(FIRST, 2)
    with pytest.raises(CannotStart, match=f"{FIRST} has taken over"):
        refuse_if_adopted(cluster.head.folder, Headship(HEAD, 1))
