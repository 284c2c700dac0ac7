"""Which snapshots an engine offers to others, in which order, and with which keys."""

from dataclasses import replace

import pytest

from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.core.memory.costs import MemoryCosts
from engine.placement import ConversationKeys, MovableSnapshot
from engine.protocol import EngineRequest
from tests.engine.core.prefix_cache.test_disk_tier import SYSTEM, request
from tests.support.clock import Clock
from tests.support.driver import Driver, fix_prefill_costs
from tests.support.fake_runner import BYTES_PER_TOKEN, STATE_BYTES, FakeRunner

TOKEN_S = 0.1


def turn(conversation: int, num_turns: int, system: int = 0) -> EngineRequest:
    parts = [[token + 200 * system for token in SYSTEM], *([100 * conversation + i] * 20 for i in range(num_turns))]
    turns = tuple(1000 * conversation + i for i in range(num_turns, 0, -1))
    return request(f"{conversation}-{num_turns}", *parts, keys=ConversationKeys(system, conversation, turns))


class Engine(Driver):
    """An engine in virtual time, with an unlimited cache."""

    def __init__(self) -> None:
        self.clock = Clock()
        runner = FakeRunner()
        runner.costs = MemoryCosts(token_bytes=BYTES_PER_TOKEN, state_bytes=STATE_BYTES)
        super().__init__(runner, clock=self.clock)
        fix_prefill_costs(self.core, 0.0, TOKEN_S)

    def converse(self, *specs: EngineRequest, pause_s: float = 10.0) -> None:
        for number, spec in enumerate(specs):
            self.run({0: [replace(spec, request_id=f"{spec.request_id} {number}")]})
            self.clock.advance(pause_s)

    def offered(self) -> list[MovableSnapshot]:
        """Without system parts, which may come before or after."""
        return [one for one in self.core.movable.offered(100) if not one.is_shared]

    def lengths(self) -> list[int]:
        return [one.num_tokens for one in self.offered()]


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_a_conversation_is_offered_once_by_its_longest_snapshot(engine):
    engine.converse(turn(1, 1), turn(1, 2), turn(1, 3))
    [snapshot] = engine.offered()
    assert (snapshot.num_tokens, snapshot.key, snapshot.is_shared, snapshot.has_images) == (100, 1, False, False)
    assert snapshot.num_bytes == 100 * BYTES_PER_TOKEN + 4 * STATE_BYTES
    assert snapshot.idle_s == pytest.approx(10.0)
    assert snapshot.residence is not None
    assert (snapshot.residence.keys.conversation, snapshot.residence.num_turns) == (1, 3)


def test_its_keys_lead_to_each_of_its_turns_and_to_the_system_part(engine):
    engine.converse(turn(1, 1), turn(1, 2), turn(1, 3))
    [snapshot] = engine.offered()
    known = {key: (one.num_tokens, one.conversation) for key, one in snapshot.known}
    assert known == {1003: (100, 1), 1002: (80, 1), 1001: (60, 1), 0: (40, None)}
    assert next(key for key, _ in snapshot.known) == 1003, "the nearest first"


def test_conversations_that_come_back_more_often_are_offered_first(engine):
    engine.converse(turn(1, 1), pause_s=300.0)
    engine.converse(turn(2, 1, 1), turn(2, 2, 1), turn(2, 3, 1), pause_s=20.0)
    assert engine.lengths() == [100, 60]
    assert [one.num_tokens for one in engine.core.movable.offered(1)] == [100]


def test_a_conversation_that_is_idle_for_long_falls_behind(engine):
    engine.converse(turn(2, 1, 1), turn(2, 2, 1), pause_s=20.0)
    engine.clock.advance(5000.0)
    engine.converse(turn(1, 1), pause_s=1.0)
    assert engine.lengths() == [60, 80]


def test_only_shared_prefixes_are_offered_for_a_warm_up(engine):
    engine.converse(turn(1, 1), turn(2, 1), turn(3, 1, 1))
    [first, second] = engine.core.movable.offered(8, shared_only=True)
    assert {first.key, second.key} == {0, 1} and first.num_tokens == second.num_tokens == 40
    assert first.is_shared and first.residence is None


def test_a_snapshot_without_keys_is_offered_by_its_digest(engine):
    engine.converse(replace(turn(1, 2), keys=None))
    [snapshot] = engine.offered()
    assert snapshot.key == int(snapshot.digest[:16], 16) and snapshot.known == ()


def test_what_another_node_knew_does_not_replace_what_is_stored_here(engine):
    there = Engine()
    there.converse(turn(1, 1), turn(1, 2))
    [snapshot] = there.offered()
    engine.converse(turn(1, 1))
    assert not engine.core.movable.arrived(snapshot, ""), "no file has arrived"
    known = engine.core._loads.prefixes._prefixes
    assert engine.core.prefixes.store.get(known[1001].digest) is not None and 1002 in known
    assert engine.core._loads.residents.residence_of(1).num_turns == 1


def test_a_snapshot_is_worth_as_much_by_the_pace_of_the_engine_that_gets_it(engine):
    engine.converse(turn(1, 1))
    [snapshot] = engine.offered()
    slow = EngineCore(EngineConfig(), FakeRunner(), lambda chunks: None)
    fix_prefill_costs(slow, 0.0, 2 * TOKEN_S)
    assert slow.movable.density(snapshot) == pytest.approx(2 * engine.core.movable.density(snapshot))
