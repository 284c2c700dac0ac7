"""HandOver between engines that answer, refuse or are silent: who is told to fetch what."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from deployments.dispatch import hand_over
from deployments.dispatch.hand_over import MAX_SHARED, MAX_SNAPSHOTS, HandOver
from deployments.dispatch.placer import FACTS, Placer
from deployments.placement.place import Placement
from deployments.requests import EngineAnswer, SilentEngine
from engine.placement import ConversationKeys, MovableSnapshot, Question, TakenOver
from tests.deployments.fake_handle import FakeHandle, running

LIMIT_S = 10.0


def snapshot(number: int, **more: Any) -> MovableSnapshot:
    fields: dict[str, Any] = {"rate": 1.0, "key": number * 0x9E3779B97F4A7C15, "is_shared": False, **more}
    return MovableSnapshot(f"{number:032x}", 1000, 10**6, idle_s=1.0, has_images=False, **fields)


@dataclass
class Engine:
    """An engine that has `snapshots`, and takes all over that it is told of unless it `refuses` or is silent."""

    snapshots: Sequence[MovableSnapshot] = ()
    refuses: str = ""
    is_silent: bool = False
    address: str = "10.0.0.1:7"
    taken: list[tuple[str, list[MovableSnapshot], float]] = field(default_factory=list)
    warmed: list[Any] = field(default_factory=list)
    asked: list[tuple[int, bool]] = field(default_factory=list)

    def movable_snapshots(self, max_snapshots: int, shared_only: bool = False) -> tuple[MovableSnapshot, ...]:
        self.asked.append((max_snapshots, shared_only))
        return tuple(one for one in self.snapshots if one.is_shared or not shared_only)

    def take_over(self, address: str, snapshots: list[MovableSnapshot], timeout_s: float) -> TakenOver:
        if self.refuses:
            return TakenOver(len(snapshots), refused={self.refuses: len(snapshots)})
        self.taken.append((address, snapshots, timeout_s))
        return TakenOver(len(snapshots), len(snapshots), len(snapshots), 10 * len(snapshots), 1.0)

    def warm_up(self, sources: list[Any]) -> None:
        self.warmed.append(sources)


class Nodes(FakeHandle):
    """Engines by node."""

    def __init__(self, engines: dict[str, Engine]):
        self.engines = engines
        self.replicas = running(*engines)
        for name, engine in engines.items():
            key = name.replace("node", "replica")
            self.replicas[key].replica_metadata = {FACTS: {"snapshots": engine.address}}
        handle: Any = self
        self.placer = Placer(handle)
        self.hand_over = HandOver(handle, self.placer, self.ask)

    def running(self) -> dict[str, Any]:
        return self.replicas

    async def ask(self, method: str, node_id: str, *args: Any, timeout_s: float | None = None) -> Any:
        engine = self.engines[node_id]
        if engine.is_silent:
            return SilentEngine(node_id, "no answer")
        return EngineAnswer(node_id, "", getattr(engine, method)(*args))

    def leave(self, node_id: str = "node-0", timeout_s: float = 60.0) -> TakenOver:
        return asyncio.run(asyncio.wait_for(self.hand_over.leave([node_id], timeout_s), LIMIT_S))


MANY = [snapshot(number) for number in range(30)]


def test_each_snapshot_goes_to_the_node_that_the_next_turn_asks_first():
    nodes = Nodes({"node-0": Engine(MANY, address="10.0.0.9:7"), **{f"node-{i}": Engine() for i in (1, 2, 3)}})
    taken = nodes.leave()
    assert (taken.num_offered, taken.num_taken, taken.refused) == (30, 30, {})
    placement = Placement()
    placement.update(nodes.placer._placement._nodes[f"node-{i}"] for i in (1, 2, 3))
    for node_id in ("node-1", "node-2", "node-3"):
        [(address, got, timeout_s)] = nodes.engines[node_id].taken
        assert address == "10.0.0.9:7" and 59 < timeout_s <= 60
        assert got == [one for one in MANY if one in got], "the hottest first, as they were offered"
        for one in got:
            question = Question("next", ConversationKeys(1, one.key), one.num_tokens)
            assert placement.candidates(question)[0] == node_id
    assert nodes.engines["node-0"].asked == [(MAX_SNAPSHOTS, False)]


@pytest.mark.parametrize("engine", [Engine(refuses="draining"), Engine(is_silent=True), Engine(address="")])
def test_snapshots_of_a_node_that_cannot_take_them_go_to_the_next_one(engine: Engine):
    nodes = Nodes({"node-0": Engine(MANY), "node-1": engine, "node-2": Engine()})
    taken = nodes.leave()
    assert (taken.num_offered, taken.num_taken, taken.refused) == (30, 30, {})
    assert sorted(one.digest for _, got, _ in nodes.engines["node-2"].taken for one in got) == [m.digest for m in MANY]


def test_snapshots_that_no_node_can_take_are_counted():
    nodes = Nodes({"node-0": Engine(MANY), "node-1": Engine(refuses="draining"), "node-2": Engine(address="")})
    taken = nodes.leave()
    assert (taken.num_offered, taken.num_taken, taken.refused) == (30, 0, {"no_receiver": 30})
    assert "0 of 30 snapshots are at other nodes" in str(taken) and "30 no_receiver" in str(taken)


def test_what_a_node_refuses_for_its_value_is_told_and_goes_nowhere_else():
    nodes = Nodes({"node-0": Engine(MANY), "node-1": Engine(refuses="room"), "node-2": Engine()})
    taken = nodes.leave()
    assert taken.num_taken + taken.refused["room"] == 30 and taken.refused["room"] > 0
    assert set(taken.refused) == {"room"}


@pytest.mark.parametrize("engine", [Engine(MANY, address=""), Engine(MANY, is_silent=True), Engine()])
def test_a_node_that_shares_nothing_hands_nothing_over(engine: Engine):
    nodes = Nodes({"node-0": engine, "node-1": Engine()})
    assert nodes.leave() == TakenOver()
    assert str(TakenOver()) == "It has no snapshots that other nodes could fetch."


def test_without_time_nothing_is_asked():
    nodes = Nodes({"node-0": Engine(MANY), "node-1": Engine()})
    assert nodes.leave(timeout_s=0.0) == TakenOver() and not nodes.engines["node-0"].asked


def warm(nodes: Nodes, node_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Look some times at the engines of a node."""
    monkeypatch.setattr(hand_over, "LOOK_S", 0.0)

    async def look() -> None:
        looking = asyncio.ensure_future(nodes.hand_over.keep_warm(node_id))
        for _ in range(20):
            await asyncio.sleep(0)
        looking.cancel()

    asyncio.run(asyncio.wait_for(look(), LIMIT_S))


