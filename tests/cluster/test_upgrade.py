"""Three machines get another commit's sources one after the other, while streams run at all of them."""

import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import wait_until
from tests.cluster.members import READY_S, Command, Member, members, serve, token_of
from tests.cluster.test_partition import ROOT, Answer

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.night("deployments/calls/test_population.py keeps the choice, test_partition.py the moved streams"),
]

NUM_STREAMS = 12
STREAM: dict[str, Any] = {"stream": True, "max_tokens": 60, "min_tokens": 60}
PAUSE_S = 6.0
SETTLED_S = 2.0
"""Time for requests that were sent just before to have reached an engine."""
BACK_S = 500.0


def other_commit(directory: Path) -> Path:
    """Copy the sources; change a comment, and add an option that the engine's replica needs."""
    for folder in ("deployments", "engine"):
        shutil.copytree(ROOT / folder, directory / folder)
    core = directory / "engine" / "core" / "engine_core.py"
    core.write_text(core.read_text() + "# Another commit.\n")
    option = directory / "engine" / "config.py"
    text, num = re.subn(
        r"^(class EngineConfig\(Frozen\):\n    .*\n)", r"\1\n    added: int = 7\n", option.read_text(), flags=re.M
    )
    assert num == 1
    option.write_text(text)
    replica = directory / "deployments" / "model_replica.py"
    text, num = re.subn(
        r"^(        join_serve_log\(\)\n)", r"\1        assert config.added == 7\n", replica.read_text(), flags=re.M
    )
    assert num == 1
    replica.write_text(text)
    return directory


@dataclass
class Asked:
    """A stream that was asked for at a machine, which had these sources then."""

    number: int
    member: Member
    sources: Path | None
    answer: Answer


class Streams:
    """Streams that are asked for anew when they end, at the machines that are open."""

    def __init__(self, opened: list[Member]):
        self._opened = opened
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.asked: list[Asked] = []
        self.failed: list[Exception] = []
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(NUM_STREAMS)]

    def close(self, member: Member) -> None:
        """Ask this machine no more."""
        with self._lock:
            self._opened.remove(member)
        time.sleep(SETTLED_S)

    def open(self, member: Member) -> None:
        with self._lock:
            self._opened.append(member)

    def _run(self, number: int) -> None:
        turn = number
        while not self._stop.is_set():
            with self._lock:
                member = self._opened[turn % len(self._opened)]
                sources = member.sources
                future = ask(member, number)
            try:
                self.asked.append(Asked(number, member, sources, future.result(timeout=READY_S)))
            except Exception as error:
                self.failed.append(error)
            turn += 1
            time.sleep(PAUSE_S)

    def __enter__(self) -> "Streams":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def ask(member: Member, number: int) -> "Future[Answer]":
    return member.node.ask([{"role": "user", "content": f"{number}: What is 12 + 30?"}], **STREAM)


@pytest.fixture(scope="module")
def three() -> Iterator[list[Member]]:
    with members(3) as made:
        yield made


def populations(member: Member) -> dict[str, str]:
    """Node -> population of its engine."""
    return {one["node_id"]: one["population"] for one in member.node.get("/v1/status")["engines"]}


def upgrade_head(head: Member, serving: Command, new: Path, others: list[Member]) -> None:
    """End the head as its operator does, and start it from the new sources; the others must not notice."""
    before = [other.pids() for other in others]
    serving.process.send_signal(signal.SIGINT)
    assert serving.wait() == 0, serving.output[-4000:]
    head.sources = new
    again = serve(head)
    again.wait_for("orchard join", BACK_S)
    assert "it goes on" in again.output, again.output[-4000:]
    wait_until(lambda: len(head.pids()) == 4 and head.num_engines() == 3, READY_S)
    assert [other.pids() for other in others] == before


def upgrade_member(member: Member, head: Member, new: Path) -> None:
    """Let a member leave, and join with the new sources, without which the head refuses it."""
    left = member.orchard("leave")
    assert left.wait() == 0, left.output
    refused = member.orchard("join", head.machine.address)
    assert refused.wait() == 2 and "✗ Orchard" in refused.output, refused.output
    member.sources = new
    joined = member.orchard("join", head.machine.address)
    assert joined.wait() == 0, joined.output
    wait_until(lambda: head.num_engines() == 3, READY_S)


def test_a_cluster_is_upgraded_machine_by_machine_and_no_stream_is_lost(three: list[Member], tmp_path: Path):
    head, *others = three
    serving = serve(head)
    serving.wait_for("orchard join")
    for other in others:
        assert other.orchard("join", head.machine.address, "--token", token_of(head)).wait() == 0
    wait_until(lambda: all(member.num_engines() == 3 for member in three), READY_S)
    known, new = populations(head), other_commit(tmp_path / "new")
    (old,) = set(known.values())
    undisturbed = [ask(three[number % 3], number).result(timeout=READY_S).text for number in range(NUM_STREAMS)]
    with Streams([*three]) as streams:
        streams.close(head)
        for other in others:
            other.machine.give_way()
        upgrade_head(head, serving, new, others)
        for num_new, other in enumerate(others, start=1):
            known |= (nodes := populations(head))
            assert sum(population != old for population in nodes.values()) == num_new
            streams.open(three[num_new - 1])
            streams.close(other)
            for stays in three:
                stays.machine.give_way()
            upgrade_member(other, head, new)
        known |= (nodes := populations(head))
        streams.open(others[-1])
    (upgraded,) = set(nodes.values())
    assert streams.failed == [] and upgraded != old
    answers = [asked.answer for asked in streams.asked]
    assert [answer.error for answer in answers] == [None] * len(answers)
    assert [answer.text for answer in answers] == [undisturbed[asked.number] for asked in streams.asked]
    by_sources = {None: old, new: upgraded}
    assert [known[one.answer.node_id] for one in streams.asked] == [by_sources[one.sources] for one in streams.asked]
    counts = [sum(known[one.node_id] == population for one in answers) for population in (old, upgraded)]
    print(  # noqa: T201
        f"{len(answers)} streams, all whole: {counts[0]} by the old code, {counts[1]} by the new; the slowest took "
        f"{max(answer.seconds for answer in answers):.0f} s"
    )
