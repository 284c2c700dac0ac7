"""Which rows decode together: new ones where they waste least, and groups that become one when that pays."""

from collections.abc import Sequence

import numpy as np

from engine.core.memory.costs import MemoryCosts
from engine.core.memory.grouping import Grouping
from engine.core.row import Row
from engine.protocol import EngineRequest, SamplingParams

COSTS = MemoryCosts(base_bytes=10_000, token_bytes=10, state_bytes=100)
TOKEN_S, STEP_S = 0.01, 0.01


def request(name: str, num_prompt: int, max_tokens: int = 300) -> EngineRequest:
    return EngineRequest(name, np.full(num_prompt, 7, np.int32), SamplingParams(max_tokens, seed=num_prompt), ())


def grouping_of(*groups: Sequence[int], costs: MemoryCosts = COSTS, max_tokens: int = 300) -> Grouping:
    """Each group has rows of these lengths."""
    grouping = Grouping(costs, 100_000)
    for number, lengths in enumerate(groups):
        for i, length in enumerate(lengths):
            rows = [Row(request(f"{number}.{i}", length, max_tokens))]
            grouping.put(grouping.groups.get(number), rows, length + 50)
    return grouping


def test_rows_join_the_group_where_they_waste_least_and_none_where_they_waste_more_than_the_weights():
    grouping = grouping_of([100], [600, 620])
    near, far = grouping.choose(1, 110, 150), grouping.choose(1, 650, 700)
    assert near is not None and far is not None and (near.id, far.id) == (0, 1)
    assert grouping.choose(1, 3000, 3050) is None
