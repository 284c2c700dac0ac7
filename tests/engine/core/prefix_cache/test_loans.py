"""Keys and values that are lent to rows: they are in one place, count once, and come back or are forgotten."""

import os
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.config import DiskCacheConfig
from engine.core.cost_model import CostModel
from engine.core.prefix_cache.disk_tier import DiskTier
from engine.core.prefix_cache.loans import Loans, MemoryTaken
from engine.core.prefix_cache.node import SnapshotNode
from engine.core.prefix_cache.prompt_key import PromptKey
from engine.core.prefix_cache.snapshot_memory import SnapshotMemory
from engine.core.prefix_cache.store import SnapshotStore
from engine.core.prompt import Prompt
from engine.protocol import FinishReason, PromptOrigin
from engine.snapshot_store.files import SnapshotFiles
from tests.engine.core.prefix_cache.lending import CHUNK, Engine, following, request, tokens
from tests.support.clock import Clock
from tests.support.driver import fix_prefill_costs
from tests.support.fake_runner import BYTES_PER_TOKEN, STATE_BYTES, FakeSnapshot, answer
from tests.support.sparse_prompts import with_plan

NUM_SEEDS = int(os.environ.get("ORCHARD_LOANS", "0")) or 4

FIRST = request("a", tokens(1, 200))
LONG = following("b", FIRST, *tokens(2, 200))
TURN = 200
ANSWER = 242
"""Where the answer of FIRST ends, the generation prompt before it included."""


@pytest.fixture
def engine() -> Engine:
    engine = Engine(cache={"answers": False})
    engine.ask(FIRST)
    assert engine.stored() == [TURN]
    return engine


def size(num_tokens: int) -> int:
    """Return the bytes of a row or a snapshot."""
    return BYTES_PER_TOKEN * num_tokens + STATE_BYTES


# Where the keys and values are


def test_a_row_takes_over_the_kv_segments_it_continues_and_returns_them_when_it_finishes(engine):
    before = engine.cache.num_bytes
    engine.begin(LONG)
    assert engine.lent() == {"b/0": [TURN]}
    assert engine.cache.num_bytes == before - BYTES_PER_TOKEN * TURN
    engine.finish_all()
    assert engine.tokens["b"] == answer(LONG) and engine.stored() == [TURN, 402]
    assert engine.cache.num_bytes == 2 * STATE_BYTES + BYTES_PER_TOKEN * 402


def test_snapshots_of_a_running_prompt_are_lent_to_it_at_once_except_the_system_part():
    engine = Engine(cache={"answers": False})
    engine.start(request("a", tokens(1, 100), tokens(2, 150)))
    assert engine.stored() == [100, 250] and engine.lent() == {"a/0": [250]}
    engine.finish_all()
    assert engine.cache.num_bytes == size(100) + size(150)


def test_the_next_turn_takes_over_kv_segments_of_earlier_turns_and_of_the_answer():
    engine = Engine()
    first = request("a", tokens(1, 100), tokens(2, 150))
    engine.ask(first)
    engine.start(following("b", first, *tokens(3, 80), said=40))
    assert engine.chunks["b"][0].num_cached == 292
    assert engine.lent() == {"b/0": [250, 292, 372]}, "the system part stays"
    engine.finish_all()
    assert engine.stored() == [100, 250, 292, 372, 414]


def test_the_system_part_is_lent_to_no_row():
    engine = Engine(cache={"answers": False})
    first = request("a", tokens(1, 100), tokens(2, 150))
    engine.ask(first)
    engine.start(request("b", tokens(1, 100), tokens(3, 150)))
    assert engine.chunks["b"][0].num_cached == 100
    assert engine.lent() == {"b/0": [250]}
    engine.finish_all()


def test_a_turn_pinned_by_a_later_request_is_not_lent_and_stays_in_the_cache(engine):
    ids = FIRST.token_ids[:TURN].tolist()
    pinned = request("pinned", ids, tokens(5, 100), pinned=True)
    engine.start(pinned)
    assert engine.chunks["pinned"][0].num_cached == TURN
    assert TURN not in engine.lent().get("pinned/0", [])
    assert len(engine.cache.pinned) == 1
    engine.finish_all()
    assert TURN in engine.stored()


def test_a_snapshot_that_two_conversations_continue_is_copied_instead_of_lent(engine):
    engine.ask(LONG)
    engine.start(following("c", FIRST, *tokens(7, 100)))
    assert engine.lent() == {"c/0": [302]}
    engine.finish_all()


@pytest.mark.parametrize("choices", [2, 3])
def test_several_choices_get_copies(engine, choices):
    engine.start(replace(LONG, num_choices=choices))
    assert engine.chunks["b"][0].num_cached == TURN
    assert not engine.lent()
    engine.finish_all()
    assert engine.stored() == [TURN, 402]


def test_sparse_prompts_get_copies(engine):
    kept = [*range(300), *range(310, len(LONG.token_ids))]
    engine.start(with_plan(LONG, kept, 300))
    assert engine.chunks["b"][0].num_cached == TURN
    assert not engine.lent()
    engine.finish_all()


# Admission


