"""Replication: what an ingress has answered is copied to the node that is asked next, if the option is on."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.dispatch import replication
from deployments.dispatch.replication import MAX_TURNS, Replication
from deployments.ingress import Ingress
from deployments.placement.place import Placement
from engine.placement import ConversationKeys, MovableSnapshot, Question, TakenOver
from tests.deployments.dispatch.test_hand_over import LIMIT_S, Engine, Nodes, snapshot


@dataclass
class Home(Engine):
    """An engine that gives the snapshot of each conversation that it has."""

    conversations: dict[int, MovableSnapshot] = field(default_factory=dict)
    told: list[int] = field(default_factory=list)
    copies: list[tuple[str, MovableSnapshot]] = field(default_factory=list)

    def movable_conversation(self, conversation: int) -> MovableSnapshot | None:
        self.told.append(conversation)
        if conversation < 0:
            raise ZeroDivisionError
        return self.conversations.get(conversation)

    def copy(self, address: str, moved: MovableSnapshot, timeout_s: float) -> TakenOver:
        self.copies.append((address, moved))
        return TakenOver(1, 1)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replication, "AFTER_S", 0.0)


def replicate(nodes: Nodes, *turns: tuple[int, str]) -> None:
    async def main() -> None:
        copying = Replication(nodes.placer, nodes.ask)
        for conversation, node_id in turns:
            copying.turn_ended(conversation, node_id)
        assert copying._copying is not None
        await copying._copying

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def homes(num: int, **more: Any) -> Nodes:
    return Nodes({f"node-{index}": Home(address=f"10.0.0.{index}:7", **more) for index in range(num)})


def test_a_conversation_is_copied_to_the_node_that_is_asked_when_its_own_is_lost():
    nodes, moved = homes(4), [snapshot(number) for number in range(12)]
    home: Any = nodes.engines["node-2"]
    home.conversations = dict(enumerate(moved))
    replicate(nodes, *((number, "node-2") for number in range(12)))
    left = Placement()
    nodes.placer.address_of("node-0")
    left.update(facts for node_id, facts in nodes.placer._placement._nodes.items() if node_id != "node-2")
    for number in range(12):
        question = Question("next", ConversationKeys(1, moved[number].key), 1000)
        successor: Any = nodes.engines[left.candidates(question)[0]]
        assert ("10.0.0.2:7", moved[number]) in successor.copies
    assert sum(len(engine.copies) for engine in nodes.engines.values()) == 12  # type: ignore[attr-defined]


@pytest.mark.parametrize("others, copied", [(("node-1:0", "node-1:1"), "node-1"), ((), "node-0:1")])
def test_a_copy_goes_to_another_node_and_to_the_same_only_where_there_is_no_other(others: tuple[str, ...], copied: str):
    names = ("node-0:0", "node-0:1", *others)
    nodes = Nodes({name: Home(address=f"10.0.0.1:{port}") for port, name in enumerate(names)})
    home: Any = nodes.engines["node-0:0"]
    home.conversations = {number: snapshot(number) for number in range(8)}
    replicate(nodes, *((number, "node-0:0") for number in range(8)))
    told: dict[str, int] = {name: len(engine.copies) for name, engine in nodes.engines.items()}  # type: ignore[attr-defined]
    assert sum(told.values()) == 8 == sum(num for name, num in told.items() if name.startswith(copied))


def test_several_turns_of_a_conversation_are_copied_at_once():
    nodes = homes(2)
    replicate(nodes, (1, "node-0"), (1, "node-0"), (1, "node-1"))
    told: list[Any] = [engine.told for engine in nodes.engines.values()]  # type: ignore[attr-defined]
    assert told == [[], [1]]


def test_the_oldest_of_many_conversations_are_given_up():
    nodes = homes(2)
    replicate(nodes, *((number, "node-0") for number in range(MAX_TURNS + 10)))
    home: Any = nodes.engines["node-0"]
    assert home.told == list(range(10, MAX_TURNS + 10))


@pytest.mark.parametrize("engine", [Home(is_silent=True), Home(address=""), Home()])
def test_a_node_that_gives_nothing_is_passed_over(engine: Home):
    nodes = Nodes({"node-0": engine, "node-1": Home(conversations={2: snapshot(2)}), "node-2": Home()})
    replicate(nodes, (1, "node-0"), (2, "node-1"))
    assert sum(len(one.copies) for one in nodes.engines.values()) == 1  # type: ignore[attr-defined]


def test_a_failure_ends_no_other_copy():
    nodes = homes(2)
    home: Any = nodes.engines["node-0"]
    home.conversations = {2: snapshot(2)}
    replicate(nodes, (-1, "node-0"), (2, "node-0"))
    other: Any = nodes.engines["node-1"]
    assert [moved.digest for _, moved in other.copies] == [snapshot(2).digest]


@pytest.mark.parametrize("is_on", [False, True])
def test_an_ingress_copies_what_it_has_answered_if_the_option_is_on(is_on: bool):
    noted, forgotten = list[tuple[int, str]](), list[bool]()
    own = SimpleNamespace(
        _replicates=is_on,
        _graph=SimpleNamespace(forget=lambda: forgotten.append(True)),
        _client=SimpleNamespace(replication=SimpleNamespace(turn_ended=lambda *turn: noted.append(turn))),
    )
    request = SimpleNamespace(keys=ConversationKeys(1, 2, (3,)))
    Ingress.func_or_class._answer_ended(own, request, SimpleNamespace(node_id="node-1"))  # type: ignore[attr-defined]
    assert noted == ([(2, "node-1")] if is_on else []) and forgotten == [True]