def shared(number: int, rate: float) -> MovableSnapshot:
    return snapshot(number, is_shared=True, rate=rate)


def test_a_new_engine_is_told_of_the_hottest_shared_prefixes_once(monkeypatch):
    first = Engine([shared(1, 3.0), shared(2, 5.0), snapshot(9)], address="10.0.0.1:7")
    second = Engine([shared(1, 4.0), *(shared(number, 0.1) for number in range(10, 20))], address="10.0.0.2:7")
    nodes = Nodes({"node-0": first, "node-1": second, "node-2": Engine()})
    warm(nodes, "node-2", monkeypatch)
    [sources] = nodes.engines["node-2"].warmed
    assert sources[:2] == [("10.0.0.1:7", [shared(2, 5.0)]), ("10.0.0.2:7", [shared(1, 4.0)])]
    assert len(sources) == MAX_SHARED and all(one.is_shared for _, [one] in sources)
    assert first.asked == second.asked == [(MAX_SHARED, True)]


def test_an_engine_that_is_replaced_is_warmed_again(monkeypatch):
    monkeypatch.setattr(hand_over, "LOOK_S", 0.0)
    nodes = Nodes({"node-0": Engine([shared(1, 1.0)]), "node-1": Engine()})

    async def main() -> None:
        looking = asyncio.ensure_future(nodes.hand_over.keep_warm("node-1"))
        for num_warmed in (1, 2):
            for _ in range(20):
                await asyncio.sleep(0)
            assert len(nodes.engines["node-1"].warmed) == num_warmed
            nodes.replicas["replica-1"].replica_id.unique_id = "another"
        looking.cancel()

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_both_engines_of_a_node_are_warmed_also_if_the_first_fails(monkeypatch):
    nodes = Nodes({"node-0": Engine([shared(1, 1.0)]), "node-1:0": Engine(), "node-1:1": Engine()})
    warm(nodes, "node-1", monkeypatch)
    assert [len(nodes.engines[f"node-1:{number}"].warmed) for number in (0, 1)] == [1, 1]
    failing, second = Engine(), Engine()
    monkeypatch.setattr(failing, "warm_up", None)
    nodes = Nodes({"node-0": Engine([shared(1, 1.0)]), "node-1:0": failing, "node-1:1": second})
    warm(nodes, "node-1", monkeypatch)
    assert len(second.warmed) == 1


def test_engines_that_leave_together_hand_over_to_those_of_other_nodes():
    first, second = MANY[:15], MANY[15:]
    names = {"node-0:0": Engine(first, address="10.0.0.9:7"), "node-0:1": Engine(second, address="10.0.0.9:8")}
    nodes = Nodes({**names, "node-1:0": Engine(), "node-1:1": Engine()})
    taken = asyncio.run(asyncio.wait_for(nodes.hand_over.leave(list(names), 60.0), LIMIT_S))
    assert (taken.num_offered, taken.num_taken, taken.refused) == (30, 30, {})
    assert not names["node-0:0"].taken and not names["node-0:1"].taken
    got = [
        (address, one)
        for name in ("node-1:0", "node-1:1")
        for address, each, _ in nodes.engines[name].taken
        for one in each
    ]
    assert sorted(one.digest for _, one in got) == sorted(one.digest for one in MANY)
    assert {address for address, one in got if one in first} == {"10.0.0.9:7"}


def test_a_node_that_shares_nothing_is_not_warmed(monkeypatch):
    own = Engine(address="")
    nodes = Nodes({"node-0": Engine([shared(1, 1.0)]), "node-1": own})
    warm(nodes, "node-1", monkeypatch)
    assert not own.warmed and not nodes.engines["node-0"].asked


def test_a_node_without_neighbours_that_know_anything_is_left_alone(monkeypatch):
    nodes = Nodes({"node-0": Engine(is_silent=True), "node-1": Engine(), "node-2": Engine()})
    warm(nodes, "node-2", monkeypatch)
    assert not nodes.engines["node-2"].warmed