def tight(num_tokens: int, num_states: int = 8, **config: Any) -> Engine:
    """Memory for so many tokens and states in all."""
    return Engine(BYTES_PER_TOKEN * num_tokens + num_states * STATE_BYTES, **config)


def test_a_row_that_fits_only_by_taking_over_its_prefix_is_admitted_without_eviction():
    engine = tight(500, cache={"answers": False})
    engine.ask(FIRST)
    engine.ask(LONG)
    assert engine.chunks["b"][0].num_cached == TURN and engine.cache.counters.num_evicted == 0


def test_a_request_aborted_before_its_prefill_returns_the_kv_segments_assigned_to_it():
    engine = tight(720, 3, cache={"answers": False})
    engine.ask(FIRST)
    engine.begin(long := request("long", tokens(3, 200), max_tokens=10))
    engine.core.add_request(LONG)
    for _ in range(50):
        engine.step()
        if engine.assigned():
            break
    assert engine.assigned() == {"b/0": [TURN]} and not engine.runner.has("b/0")
    assert engine.cache.num_bytes < size(TURN) + STATE_BYTES
    engine.core.abort("b")
    engine.step()
    assert not engine.assigned() and TURN in engine.stored()
    engine.finish_all()
    assert engine.tokens["long"] == answer(long)


class Shelf:
    """A cache with a chain of snapshots of one conversation, and its loans."""

    def __init__(self, *ends: int, max_bytes: int = 2**30, kind: str = "turn"):
        self.engine = Engine()
        self.cache = SnapshotStore()
        self.room = sys.maxsize
        self.memory = SnapshotMemory(self.cache, max_bytes, room=lambda: self.room)
        self.loans = Loans(self.memory, None, self.engine.runner)
        self.nodes: list[SnapshotNode] = []
        for end in ends:
            self.nodes.append(self.store(tokens(1, end), self.nodes[-1] if self.nodes else None, kind))

    def store(self, ids: list[int], parent: Any, kind: Any = "turn") -> SnapshotNode:
        key = PromptKey("model", "", np.array(ids, np.int32))
        start = 0 if parent is None else parent.snapshot.num_tokens
        snapshot = FakeSnapshot(key.token_ids, len(ids) - start, None if parent is None else parent.snapshot)
        digest = None if parent is None else parent.digest
        node = SnapshotNode(key.digest(), key, kind, digest, PromptOrigin(), False, 0.0, 0.0)
        assert self.memory.add(node, snapshot, parent) is node
        return node

    def assign(self, row_id: str, node: SnapshotNode) -> bool:
        """Return whether the row owns anything then."""
        self.loans.assign(row_id, node)
        return row_id in self.cache.owners

    def move(self, row_id: str, node: SnapshotNode) -> list[int]:
        """Move KV segments as a restore does."""
        lent = self.loans.move(row_id, node)
        for segment in lent:
            segment.is_lent = True  # type: ignore[attr-defined]
            self.engine.runner.holder[segment] = row_id
        self.engine.runner.prompts[row_id] = 0
        return [segment.num_tokens for segment in lent]  # type: ignore[attr-defined]

    def drop(self, *row_ids: str) -> dict[str, list[int]]:
        """Drop rows; return where the segments end that they give back."""
        with self.loans.dropping(row_ids) as lent:
            assert self.cache.num_bytes <= self.room
            self.engine.runner.drop([row_id for row_id in row_ids if self.engine.runner.has(row_id)], lent)
        return {row_id: [one.num_tokens for one in segments] for row_id, segments in lent.items()}  # type: ignore[attr-defined]


def test_assigned_bytes_count_as_the_rows_until_they_are_revoked():
    shelf = Shelf(100, 200, 300)
    assert shelf.assign("r", shelf.nodes[-1])
    assert shelf.cache.num_bytes == 3 * STATE_BYTES and shelf.cache.owners == ["r"]
    assert not shelf.assign("other", shelf.nodes[-1]), "it has an owner already"
    shelf.loans.revoke("r")
    assert shelf.cache.num_bytes == 3 * STATE_BYTES + 3000 and not shelf.cache.owners
    shelf.loans.revoke("unknown")
    assert shelf.cache.integrity_error() is None


def test_revoke_keeps_kv_segments_that_the_row_has_already_taken_over():
    """It was preempted, and could not be admitted again before it was dropped."""
    shelf = Shelf(100, 200)
    shelf.move("r", shelf.nodes[-1])
    shelf.assign("r", shelf.nodes[-1])
    shelf.loans.revoke("r")
    assert shelf.cache.num_bytes == 2 * STATE_BYTES
    assert [node.owner for node in shelf.nodes[-1].chain()] == ["r", "r"]
    assert shelf.drop("r") == {"r": [100, 200]}
    assert [node.owner for node in shelf.nodes[-1].chain()] == [None, None]
    assert shelf.cache.integrity_error() is None and len(shelf.cache) == 2


def test_a_kv_segment_that_another_snapshot_needs_is_not_lent():
    shelf = Shelf(100, 200)
    branch = shelf.store([*tokens(1, 100), *tokens(5, 50)], shelf.nodes[0])
    assert shelf.move("r", branch) == [150]
    assert shelf.move("s", shelf.nodes[1]) == [200]
    assert not shelf.assign("t", shelf.nodes[0]), "two snapshots need it"
    shelf.loans.lost(["r"])
    assert shelf.cache.get(branch.digest) is None
    assert shelf.move("t", shelf.nodes[0]) == [], "one is left that needs it"


