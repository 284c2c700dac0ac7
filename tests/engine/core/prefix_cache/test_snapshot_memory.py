"""The prefix cache evicts, rejects and remembers snapshots by the seconds that they save."""

import math
import sys

import pytest

from engine.core.prefix_cache.node import SnapshotNode
from engine.core.prefix_cache.snapshot_memory import SnapshotMemory
from engine.core.prefix_cache.store import SnapshotStore
from engine.protocol import PromptOrigin
from engine.snapshot_store.files import SnapshotMeta
from tests.engine.core.prefix_cache.virtual_prompts import (
    STATE_BYTES,
    TOKEN_BYTES,
    Conversation,
    VirtualEngine,
    room,
)
from tests.support.clock import Clock


def engine_with(num_bytes: int = sys.maxsize) -> VirtualEngine:
    clock = Clock(0.0)
    return VirtualEngine(SnapshotMemory(SnapshotStore(clock), num_bytes), clock)


def entry_of(engine: VirtualEngine, conversation: Conversation) -> SnapshotNode | None:
    """The longest stored prefix of a conversation."""
    key, _ = conversation.prompt()
    return engine.cache.match(key, len(key))


def num_stored(engine: VirtualEngine, conversation: Conversation) -> int:
    entry = entry_of(engine, conversation)
    return entry.num_tokens if entry is not None else 0


def test_the_snapshot_that_saves_fewer_seconds_per_byte_is_evicted_first():
    engine = engine_with()
    short, long = engine.conversation(10), engine.conversation(500)
    engine.turn(short, 0)
    engine.turn(long, 0)
    engine.turn(engine.conversation(400), 0)
    assert engine.memory.evict()
    assert (num_stored(engine, short), num_stored(engine, long)) == (0, 500), "its state is as large"


def test_the_least_recently_used_of_equally_valuable_snapshots_is_evicted_first():
    engine = engine_with()
    talks = [engine.conversation(50) for _ in range(3)]
    for talk in (*talks, talks[0]):
        engine.turn(talk, 0)
    looked_at = entry_of(engine, talks[1])
    assert looked_at is not None
    engine.cache.touch(looked_at)
    engine.memory.evict()
    assert [num_stored(engine, talk) for talk in talks] == [50, 50, 0]


def test_earlier_snapshots_of_a_conversation_are_evicted_before_its_last():
    engine = engine_with()
    talk = engine.conversation(100)
    for _ in range(4):
        engine.turn(talk, 5)
    for _ in range(3):
        engine.memory.evict()
    assert [entry.num_tokens for entry in engine.cache.nodes()] == [120]
    assert engine.cache.num_bytes == 120 * TOKEN_BYTES + STATE_BYTES, "all of its keys and values are there"


def test_an_earlier_snapshot_serves_a_conversation_whose_last_one_is_evicted():
    engine = engine_with()
    talk = engine.conversation(100)
    engine.turn(talk, 5)
    engine.turn(talk, 5)
    last = entry_of(engine, talk)
    assert last is not None
    engine.cache.evict(last)
    [before] = engine.cache.nodes()
    lineage = before.lineage
    assert engine.turn(talk, 5) == 11
    assert lineage.num_returns == 2, "each return counts once"
    after = entry_of(engine, talk)
    assert after is not None and after.lineage is lineage


def test_a_conversation_whose_last_snapshot_is_evicted_for_the_next_returns_once_per_turn():
    engine = engine_with(room(1, 190))
    talk = engine.conversation(100)
    for _ in range(4):
        engine.turn(talk, 20)
        engine.clock.advance(100)
    assert engine.cache.counters.num_evicted == 3
    [entry] = engine.cache.nodes()
    assert entry.num_tokens == 180 and entry.lineage.num_returns == 3
    assert entry.lineage.interval_s is not None and entry.lineage.interval_s > 100


def test_a_prefix_that_several_conversations_continue_keeps_its_own_rate():
    engine = engine_with()
    common = engine.conversation(100)
    engine.turn(common, 0)
    for _ in range(3):
        engine.turn(Conversation(common.token_ids), 5)
    entry = entry_of(engine, common)
    assert entry is not None and entry.num_hits == 3
    assert entry.lineage.is_shared and entry.lineage.nodes == [entry] and entry.lineage.num_returns == 2
    assert len({id(one.lineage) for one in engine.cache.nodes()}) == 4
    assert engine.cache.integrity_error() is None


