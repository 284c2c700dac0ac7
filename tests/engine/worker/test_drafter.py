"""A head reads the token of each draft at the place behind the one before it."""

from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import pytest
from mlx_vlm.models.cache import KVCache

from engine.worker.drafter import Drafter, PendingHiddenStates
from engine.worker.kv_cache import BatchCache


class RecordingHead:
    """Stores the ids of tokens as keys, and records their positions."""

    proposer, as_offset, block, sharing = "mtp", True, None, None

    def __init__(self, lead: int):
        self.lead = lead
        self.positions: list[Any] = []

    def __call__(self, token_ids: mx.array, hidden: mx.array, cache: list[Any], positions: mx.array) -> mx.array:
        self.positions.append(positions.tolist())
        keys = mx.broadcast_to(token_ids[:, None, :, None], (*token_ids.shape[:1], 1, token_ids.shape[1], 4))
        cache[0].update_and_fetch(keys.astype(mx.float32), mx.zeros(keys.shape))
        return hidden


def drafter_of(head: Any, num_tokens: int, token_id: int) -> Drafter:
    """Return the drafter of one row of `num_tokens` tokens and a newest one, which the head has not read."""
    cache, before = KVCache(), mx.zeros((1, 1, num_tokens - 1 + head.lead, 4))
    cache.update_and_fetch(before, before)
    return Drafter.of(head, [cache], PendingHiddenStates.of(token_id, mx.zeros((1, 1, 4))), BatchCache.of([]))


@pytest.mark.parametrize("lead", [0, 1])
def test_each_draft_is_read_behind_the_one_before_it(lead):
    head = RecordingHead(lead)
    drafter, other = drafter_of(head, 6, 90), drafter_of(head, 3, 80)
    drafter.join([other._cache.row(0, 2 + lead)], [other.pending])
    drafts = drafter.draft(4, mx.array([6, 3], mx.int32), 6, lambda hidden, i: mx.array([[10 + i], [20 + i]], mx.int32))
    assert drafts.tolist() == [[10, 11, 12, 13], [20, 21, 22, 23]]
    assert head.positions == [[[5 + lead + i], [2 + lead + i]] for i in range(4)]
    keys = drafter.layers[0].keys[:, 0, :, 0]
    assert keys[0, 5 + lead : 9 + lead].tolist() == [90, 10, 11, 12]
    assert keys[1, 2 + lead : 6 + lead].tolist() == [80, 20, 21, 22]