def test_an_assigned_snapshot_that_another_prompt_uses_is_copied_by_the_row_instead():
    """The segment counts as the cache's again, and the row copies it, too."""
    shelf = Shelf(100, 200)
    assert shelf.assign("r", shelf.nodes[-1])
    assert shelf.loans.copy_back(shelf.nodes[-1])
    shelf.cache.use(shelf.nodes[-1])
    assert shelf.move("r", shelf.nodes[-1]) == []
    shelf.cache.release(shelf.nodes[-1])
    assert shelf.cache.num_bytes == 2 * STATE_BYTES + 2000 and shelf.cache.integrity_error() is None


def test_an_assignment_that_is_not_carried_out_evicts_other_snapshots_if_its_bytes_no_longer_fit():
    """Two prompts continue one snapshot: the first one's reservation counted its bytes as gone from the cache."""
    shelf = Shelf(100, 200)
    other = shelf.store(tokens(9, 100), None)
    shelf.room = 3 * STATE_BYTES + 3000
    assert shelf.assign("r", shelf.nodes[-1])
    shelf.room = 3 * STATE_BYTES + 1000  # the row has reserved what was free
    shelf.cache.use(shelf.nodes[-1])
    assert shelf.move("r", shelf.nodes[-1]) == []
    assert shelf.cache.num_bytes <= shelf.room
    assert shelf.nodes[-1].snapshot is not None and shelf.cache.get(other.digest) is None
    shelf.cache.release(shelf.nodes[-1])
    assert shelf.cache.integrity_error() is None


def test_a_prompt_whose_assigned_prefix_another_one_copies_first_waits_for_memory():
    """The longer prompt begins first, and its chunks last beyond the first one of the shorter prompt."""
    engine = tight(1040, 3, cache={"answers": False}, clock=Clock())
    engine.ask(FIRST)
    fix_prefill_costs(engine.core, 0.0, 0.0)
    long, short = following("long", FIRST, *tokens(2, 400)), following("short", FIRST, *tokens(7, 100))
    engine.core.add_request(long)
    engine.core.add_request(short)
    engine.step()
    assert engine.assigned() == {"short/0": [TURN]} and engine.runner.prompts == {"long/0": TURN + CHUNK}
    fix_prefill_costs(engine.core, 0.0, 0.001)
    engine.step()
    assert not engine.assigned() and engine.core.scheduler.queue.prompts[0].rows[0].spec is short
    engine.finish_all()
    assert engine.tokens["long"] == answer(long) and engine.tokens["short"] == answer(short)
    assert engine.core.stats.num_preempted == 0


def test_a_prompt_that_could_not_take_over_its_prefix_is_not_assigned_it_again(monkeypatch):
    """Otherwise it would be admitted and refused for ever, in one and the same step."""
    engine = tight(640, 3, cache={"answers": False}, clock=Clock())
    engine.ask(FIRST)
    prefix, next_turn = engine.core.prefixes, following("next", FIRST, *tokens(2, 400))

    def refuse(prompt: Prompt, *args: float) -> bool:
        prefix.revoke(prompt)
        raise MemoryTaken

    with monkeypatch.context() as patch:
        patch.setattr(prefix, "begin", refuse)
        engine.core.add_request(next_turn)
        engine.step()
    (row,) = engine.core.scheduler.queue.prompts[0].rows
    assert engine.core.scheduler.prefills.step.is_over, "the runner drops the row first"
    prefix.assign(row.prompt)
    assert not engine.assigned()
    engine.finish_all()
    assert engine.tokens["next"] == answer(next_turn)


def test_an_assigned_segment_that_others_need_moves_to_no_row_and_is_refused_without_memory():
    shelf = Shelf(100, 200)
    assert shelf.assign("r", shelf.nodes[-1])
    shelf.room = 1500
    shelf.cache.use(shelf.nodes[-1])
    with pytest.raises(MemoryTaken, match="prefix of r"):
        shelf.move("r", shelf.nodes[0])
    assert not shelf.cache.owners and shelf.cache.num_bytes == STATE_BYTES + 2000
    shelf.cache.release(shelf.nodes[-1])
    assert shelf.cache.integrity_error() is None


def test_a_prompt_that_continues_no_snapshot_is_refused_while_others_need_its_assigned_segments():
    shelf = Shelf(100, 200)
    assert shelf.assign("r", shelf.nodes[-1])
    shelf.room = 500
    shelf.cache.use(shelf.nodes[-1])
    with pytest.raises(MemoryTaken, match="prefix of r"):
        shelf.loans.give_up("r")
    shelf.cache.release(shelf.nodes[-1])
    assert shelf.cache.num_bytes == 0 and shelf.cache.integrity_error() is None
    shelf.loans.give_up("r")


def test_a_snapshot_assigned_to_a_preempted_row_is_evicted_if_memory_is_short():
    shelf = Shelf(100, 200)
    assert shelf.assign("r", shelf.nodes[-1])
    shelf.room = 2 * STATE_BYTES + 500
    assert not shelf.drop("r")
    assert shelf.cache.num_bytes <= shelf.room
    assert shelf.cache.integrity_error() is None


