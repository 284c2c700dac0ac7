"""The head of a cluster is killed for good: a member takes the cluster over, and the others go on."""

import json
import os
import signal
import time
from collections.abc import Iterator

import pytest

from tests.cluster.conftest import wait_until
from tests.cluster.members import READY_S, Member, members, serve, token_of
from tests.cluster.test_head import BACK_S, PAUSE_S, Load
from tests.cluster.test_partition import PORT

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.night("deployments/cluster/test_log_copy.py and deployments/serve_run/test_adoption.py, without Ray"),
]


URL = f"http://127.0.0.1:{PORT}"


@pytest.fixture(scope="module")
def three() -> Iterator[list[Member]]:
    with members(3) as made:
        yield made


def has_copy(member: Member) -> bool:
    return (member.home / ".orchard" / "cluster" / "gcs.copy").exists()


def join(member: Member, head: Member, *more: str) -> None:
    joined = member.orchard("join", head.machine.address, "--token", token_of(head), *more)
    assert joined.wait() == 0, joined.output[-4000:]


def processes(member: Member) -> set[int]:
    """Return the processes of all replicas of the cluster, as a machine tells it."""
    status = member.node.get("/v1/status")
    return {one["pid"] for name in ("ingress", "engines", "text", "mllm") for one in status[name]}


def kill_member_process(member: Member) -> None:
    """Kill it, and wait for its successor, which goes on with the same Ray."""
    note = member.home / ".orchard" / "cluster" / "member.json"
    before = json.loads(note.read_text())
    os.kill(before["agent_pid"], signal.SIGKILL)
    wait_until(lambda: json.loads(note.read_text())["agent_pid"] != before["agent_pid"], READY_S)
    assert json.loads(note.read_text())["pid"] == before["pid"]


def test_a_member_takes_over_and_the_third_machine_never_stops(three: list[Member]):
    old, new, other = three
    serve(old).wait_for("orchard join")
    for member in (new, other):
        join(member, old)
    wait_until(lambda: has_copy(new) and has_copy(other) and new.num_engines() == 3, READY_S)
    refused = new.orchard("serve", "--cluster", "--adopt")
    assert refused.wait() == 1 and f"the head at {old.machine.address} answers" in refused.output
    kill_member_process(other)
    kept = processes(other) - set(old.pids().values())
    assert len(kept) == 8
    with Load(new.node) as at_new, Load(other.node) as at_other:
        time.sleep(PAUSE_S)
        old.machine.end_processes()
        time.sleep(15)
        adopted_at = time.monotonic()
        adopting = new.orchard("serve", "--cluster", "--adopt", "--no-dashboard")
        adopting.wait_for("Orchard is ready", BACK_S)
        ready_s = time.monotonic() - adopted_at
        wait_until(lambda: other.num_engines() == new.num_engines() == 2, READY_S, lambda: adopting.output[-4000:])
        settled_s = time.monotonic() - adopted_at
        time.sleep(10)
    assert "it goes on" in adopting.output
    assert processes(new) == processes(other) == kept
    answers = at_new.answers + at_other.answers
    assert [answer.error for answer in answers] == [None] * len(answers)
    assert {answer.status for answer in answers} == {200}
    print(  # noqa: T201
        f"ready {ready_s:.0f} s after the command, both engines known after {settled_s:.0f} s; {len(answers)} answers "
        f"at both machines, the slowest in {max(answer.seconds for answer in answers):.1f} s"
    )


def test_the_old_head_comes_back_and_does_not_split_the_cluster(three: list[Member]):
    old, new, other = three
    kept = processes(other)
    again = serve(old)
    assert again.wait() == 1
    said = f"{new.machine.address} has taken over the cluster of this machine, which is no longer its head."
    assert said in again.output and f"orchard join {new.machine.address}" in again.output
    print(again.output)  # noqa: T201
    wait_until(lambda: not old.machine.pids(), READY_S)
    join(old, new)
    wait_until(lambda: [one.num_engines() for one in three] == [3] * 3, READY_S)
    assert kept < processes(other)
    shown = other.orchard("nodes", "--url", URL)
    assert shown.wait() == 0
    assert f"head {new.machine.address}, heard" in shown.output and "copies of its log: " in shown.output, shown.output
    wait_until(lambda: (old.home / ".orchard" / "cluster" / "gcs.copy").exists(), READY_S)


def test_a_head_that_is_cut_off_while_another_one_takes_over_ends_and_its_machine_joins_again(three: list[Member]):
    third, cut, new = three
    kept = set(third.pids().values()) | set(new.pids().values())
    cut.machine.pull_the_cable()
    time.sleep(15)
    with Load(third.node) as at_third:
        adopting = new.orchard("serve", "--cluster", "--adopt", "--no-dashboard")
        adopting.wait_for("Orchard is ready", BACK_S)
        wait_until(lambda: third.num_engines() == 2, READY_S)
        assert cut.node.ask([{"role": "user", "content": "Cut off?"}]).result(timeout=120).status == 200
        cut.machine.plug_the_cable()
        adopting.wait_for(f"{cut.machine.address}, the head before this one, has come back", READY_S)
        wait_until(lambda: third.num_engines() == cut.num_engines() == 3, BACK_S, lambda: log_of(cut))
    assert kept < processes(third)
    assert {(answer.status, answer.error is None) for answer in at_third.answers} == {(200, True)}


def log_of(member: Member) -> str:
    return (member.home / ".orchard" / "cluster" / "member.log").read_text()