def test_snapshots_of_prompt_ends_that_the_next_turn_lacks_are_counted_as_unused():
    engine = engine_with()
    talk = engine.conversation(100)
    for _ in range(5):
        engine.turn(talk, 5, generation=4)
    kinds = [entry.kind for entry in engine.cache.nodes() if entry.counted_unused_as is not None]
    assert kinds.count("prompt") == 4
    last = entry_of(engine, talk)
    assert last is not None and last.lineage.num_returns == 4


def test_a_snapshot_is_rejected_where_only_equally_valuable_ones_could_be_evicted_for_it():
    engine = engine_with(room(2.5, 100))
    talks = [engine.conversation(100) for _ in range(3)]
    for talk in talks:
        engine.turn(talk, 0)
    assert [num_stored(engine, talk) for talk in talks] == [100, 100, 0]
    counters = engine.cache.counters
    assert (counters.num_rejected, counters.num_outvalued, counters.num_evicted) == (1, 1, 0)


def test_a_rejected_snapshot_is_worth_more_when_its_conversation_returns():
    engine = engine_with(room(2.5, 100))
    talks = [engine.conversation(100) for _ in range(3)]
    for talk in (*talks, *[talks[2]] * 2):
        engine.turn(talk, 0)
        engine.clock.advance(10)
    assert num_stored(engine, talks[2]) == 100 and num_stored(engine, talks[1]) == 100


def test_a_prompt_rejected_at_two_boundaries_does_not_count_as_a_return():
    engine = engine_with(room(2.5, 10))
    for _ in range(2):
        engine.turn(engine.conversation(10), 0)
    new = engine.conversation(10)
    engine.turn(new, 0, generation=2)
    key, _ = new.prompt(2)
    ghost = engine.cache.lineages.ghost(key, 1, len(key) - 1)
    assert engine.cache.counters.num_outvalued == 2
    assert ghost is not None and ghost.lineage.num_returns == 0


def test_snapshots_are_not_evicted_for_one_that_would_still_not_fit():
    engine = engine_with(room(2.5, 100))
    engine.turn(engine.conversation(100), 0)
    before = engine.cache.num_bytes
    engine.turn(engine.conversation(400), 0)
    assert engine.cache.num_bytes == before and engine.cache.counters.num_outvalued == 0
    assert engine.cache.counters.num_rejected == 1


def test_a_snapshot_without_a_node_evicts_others_of_any_value():
    engine = engine_with(room(2.5, 100))
    for _ in range(2):
        engine.turn(engine.conversation(100), 0)
    key, _ = engine.conversation(100).prompt()
    new = SnapshotNode(key.digest(), key, "turn", None, PromptOrigin(), False, 0.0, 0.0)
    assert not engine.memory.evict_for(room(1, 100), None, new)
    assert engine.memory.evict_for(room(1, 100), None) and engine.cache.counters.num_evicted == 1


def test_an_eviction_removes_as_many_snapshots_as_needed_and_no_more():
    engine = engine_with()
    for _ in range(10):
        engine.turn(engine.conversation(100), 0)
    assert engine.memory.evict(3 * room(1, 100) - 1)
    assert engine.cache.num_in_memory == 7
    assert engine.memory.evict(2 * room(1, 100) + 20, overhead_bytes=10) and engine.cache.num_in_memory == 5
    assert engine.memory.evict(sys.maxsize) and not engine.memory.evict()
    assert engine.cache.num_bytes == 0 and engine.cache.integrity_error() is None


def test_a_pinned_snapshot_and_the_kv_segments_it_needs_are_never_evicted():
    engine = engine_with()
    talk = engine.conversation(100)
    engine.turn(talk, 5)
    engine.turn(talk, 5)
    last = entry_of(engine, talk)
    assert last is not None
    engine.cache.pin(last)
    engine.memory.evict(sys.maxsize)
    assert [*engine.cache.nodes()] == [last]
    assert engine.cache.num_bytes == engine.cache.pinned_bytes == 110 * TOKEN_BYTES + STATE_BYTES