def test_an_assignment_whose_snapshot_is_evicted_meanwhile_is_void():
    shelf = Shelf(100, 200)
    assert shelf.assign("r", shelf.nodes[-1])
    shelf.memory.evict(10**6)
    assert shelf.cache.num_bytes == 0
    shelf.loans.revoke("r")
    assert shelf.cache.num_bytes == 0 and shelf.cache.integrity_error() is None


def test_a_lent_snapshot_evicted_in_the_middle_of_a_chain_returns_its_kv_segment():
    shelf = Shelf(100, 200, 300)
    shelf.move("r", shelf.nodes[-1])
    shelf.cache.forget(shelf.nodes[1])
    assert shelf.drop("r") == {"r": [100, 200, 300]}
    assert shelf.cache.num_bytes == 2 * STATE_BYTES + 3000 and shelf.cache.integrity_error() is None


def test_the_last_lent_snapshot_of_a_chain_may_be_evicted_and_the_others_return():
    shelf = Shelf(100, 200, 300)
    shelf.move("r", shelf.nodes[-1])
    shelf.cache.forget(shelf.nodes[2])
    assert shelf.drop("r") == {"r": [100, 200]}
    assert shelf.cache.num_bytes == 2 * STATE_BYTES + 2000 and shelf.cache.integrity_error() is None


def test_a_called_in_kv_segment_stays_and_the_rest_returns_when_the_row_is_dropped():
    shelf = Shelf(100, 200, 300)
    shelf.move("r", shelf.nodes[-1])
    assert shelf.loans.copy_back(shelf.nodes[1])
    assert shelf.cache.num_bytes == 3 * STATE_BYTES + 2000
    assert shelf.drop("r") == {"r": [300]}
    assert shelf.cache.num_bytes == 3 * STATE_BYTES + 3000 and shelf.cache.integrity_error() is None


def test_kv_segments_of_one_chain_are_called_in_from_both_rows_that_have_them():
    shelf = Shelf(100)
    assert shelf.move("r", shelf.nodes[0]) == [100]
    assert shelf.loans.copy_back(shelf.nodes[0])
    last = shelf.store(tokens(1, 200), shelf.nodes[0])
    assert shelf.move("s", last) == [100, 200]
    assert shelf.loans.copy_back(last)
    assert shelf.cache.num_bytes == 2 * STATE_BYTES + 2000 and shelf.cache.owners == []


def test_snapshots_that_a_row_cannot_fill_are_removed_with_those_that_continue_them():
    shelf = Shelf(100, 200, 300)
    shelf.move("r", shelf.nodes[2])
    shelf.engine.runner.lacking = {"r"}
    has_come_back = shelf.loans.copy_back(shelf.nodes[1])
    assert not has_come_back
    assert len(shelf.cache) == 0 and shelf.cache.num_bytes == 0 and shelf.cache.integrity_error() is None


def test_a_copy_for_another_prompt_is_refused_without_memory_and_changes_nothing():
    shelf = Shelf(100, 200)
    shelf.move("r", shelf.nodes[-1])
    shelf.room = 2 * STATE_BYTES + 1500
    assert not shelf.loans.copy_back(shelf.nodes[-1])
    assert shelf.cache.num_bytes == 2 * STATE_BYTES
    assert shelf.loans.copy_back(shelf.nodes[0]), "the first half fits"


def test_a_lent_snapshot_worth_less_than_others_is_removed_when_its_row_ends():
    shelf = Shelf(100, 200)
    shelf.move("r", shelf.nodes[-1])
    other = shelf.store(tokens(9, 3000), None)
    for _ in range(5):
        shelf.cache.use(other)
        shelf.cache.release(other)
    shelf.room = size(3000) + STATE_BYTES + 500
    assert shelf.drop("r") == {}
    assert [entry.num_tokens for entry in shelf.cache.nodes()] == [3000]
    assert shelf.cache.num_bytes == size(3000) and shelf.cache.integrity_error() is None


def test_kv_segments_of_a_pinned_snapshot_return_even_if_others_are_evicted():
    shelf = Shelf(100, 200)
    shelf.move("r", shelf.nodes[-1])
    shelf.cache.pin(shelf.nodes[-1])
    other = shelf.store(tokens(9, 3000), None)
    for _ in range(5):
        shelf.cache.use(other)
        shelf.cache.release(other)
    shelf.room = size(3000) + 2 * STATE_BYTES + 500
    shelf.drop("r")
    assert len(shelf.cache.pinned) == 1 and shelf.cache.integrity_error() is None
    assert shelf.cache.get(other.digest) is None


def test_rows_dropped_together_return_no_more_than_memory_holds():
    shelf = Shelf(100)
    second = shelf.store(tokens(9, 100), None)
    shelf.move("r", shelf.nodes[0])
    shelf.move("s", second)
    shelf.room = 2 * STATE_BYTES + 1500
    shelf.drop("r", "s", "unknown")
    assert shelf.cache.num_bytes <= shelf.room
    assert shelf.cache.integrity_error() is None and not shelf.cache.owners


