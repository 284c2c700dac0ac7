"""A kind of layer is one file and one entry of KINDS: a kind of this file's own is served as the library's are.

Its layer sees each token and the one before it, and keeps that one token's keys and values. The library's own window of
two tokens, in forwards without any state, gives the answers.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from mlx_vlm.models.cache import KVCache, RotatingKVCache
from mlx_vlm.models.olmo3.language import LanguageModel

from engine.errors import EngineFailed
from engine.worker import layer_kinds, snapshot
from engine.worker.batch_layer import BatchLayer
from engine.worker.burst_layer import BurstAttention
from engine.worker.kv_cache import BatchCache
from engine.worker.layer_kind import LayerKind
from tests.engine.worker import test_families
from tests.engine.worker.test_families import Served
from tests.support.families.family import WINDOWED, WINDOWS, Family, text
from tests.support.zoo import conversation, load, make

FAMILY = Family(text("olmo3", WINDOWS | {"sliding_window": 2}), WINDOWED, seed=1)
TESTS = (
    test_families.test_request_alone_gets_the_tokens_of_forwards_without_any_state,
    test_families.test_requests_that_arrive_together_share_forwards_and_get_the_same_tokens_as_alone,
    test_families.test_request_in_a_batch_gets_the_same_tokens_as_alone,
    test_families.test_pieces_of_prompts_computed_in_one_forward_give_the_same_tokens_as_alone,
    test_families.test_prompt_that_begins_beside_the_rest_of_another_gets_the_same_tokens_as_alone,
    test_families.test_second_turn_gets_the_same_tokens_from_the_prefix_cache,
    test_families.test_drafts_by_prompt_lookup_change_no_token,
    test_families.test_rows_of_a_family_leave_no_memory_behind,
)


class PairCache:
    """One row's layer: keys and values [1, heads, 1, head_dim] of its last token."""

    def __init__(self) -> None:
        self.offset = 0
        self.keys: Any = None
        self.values: Any = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.offset += keys.shape[2]
        if self.keys is not None:
            keys, values = mx.concatenate([self.keys, keys], axis=2), mx.concatenate([self.values, values], axis=2)
        self.keys, self.values = (mx.contiguous(one[..., -1:, :]) for one in (keys, values))
        return keys, values

    def make_mask(self, num_new: int, window_size: int | None = None, return_array: bool = False) -> mx.array:
        return pairs(num_new, int(self.keys is not None))

    @property
    def state(self) -> list[Any]:
        return [self.keys, self.values]

    @property
    def nbytes(self) -> int:
        return sum(0 if one is None else one.nbytes for one in self.state)


class BatchPairLayer(BatchLayer):
    """The layer of all rows: keys and values [B, heads, 1, head_dim]."""

    def __init__(self, state: Sequence[mx.array], cursor: Any):
        self.state, self.cursor = list(state), cursor
        self._recorded: list[mx.array] = []

    @classmethod
    def of(cls, cache: PairCache, cursor: Any) -> "BatchPairLayer":
        return cls(cache.state, cursor)

    @property
    def offset(self) -> int | mx.array:
        return self.cursor.start if self.cursor.as_offset else self.cursor.extent

    @property
    def recorded(self) -> Sequence[mx.array]:
        return self._recorded

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.state)

    def make_mask(self, num_new: int, window_size: int | None = None, return_array: bool = False) -> mx.array:
        return pairs(num_new, 1)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        keys, values = (mx.concatenate([old, new], axis=2) for old, new in zip(self.state, (keys, values), strict=True))
        if self.recording:
            self._recorded = [keys, values]
        else:
            self.state = [one[..., -1:, :] for one in (keys, values)]
        return keys, values

    def commit(self, num_kept: mx.array) -> None:
        at = num_kept[:, None, None, None]
        self.state = [
            mx.take_along_axis(one, mx.broadcast_to(at, (*one.shape[:2], 1, one.shape[3])), axis=2)
            for one in self._recorded
        ]
        self.recording, self._recorded = False, []

    def reserve(self, num_slots: int) -> bool:
        return False

    def row(self, index: int, num_tokens: int) -> PairCache:
        cache = PairCache()
        cache.offset = num_tokens
        cache.keys, cache.values = (mx.contiguous(one[index : index + 1]) for one in self.state)
        return cache

    def append(self, rows: Sequence[PairCache]) -> "BatchPairLayer":
        states = zip(self.state, *(row.state for row in rows), strict=True)
        return BatchPairLayer([mx.concatenate(list(each)) for each in states], self.cursor)

    def select(self, rows: mx.array, num_slots: int) -> "BatchPairLayer":
        return BatchPairLayer([one[rows] for one in self.state], self.cursor)


