"""Seconds recomputed under several workloads: eviction by the value of snapshots against LRU."""

import random

import pytest

from engine.core.prefix_cache.snapshot_memory import SnapshotMemory
from engine.core.prefix_cache.store import SnapshotStore
from tests.engine.core.prefix_cache.virtual_prompts import LOADS, VirtualEngine, room, seconds
from tests.support.clock import Clock


def run(name: str, by_value: bool = True, seed: int = 7) -> VirtualEngine:
    """Where nothing costs any seconds, all snapshots are worth the same, and the least recently used is evicted."""
    num_bytes, load = LOADS[name]
    clock = Clock(0.0)
    memory = SnapshotMemory(SnapshotStore(clock), num_bytes, seconds if by_value else lambda start, end: 0.0)
    engine = VirtualEngine(memory, clock, rng=random.Random(seed))
    load(engine)
    return engine


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("circle, 3.7 of 4", 0.35),
        ("circle, 3.7 of 4, prompt boundaries", 0.35),
        ("circle, growing", 0.5),
        ("circle, 4.2 of 8", 0.65),
        ("circle, 4.2 of 8, growing", 0.8),
        ("circle, irregular", 0.35),
        ("circle, all fit", 1.0),
        ("one-shot prompts beside two", 0.9),
        ("conversations end", 1.0),
        ("one system part", 1.0),
        ("zipf 1.0", 0.75),
        ("zipf 0.6", 0.95),
        ("zipf 1.4", 0.6),
        ("people, tight", 0.9),
        ("people, roomy", 0.6),
    ],
)
def test_computed_seconds_are_at_most_the_given_share_of_those_with_lru_eviction(name, share):
    assert run(name).computed_s <= share * run(name, by_value=False).computed_s


@pytest.mark.parametrize("seed", range(5))
def test_three_of_four_agents_in_a_circle_hit_the_cache_where_three_fit(seed):
    engine = run("circle, 3.7 of 4", seed=seed)
    assert engine.num_computed <= 600 + 3 * 400 + 22 * 420, "one of four is computed in each round, and in three two"


@pytest.mark.parametrize("seed", range(3))
def test_prompts_that_are_never_seen_again_cost_the_live_conversations_next_to_nothing(seed):
    engine = run("one-shot prompts beside two", seed=seed)
    assert engine.num_computed - 60 * 400 <= 2 * 600 + 60 * 6 + 2 * 700, "each of the two is lost at most once"


def test_a_new_conversation_is_stored_within_three_turns_after_an_old_one_has_ended():
    clock = Clock(0.0)
    engine = VirtualEngine(SnapshotMemory(SnapshotStore(clock), room(3.3, 620), seconds), clock)
    live = [engine.conversation(600) for _ in range(3)]
    for i in range(30):
        engine.turn(live[i % 3], 1)
        clock.advance(20)
    live[0] = engine.conversation(600)
    computed = [[engine.turn(conversation, 1) for conversation in live] for _ in range(6)]
    assert all(new < 10 for new, *_ in computed[3:])
    assert all(old < 10 for _, *others in computed for old in others), "the others go on undisturbed"


def test_the_system_part_of_all_conversations_stays_in_memory():
    engine = run("one system part")
    [entry] = [entry for entry in engine.cache.nodes() if entry.kind == "system"]
    assert entry.num_hits > 300 and entry.created_s < 1200, "since the first prompt"