def test_the_return_of_a_row_takes_time_linear_in_the_number_of_snapshots(monkeypatch):
    """A conversation of many turns, and many others: the cost grows with their number and not with its square."""
    shelf = Shelf(*range(10, 3010, 10))
    others = [shelf.store(tokens(100 + i, 20), None) for i in range(100)]
    shelf.move("r", shelf.nodes[-1])
    walks, nodes_that_need = list[Any](), SnapshotStore.nodes_that_need

    def counted(store: SnapshotStore, node: Any) -> set[SnapshotNode]:
        walks.append(node)
        return nodes_that_need(store, node)

    monkeypatch.setattr(SnapshotStore, "nodes_that_need", counted)
    returning = shelf.drop("r")
    assert len(returning["r"]) == len(shelf.nodes) and len(others) == 100
    assert len(walks) == 1, "a walk visits each node once"


# What goes wrong


@pytest.mark.parametrize("num_moved", [0, 1])
def test_a_failed_restore_costs_no_answer_and_removes_kv_segments_already_moved(engine, num_moved):
    engine.runner.breaks_at = {"restore": num_moved}
    engine.start(LONG)
    assert engine.chunks["b"][0].num_cached == 0 and engine.cache.counters.num_unusable == 1
    assert (TURN in engine.stored()) == (not num_moved) or engine.lent()
    engine.finish_all()
    assert engine.tokens["b"] == answer(LONG)


@pytest.mark.parametrize("num_moved", [0, 1, 2])
def test_a_restore_that_fails_half_way_counts_no_byte_of_the_segments_behind_a_lost_one(engine, num_moved):
    engine.ask(LONG)
    assert engine.stored() == [TURN, 402]
    engine.runner.breaks_at = {"restore": num_moved}
    engine.start(one := following("c", LONG, *tokens(6, 100)))  # checks the accounts in each step
    assert engine.cache.counters.num_unusable == 1
    engine.finish_all()
    assert engine.tokens["c"] == answer(one)


def test_a_failed_chunk_loses_the_snapshots_that_its_prompt_has_taken_over(engine):
    engine.begin(LONG)
    engine.runner.broken = {"prefill"}
    engine.step()
    engine.runner.broken = set()
    assert engine.finish["b"] is FinishReason.ERROR
    engine.finish_all()
    assert engine.stored() == [] and engine.cache.num_bytes == 0
    assert engine.ask(following("c", FIRST, *tokens(2, 200))) == [0]


def test_a_failed_decode_step_loses_the_kv_segments_of_its_rows_and_no_others(engine):
    engine.ask(request("other", tokens(4, 100)))
    engine.start(LONG)
    engine.begin(following("d", request("other", tokens(4, 100)), *tokens(5, 200)))
    assert set(engine.lent()) == {"b/0", "d/0"}
    engine.runner.broken = {"decode"}
    engine.step()
    engine.runner.broken = set()
    assert engine.finish["b"] is FinishReason.ERROR
    assert set(engine.lent()) == {"d/0"}, "a prompt in progress stays"
    engine.finish_all()
    assert engine.stored() == [100, 302]


def test_a_failed_drop_loses_the_kv_segments_not_yet_returned(engine):
    engine.ask(LONG)
    engine.start(following("c", LONG, *tokens(6, 100)))
    assert engine.lent() == {"c/0": [TURN, 402, 504]}
    engine.is_checked = False
    engine.core.abort("c")
    engine.runner.breaks_at = {"fill": 2}
    engine.core.step()
    engine.is_checked = True
    engine.check()
    engine.finish_all()
    assert engine.stored() == [TURN, 402]
    assert engine.ask(following("d", LONG, *tokens(6, 100))) == [402]


@pytest.mark.parametrize("num_filled", [0, 1])
def test_a_copy_for_another_prompt_that_fails_costs_no_answer(engine, num_filled):
    """That of the row which has the keys and values, nor that of the prompt which does without them."""
    engine.ask(LONG)
    engine.start(following("c", LONG, *tokens(6, 100)))
    engine.runner.breaks_at = {"fill": num_filled}
    other = following("d", LONG, *tokens(8, 100))
    engine.start(other)
    engine.finish_all()
    assert engine.finish["c"] is FinishReason.LENGTH and engine.tokens["d"] == answer(other)
    assert engine.cache.counters.num_unusable == 1


def test_an_aborted_row_returns_its_kv_segments(engine):
    engine.start(LONG)
    engine.core.abort("b")
    engine.finish_all()
    assert engine.stored() == [TURN, 402] and engine.cache.num_bytes == 2 * STATE_BYTES + 4020


def test_an_aborted_prompt_in_progress_returns_its_kv_segments(engine):
    engine.begin(LONG)
    engine.core.abort("b")
    engine.finish_all()
    assert engine.stored() == [TURN] and engine.cache.num_bytes == size(TURN)


def test_a_request_aborted_in_the_queue_leaves_the_cache_unchanged(engine):
    engine.core.add_request(LONG)
    engine.core.abort("b")
    engine.finish_all()
    assert engine.stored() == [TURN] and engine.cache.num_bytes == size(TURN)