class BurstPairs(BurstAttention):
    """The layer of all prompts of a burst."""

    _window = 2

    def _kept_before(self, cache: PairCache) -> Any:
        return cache.state if cache.offset else None


class PairKind(LayerKind):
    """Keys and values of the last token, as the state that snapshots copy."""

    library = rows = (PairCache,)
    batch = BatchPairLayer
    burst = BurstPairs

    def reach(self, cache: PairCache) -> int:
        return 2

    def state(self, cache: PairCache) -> tuple[mx.array, ...]:
        return tuple(cache.state)

    def set_state(self, cache: PairCache, state: tuple[mx.array, ...], num_tokens: int) -> None:
        cache.keys, cache.values = map(mx.contiguous, state)
        cache.offset = num_tokens


def pairs(num_new: int, num_before: int) -> mx.array:
    """Return which of the slots before and of the new tokens each new token sees: bool [num_new, slots]."""
    slots, own = mx.arange(num_before + num_new), mx.arange(num_before, num_before + num_new)[:, None]
    return (slots <= own) & (slots > own - 2)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = make(tmp_path_factory.mktemp("pairs") / "model", FAMILY)
    turns, make_cache = conversation(load(path)), LanguageModel.make_cache

    def with_pairs(lm: Any) -> list[Any]:
        return [PairCache() if type(one) is RotatingKVCache else one for one in make_cache(lm)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LanguageModel, "make_cache", with_pairs)
        with pytest.raises(EngineFailed, match="layer 0 keeps its state in a PairCache, which rows cannot share"):
            test_families.cold(path)
        for one, kind in layer_kinds.by_class(PairKind()).items():
            patch.setitem(layer_kinds.KINDS, one, kind)
        yield Served(test_families.cold(path), turns)


@pytest.mark.parametrize("test", TESTS, ids=lambda test: test.__name__.removeprefix("test_"))
def test_a_kind_with_one_entry_passes_the_tests_of_a_family(served, test):
    assert served.runner.no_bursts is None and "prompt_lookup" not in served.runner.no_drafts
    test(served, 23) if test is TESTS[0] else test(served)


def test_a_snapshot_of_its_state_comes_back_from_files(served):
    """The next token's keys and values are the same to the bit in all layers."""
    lm, token_ids = served.runner._language_model, served.turns["short"].token_ids
    row = lm.make_cache()
    positions = np.broadcast_to(np.arange(len(token_ids), dtype=np.int32), (3, 1, len(token_ids)))
    lm.extend(mx.array([token_ids]), None, row, positions, launch=False)
    before = snapshot.take(row, None, len(token_ids), None)
    *_, after = snapshot.import_arrays(snapshot.export(before), before, len(token_ids), None)
    assert after is not None
    again = lm.make_cache()
    snapshot.restore(after, again, len(token_ids) + 1)
    at = np.full((3, 1, 1), len(token_ids), np.int32)
    for one in (row, again):
        lm.extend(mx.array([[7]]), None, one, at, launch=False)
    for one, expected in zip(again, row, strict=True):
        assert all(mx.array_equal(*pair).item() for pair in zip(one.state, expected.state, strict=True))


def test_every_class_of_a_kind_is_exactly_one_of_its_own():
    """A subclass of a served cache stores its state differently, and is of no kind."""

    class Grown(KVCache):
        pass

    with pytest.raises(KeyError):
        layer_kinds.kind_of(Grown())
    with pytest.raises(KeyError):
        BatchCache.of([Grown()])
    assert not layer_kinds.keeps_all(Grown()) and layer_kinds.keeps_all(KVCache())


def test_each_kind_of_rows_appends_exactly_if_its_layer_of_a_group_does():
    appending = {one.__name__ for one, kind in layer_kinds.KINDS.items() if one in kind.rows and kind.batch.appends}
    assert appending == {"KVCache", "QuantizedKVCache", "PooledCache"}