def test_kv_segments_in_use_are_unevictable_and_no_snapshot_is_evicted_in_vain():
    engine = engine_with(room(2.2, 100))
    talk, other = engine.conversation(100), engine.conversation(100)
    engine.turn(talk, 0)
    engine.turn(other, 0)
    entry = entry_of(engine, talk)
    assert entry is not None
    engine.cache.use(entry)
    assert engine.cache.unevictable_bytes() == 100 * TOKEN_BYTES and engine.cache.pinned_bytes == 0
    assert not engine.memory.evict_for(room(1.5, 100) + STATE_BYTES, None) and engine.cache.num_in_memory == 2
    engine.cache.release(entry)
    assert engine.cache.unevictable_bytes() == 0


def test_the_price_is_the_seconds_that_eviction_is_expected_to_cost_and_evicts_nothing():
    engine = engine_with()
    cold, live = engine.conversation(100), engine.conversation(100)
    for talk in (cold, live, live, live):
        engine.turn(talk, 0)
    assert engine.memory.price(1) == pytest.approx(100 * 0.6), "three of five first prompts come back"
    assert engine.memory.price(engine.cache.num_bytes) == pytest.approx(60 + 90)
    assert engine.memory.price(engine.cache.num_bytes + 1) == math.inf and engine.memory.price(0) == 0
    assert engine.cache.num_in_memory == 2
    engine.clock.advance(86400)
    assert engine.memory.price(1) < 1, "it has not come back for a day"


def test_a_snapshot_that_is_on_disk_too_costs_no_more_than_reading_it():
    clock, files = Clock(0.0), dict[str, SnapshotMeta]()
    cache = SnapshotStore(clock, files.get)
    engine = VirtualEngine(SnapshotMemory(cache, sys.maxsize, read_seconds=lambda num_bytes: num_bytes / 1e6), clock)
    filed, other = engine.conversation(100), engine.conversation(90)
    engine.turn(filed, 0)
    engine.turn(other, 0)
    entry = entry_of(engine, filed)
    assert entry is not None
    key = entry.key
    files[key.digest()] = SnapshotMeta(
        key.digest(), "", 0, entry.kind, key.tenant, key.token_ids, (), entry.origin, 0.0
    )
    assert engine.memory.price(1) == pytest.approx(0.5 * room(1, 100) / 1e6)
    engine.memory.evict()
    assert entry.snapshot is None and num_stored(engine, filed) == 100 and num_stored(engine, other) == 90


def test_the_cache_stays_consistent_after_any_turns_forks_evictions_and_clearings():
    engine = engine_with(room(5, 60))
    talks = [engine.conversation(40)]
    for i in range(600):
        talk = talks[engine.rng.randrange(len(talks))]
        what = engine.rng.random()
        if what < 0.2:
            length = engine.rng.randint(20, len(talk.token_ids))
            talks.append(Conversation(talk.token_ids[:length].copy(), engine.rng.choice((0, 10))))
        elif what < 0.3:
            engine.memory.evict(engine.rng.randrange(room(2, 60)))
        elif what < 0.31:
            engine.cache.clear()
        else:
            engine.turn(talk, engine.rng.randint(0, 10), generation=engine.rng.choice((0, 3)))
        if i % 50 == 49:
            talks = [engine.conversation(40), talk]
        assert engine.cache.integrity_error() is None


def test_the_arrays_of_snapshots_are_bounded_and_the_least_valuable_make_room():
    engine = engine_with()
    engine.memory = SnapshotMemory(engine.cache, sys.maxsize, max_snapshots=40)
    talks = [engine.conversation(10) for _ in range(30)]
    for talk in talks * 4:
        engine.turn(talk, 5)
        assert engine.cache.num_segments <= 40
    assert engine.cache.num_segments > 20
    assert num_stored(engine, talks[-1]) == 30, "the newest is there"
    long = engine.conversation(5000)
    engine.turn(long, 0)
    for talk in talks:
        engine.turn(talk, 5)
    assert num_stored(engine, long) == 5000, "it saves more seconds than the others"