def test_clearing_the_cache_does_not_change_the_tokens_of_running_rows(engine):
    engine.start(LONG)
    engine.core.prefixes.clear()
    engine.check()
    assert not engine.lent() and engine.cache.num_bytes == 0
    engine.finish_all()
    assert engine.tokens["b"] == answer(LONG)
    assert engine.ask(following("c", FIRST, *tokens(2, 200))) == [0]


def test_clearing_the_cache_does_not_change_the_tokens_of_a_prompt_in_progress(engine):
    engine.begin(LONG)
    engine.core.prefixes.clear()
    engine.check()
    engine.finish_all()
    assert engine.tokens["b"] == answer(LONG)
    engine.ask(following("c", LONG, *tokens(2, 20)))


def test_a_snapshot_that_is_stored_again_after_clearing_is_not_taken_for_the_lent_one(engine):
    engine.start(LONG)
    engine.core.prefixes.clear()
    again = request("again", tokens(1, 200))
    engine.start(again)
    assert engine.lent() == {"again/0": [TURN]}
    engine.core.abort("b")
    engine.step(2)
    assert engine.lent() == {"again/0": [TURN]}
    engine.finish_all()
    assert engine.stored() == [TURN]


def test_memory_pressure_evicts_lent_snapshots_and_the_row_goes_on(engine):
    engine.start(LONG)
    engine.core.free_evictable()
    engine.check()
    assert engine.cache.num_bytes == 0
    engine.finish_all()
    assert engine.tokens["b"] == answer(LONG)


def test_a_row_whose_lent_snapshots_are_evicted_lends_the_one_of_its_answer():
    engine = tight(480, 2)
    engine.ask(FIRST)
    engine.start(LONG)
    engine.core.free_evictable()
    assert engine.lent() == {} and engine.cache.num_bytes == 0
    engine.finish_all()
    assert engine.tokens["b"] == answer(LONG)
    assert engine.stored() == [444], "there is no memory for a copy beside the row"


def test_memory_pressure_does_not_change_the_tokens_of_a_prompt_in_progress(engine):
    engine.begin(LONG)
    engine.core.free_evictable()
    engine.check()
    engine.finish_all()
    assert engine.tokens["b"] == answer(LONG)
    assert engine.ask(following("c", LONG, *tokens(2, 20))) == [402]


# Other prompts


def test_another_prompt_gets_a_copy_from_the_row_and_the_row_goes_on(engine):
    engine.start(LONG)
    other = following("c", FIRST, *tokens(7, 100))
    engine.start(other)
    assert engine.chunks["c"][0].num_cached == TURN
    assert engine.lent() == {"b/0": [402], "c/0": [302]}
    assert ("fill", "b/0", TURN) in engine.runner.calls
    engine.finish_all()
    assert engine.tokens["b"] == answer(LONG) and engine.tokens["c"] == answer(other)


def test_another_prompt_gets_a_copy_from_a_prompt_in_progress(engine):
    engine.begin(LONG)
    other = following("c", FIRST, *tokens(7, 30))
    engine.start(other)
    engine.finish_all()
    assert engine.chunks["c"][0].num_cached == TURN and engine.tokens["b"] == answer(LONG)


def test_equal_prompts_that_arrive_together_are_computed_once():
    engine = Engine(cache={"answers": False})
    first, second = request("a", tokens(1, 300)), request("bb", tokens(1, 300))
    engine.run({0: [first, second]})
    assert engine.chunks["bb"][0].num_cached == 300
    engine.finish_all()
    assert engine.cache.num_bytes == size(300)


# Preemption


def test_a_preempted_row_returns_its_kv_segments_and_continues_from_them(engine):
    engine.start(LONG)
    engine.core.scheduler.preempt(engine.runner.rows["b/0"], "growth")
    num_before = engine.core.stats.num_prompt_tokens
    engine.finish_all()
    assert engine.tokens["b"] == answer(LONG) and engine.stored() == [TURN, 402]
    assert engine.core.stats.num_prompt_tokens - num_before <= 2 + 40


def test_a_preempted_row_that_is_not_readmitted_in_that_step_returns_its_kv_segments():
    """The scheduler asks in the same step whether it fits beside the urgent request."""
    cache = {"answers": False, "boundaries": ["turn"]}
    engine = Engine(7400, cache=cache, scheduler={"policy": "priority"})
    row = request("a", tokens(1, 200), max_tokens=100, priority=5)
    urgent = request("u", tokens(3, 298), max_tokens=20, boundaries=())
    engine.start(row)
    engine.start(urgent)
    assert engine.core.stats.num_preempted == 1 and "a/0" not in engine.runner.rows
    assert engine.stored() == [TURN] and not engine.lent()
    engine.finish_all()
    assert engine.tokens["a"] == answer(row) and engine.tokens["u"] == answer(urgent)


def test_a_preempted_row_whose_keys_and_values_are_cached_recomputes_only_its_answer():
    engine = Engine(cache={"answers": False})
    engine.start(one := request("a", tokens(1, 300)))
    engine.core.scheduler.preempt(engine.runner.rows["a/0"], "growth")
    num_before = engine.core.stats.num_prompt_tokens
    engine.finish_all()
    assert engine.core.stats.num_prompt_tokens - num_before <= 2 + 40
    assert engine.tokens["a"] == answer(one)


