"""Which rows decode together: new ones where they waste least, and groups that become one when that pays."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import numpy as np

from engine.config import EngineConfig
from engine.core.memory.costs import MemoryCosts
from engine.core.memory.grouping import Grouping, GroupMerge
from engine.core.request import Request
from engine.protocol import EngineRequest, SamplingParams
from tests.support.driver import Driver
from tests.support.fake_runner import FakeRunner, answer

COSTS = MemoryCosts(base_bytes=10_000, token_bytes=10, state_bytes=100)
TOKEN_S, STEP_S = 0.01, 0.01


def request(name: str, num_prompt: int, max_tokens: int = 300) -> EngineRequest:
    return EngineRequest(name, np.full(num_prompt, 7, np.int32), SamplingParams(max_tokens, seed=num_prompt), ())


def grouping_of(*groups: Sequence[int], costs: MemoryCosts = COSTS, max_tokens: int = 300) -> Grouping:
    """Each group has rows of these lengths."""
    grouping = Grouping(costs, 100_000)
    for number, lengths in enumerate(groups):
        for i, length in enumerate(lengths):
            rows = [Request(request(f"{number}.{i}", length, max_tokens))]
            grouping.put(grouping.groups.get(number), rows, length + 50)
    return grouping


def test_rows_join_the_group_where_they_waste_least_and_none_where_they_waste_more_than_the_weights():
    grouping = grouping_of([100], [600, 620])
    near, far = grouping.choose(1, 110, 150), grouping.choose(1, 650, 700)
    assert near is not None and far is not None and (near.id, far.id) == (0, 1)
    assert grouping.choose(1, 3000, 3050) is None


def test_a_merge_moves_all_rows_of_the_smaller_group():
    grouping = grouping_of([100], [120, 130])
    [merge] = grouping.mergeable()
    assert merge == GroupMerge(source=0, target=1)
    grouping.merge(merge)
    [group] = grouping.groups.values()
    assert group.id == 1 and sorted(group.lengths) == [100, 120, 130] and group.num_slots == 180
    assert all(row.decode_group == 1 for row in group.rows.values()) and grouping.of("0.0/0") is group
    for row_id in list(group.rows):
        grouping.remove(row_id)
    assert not grouping.groups and not len(grouping)


def test_groups_whose_rows_differ_too_much_stay_apart():
    assert not grouping_of([10], [2000]).mergeable()
    pairs = grouping_of([10], [400], [390]).mergeable()
    assert set(pairs[0]) == {1, 2}, "those that waste least come first"


def test_a_merge_pays_when_it_saves_more_than_it_copies():
    merge = GroupMerge(0, 1)
    gain = grouping_of([100], [110]).gain_s(merge, TOKEN_S, STEP_S)
    assert gain > 0
    assert grouping_of([100], [110], max_tokens=200).gain_s(merge, TOKEN_S, STEP_S) < gain, "fewer steps are left"
    assert grouping_of([100], [700]).gain_s(merge, TOKEN_S, STEP_S) < gain, "attention reads slots in vain"
    assert grouping_of([500], [500], max_tokens=2).gain_s(merge, TOKEN_S, STEP_S) < 0, "the copy takes longer"
    free = grouping_of([100], [110], costs=MemoryCosts())
    assert free.gain_s(merge, TOKEN_S, STEP_S) <= 0, "without weights a step costs the same"


def test_rows_that_began_apart_decode_together_as_soon_as_memory_allows():
    """Beside the large row there is room for the other two as they are, but not for both as wide as the middle one."""
    runner, ticks = FakeRunner(), count()
    runner.costs = replace(COSTS, slots_step=16, overshoot=1, layer_share=0.1)
    runner.memory_limit_bytes = COSTS.base_bytes + 30_000
    settings = {"memory": {"headroom_gb": 0, "reserve_tokens": 64}, "prefix_cache": {"enabled": False}, "mtp": "off"}
    driver = Driver(runner, EngineConfig.model_validate(settings), lambda: 0.01 * next(ticks))
    requests = [request("small", 40), request("large", 2000, 50), request("middle", 400)]
    given = driver.run({0: requests[:1], 1: requests[1:2], 3: requests[2:]})
    assert given == {one.request_id: answer(one) for one in requests}
    names = [call[0] for call in runner.calls]
    assert names.count("merge_groups") == 1 and driver.core.stats.num_preempted == 0
    dropped = next(i for i, call in enumerate(runner.calls) if call[0] == "drop" and "large/0" in call)
    assert dropped < names.index("merge_groups") and names[names.index("merge_groups") + 1] == "decode"
    assert driver.core.budget.reserved_bytes == 0