# On disk


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Any]:
    made: list[SnapshotFiles] = []

    def make() -> SnapshotFiles:
        made.append(SnapshotFiles(DiskCacheConfig(path=str(tmp_path)), "model"))
        return made[-1]

    yield make
    for one in made:
        one.close(5)


def on_disk(files: SnapshotFiles) -> list[int]:
    files.flush()
    return sorted(len(meta.token_ids) for meta in files.entries())


def test_a_snapshot_is_written_when_its_keys_and_values_are_returned(files):
    store = files()
    engine = Engine(files=store, cache={"answers": False})
    engine.start(FIRST)
    assert engine.lent() == {"a/0": [TURN]} and on_disk(store) == []
    engine.finish_all()
    assert on_disk(store) == [TURN]


def test_a_kv_segment_that_is_written_for_want_of_memory_counts_while_a_prompt_holds_it(files):
    store, shelf = files(), Shelf(100, 200)
    shelf.cache.file_of = store.meta_of
    disk = DiskTier(store, shelf.memory, shelf.engine.runner, Clock(), CostModel())
    shelf.loans = Loans(shelf.memory, disk, shelf.engine.runner)
    shelf.move("r", shelf.nodes[-1])
    shelf.cache.hold(shelf.nodes[-1])
    shelf.room = 2 * STATE_BYTES + 500
    assert shelf.drop("r") == {"r": [100, 200]}
    assert on_disk(store) == [100, 200] and len(shelf.cache) == 2 and shelf.cache.num_in_memory == 0
    assert shelf.cache.num_bytes == 2000
    shelf.cache.release(shelf.nodes[-1])
    assert shelf.cache.num_bytes == 0 and shelf.cache.integrity_error() is None


def test_a_snapshot_is_written_when_it_is_copied_for_another_prompt(files):
    store = files()
    engine = Engine(files=store, cache={"answers": False})
    engine.start(FIRST)
    engine.start(following("c", FIRST, *tokens(7, 100)))
    assert on_disk(store) == [TURN]
    engine.finish_all()
    assert on_disk(store) == [TURN, 302]


def test_close_writes_the_snapshots_of_running_rows_and_prompts(files):
    store = files()
    engine = Engine(files=store, cache={"answers": False})
    engine.ask(FIRST)
    engine.start(LONG)
    engine.begin(request("p", tokens(4, 100), tokens(5, 70), tokens(6, 400)))
    engine.core.close()
    again = files()
    assert {TURN, 402} <= set(on_disk(again))
    restarted = Engine(files=again, cache={"answers": False})
    assert restarted.ask(following("c", LONG, *tokens(2, 20))) == [402]


def test_close_with_a_failing_runner_leaves_files_of_the_snapshots_already_returned(files):
    store = files()
    engine = Engine(files=store, cache={"answers": False})
    engine.ask(FIRST)
    engine.start(LONG)
    engine.runner.broken = {"drop"}
    engine.core.close()
    assert on_disk(files()) == [TURN]


def test_a_snapshot_lost_with_a_failed_row_is_read_back_from_its_file(files):
    store = files()
    engine = Engine(files=store, cache={"answers": False})
    engine.ask(FIRST)
    store.flush()
    engine.begin(LONG)
    engine.runner.broken = {"prefill"}
    engine.step()
    engine.runner.broken = set()
    engine.finish_all()
    assert engine.ask(following("c", FIRST, *tokens(2, 200))) == [TURN]


def test_a_file_is_not_continued_from_keys_and_values_that_their_row_took_with_it(files):
    """They were in memory when the reading began; the row that had them has failed meanwhile."""
    store = files()
    engine = Engine(files=store, cache={"answers": False})
    engine.ask(FIRST)
    engine.ask(LONG)
    engine.ask(next_turn := following("c", LONG, *tokens(6, 300)))
    store.flush()
    engine.cache.forget_memory(next(one for one in engine.cache.nodes() if one.num_tokens == 704))
    row = following("row", LONG, *tokens(5, 10))
    engine.start(row)
    assert engine.lent()["row/0"][:2] == [TURN, 402]
    store.wait = lambda futures, timeout_s: False
    late = following("late", next_turn, *tokens(7, 20))
    engine.core.add_request(late)
    engine.step(2)
    [prompt] = engine.core.scheduler.prefills.in_progress
    assert prompt.session is not None and prompt.session.reading is not None
    engine.runner.broken = {"decode"}
    engine.step()
    engine.runner.broken = set()
    assert engine.finish["row"] is FinishReason.ERROR
    del store.wait
    engine.finish_all()
    assert engine.tokens["late"] == answer(late) and engine.chunks["late"][0].num_cached == 704


# All of it at random


class HesitantFiles(SnapshotFiles):
    """Files of which a wait finds nothing as often as not, so that everything else happens between two waits."""

    def __init__(self, path: Path, seed: int):
        super().__init__(DiskCacheConfig(path=str(path)), "model")
        self._rng = random.Random(seed)

    def wait(self, futures: Sequence[Any], timeout_s: float) -> bool:
        return self._rng.random() < 0.4 and super().wait(futures, 5.0)


class RandomClock:
    """Advances by a random time when it is read, so that a seed repeats all that depends on measured seconds."""

    def __init__(self, seed: int):
        self._rng, self._now_s = random.Random(seed), 100.0

    def __call__(self) -> float:
        self._now_s += 1e-4 * self._rng.random()
        return self._now_s


class Traffic:
    """Conversations of several turns with one or two system parts, whose clients go away, and a runner that fails."""

    def __init__(self, seed: int, files: SnapshotFiles | None = None):
        self.rng = random.Random(seed)
        rng = self.rng
        limit = rng.choice([2**30, 60_000, 40_000, 26_000])
        config: dict[str, Any] = {"memory": {"reserve_tokens": rng.choice([8, 32, 4096])}}
        if rng.random() < 0.4:
            config["scheduler"] = {"policy": "priority"}
        cache: dict[str, Any] = {"answers": rng.random() < 0.6}
        if rng.random() < 0.3:
            cache["max_gb"] = rng.choice([8_000, 20_000]) / 2**30
        clock = RandomClock(seed) if files is None else None
        self.engine = Engine(limit, files, cache, clock, max_running=rng.choice([2, 4, 8]), **config)
        self.engine.runner.snapshots_prefixes = seed % 2 == 1
        self.systems = [tokens(900 + i, 40 + 30 * i) for i in range(2)]
        self.conversations: list[list[Any]] = [[] for _ in range(5)]
        self.sent: dict[str, Any] = {}
        self.is_faulty = rng.random() < 0.5

    def run(self, num_steps: int) -> None:
        for number in range(num_steps):
            self.act(number)
            self.engine.step()
        self.heal()
        self.engine.finish_all()
        for name, one in self.sent.items():
            said = answer(one)
            assert self.engine.tokens[name] == said[: len(self.engine.tokens[name])]
            if self.engine.finish.get(name) is FinishReason.LENGTH:
                assert self.engine.tokens[name] == said

    def act(self, number: int) -> None:
        rng, engine = self.rng, self.engine
        self.heal()
        if rng.random() < 0.25:
            self.send(f"{number}-{'x' * rng.randrange(5)}")
        if rng.random() < 0.04 and self.sent:
            engine.core.abort(rng.choice(list(self.sent)))
        if rng.random() < 0.01:
            engine.core.prefixes.clear()
        if rng.random() < 0.01:
            engine.core.free_evictable()
        if rng.random() < 0.03 and (running := list(engine.core.scheduler._running.values())):
            engine.core.scheduler.preempt(rng.choice(running), "growth")
        if self.is_faulty and rng.random() < 0.06:
            kind = rng.choice(["fill", "restore", "prefill", "decode", "drop", "snapshot", "snapshot_row", "lacking"])
            if kind == "lacking":
                engine.runner.lacking = set(rng.sample(sorted(engine.runner.rows), min(1, len(engine.runner.rows))))
            elif kind in ("fill", "restore") and rng.random() < 0.7:
                engine.runner.breaks_at = {kind: rng.randrange(3)}
            else:
                engine.runner.broken = {kind}

    def heal(self) -> None:
        self.engine.runner.broken, self.engine.runner.breaks_at = set(), {}
        self.engine.runner.lacking = set()

    def send(self, name: str) -> None:
        rng, turns = self.rng, self.conversations[rng_index(self.rng)]
        before = next((one for one in reversed(turns) if rng.random() < 0.8), None)
        more = {"max_tokens": rng.choice([1, 20, 60])}
        if before is None or len(before.token_ids) > 500:
            turns.clear()
            parts = [rng.choice(self.systems), tokens(rng.randrange(10**6), rng.randrange(20, 200))]
            one = request(name, *parts, **more, pinned=rng.random() < 0.1)
        else:
            num_said = rng.choice([0, min(20, before.sampling.max_tokens)])
            one = following(name, before, *tokens(rng.randrange(10**6), rng.randrange(1, 100)), said=num_said)
            one = replace(one, sampling=replace(one.sampling, max_tokens=more["max_tokens"], seed=len(name)))
        if rng.random() < 0.1:
            one = replace(one, num_choices=2, pinned=False)
        elif rng.random() < 0.1:
            dense = rng.randrange(len(one.token_ids) - 10)
            kept = [*range(dense), *range(dense + 5, len(one.token_ids))]
            sent = with_plan(replace(one, pinned=False), kept, dense)
            self._add(name, sent)
            return
        turns.append(one)
        self._add(name, replace(one, priority=rng.randrange(3)))

    def _add(self, name: str, one: Any) -> None:
        self.sent[name] = one
        self.engine.core.add_request(
            self.engine.core.budget.needs.clamp_max_tokens(one, self.engine.core.figures.pinned_bytes)
        )


def rng_index(rng: random.Random) -> int:
    return min(rng.randrange(5), rng.randrange(5))


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_accounts_and_answers_are_right_after_random_operations(seed):
    Traffic(seed).run(400)


@pytest.mark.parametrize("seed", range(max(2, NUM_SEEDS // 4)))
def test_accounts_and_answers_are_right_after_random_operations_with_a_disk_tier(seed, tmp_path):
    files = HesitantFiles(tmp_path, seed)
    Traffic(1000 + seed, files).run(200)
    files.close(5)
