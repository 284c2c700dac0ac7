"""Layers that pool the context: rows, groups, bursts and snapshots against forwards over whole sequences.

In DeepSeek V4 the prompts have entries of 4 tokens, whose windows overlap and among which an index chooses, and entries
of 128. In GLM-5-Next entries of 4 tokens are the index.
"""

from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest

from engine.config import EngineConfig
from engine.core.row import Row
from engine.protocol import EngineRequest, SamplingParams
from engine.worker import patches
from engine.worker.burst import BurstPrefill
from engine.worker.kv_cache import BatchCache, SequenceCache
from engine.worker.language_model import LanguageModel
from engine.worker.memory_costs import _exact
from engine.worker.patches import deepseek_v4_pools, glm5_next_rows
from engine.worker.pool_layer import BatchPoolLayer, PooledCache
from engine.worker.prefill import PromptState
from engine.worker.snapshot import StateSnapshot, export, import_arrays, restore, take
from tests.support.cold_runner import load_cold
from tests.support.families import FAMILIES
from tests.support.night import some_at_night
from tests.support.zoo import empty_cache, load, make, prompt

TOLERANCE = 1e-3  # of logits of size 5; those of GLM-5-Next differ by 3e-4 where the delta rule is cut
LENGTHS = [250, 121, 3]
"""Tokens of the rows before those that a group decodes: each completes an entry of 128 tokens, or none."""
NUM_DECODED = 24

OTHER_SIZES = "the gate has chunks that end within the entries of both ratios"


@pytest.fixture(scope="module", params=["deepseek_v4", "glm5_next"])
def lm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    patches.install(decodes=True)
    return load(make(tmp_path_factory.mktemp("pools") / "model", FAMILIES[request.param]))


@pytest.fixture(scope="module")
def token_ids() -> list[list[int]]:
    return [prompt(length + NUM_DECODED, seed) for seed, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def expected(lm: Any, token_ids: list[list[int]]) -> list[np.ndarray]:
    """Logits [L, vocab] of each sequence by the library, in one forward."""
    return [np.array(lm(mx.array([ids], mx.int32), cache=empty_cache(lm)).logits[0]) for ids in token_ids]


def extend(model: LanguageModel, cache: SequenceCache, token_ids: list[int], chunk: int = 2048) -> np.ndarray:
    """Compute tokens in chunks; return their logits [L, vocab]."""
    found = [
        np.array(model.lm(mx.array([token_ids[at : at + chunk]], mx.int32), cache=model._nested(cache)).logits[0])
        for at in range(0, len(token_ids), chunk)
    ]
    return np.concatenate(found)


def rows_of(model: LanguageModel, token_ids: list[list[int]]) -> list[SequenceCache]:
    rows = [model.make_cache() for _ in LENGTHS]
    for ids, length, row in zip(token_ids, LENGTHS, rows, strict=True):
        extend(model, row, ids[:length])
    return rows


@pytest.mark.parametrize("chunk", some_at_night([1, 3, 128, 7, 33, 200], [7], OTHER_SIZES))
@pytest.mark.parametrize("is_library", [True, False], ids=["library", "row"])
def test_a_prompt_in_pieces_gets_the_logits_of_one_forward(lm, token_ids, expected, chunk, is_library):
    model, ids = LanguageModel(lm), token_ids[0]
    if is_library:
        cache = empty_cache(lm)
        pieces = [ids[at : at + chunk] for at in range(0, len(ids), chunk)]
        found = np.concatenate([np.array(lm(mx.array([one], mx.int32), cache=cache).logits[0]) for one in pieces])
    else:
        found = extend(model, model.make_cache(), ids, chunk)
    np.testing.assert_allclose(found, expected[0], atol=TOLERANCE)


@pytest.mark.parametrize("num_pairs", [1, 1000])
def test_the_logits_do_not_depend_on_how_many_queries_are_computed_at_once(
    lm, token_ids, expected, num_pairs, monkeypatch
):
    for patch in (deepseek_v4_pools, glm5_next_rows):
        monkeypatch.setattr(patch, "SCORED_PAIRS", num_pairs)
    model = LanguageModel(lm)
    found = extend(model, model.make_cache(), token_ids[0], 150)
    np.testing.assert_allclose(found, expected[0], atol=TOLERANCE)


@pytest.mark.parametrize(
    ("num_new", "num_kept"),
    some_at_night(
        [(1, 1), (3, 3), (5, 2), (9, 1)], [(3, 3), (9, 1)], "the gate accepts all drafts and one of nine", are_sets=True
    ),
)
def test_rows_at_different_positions_get_the_logits_of_one_forward(lm, token_ids, expected, num_new, num_kept):
    """num_kept: tokens that are accepted of num_new; the others are wrong drafts, which nothing may remember."""
    model = LanguageModel(lm)
    rows = rows_of(model, token_ids)
    group = BatchCache.of(rows[0], as_offset=True)
    group.join(rows[1:])
    wrong = np.random.default_rng(7).integers(12, 500, (len(LENGTHS), num_new))
    for done in range(0, NUM_DECODED - num_kept, num_kept):
        at = [length + done for length in LENGTHS]
        new = wrong.copy()
        for row, start in enumerate(at):
            new[row, :num_kept] = token_ids[row][start : start + num_kept]
        layers = group.at(mx.array(at, mx.int32), max(at) + num_new, record=True)
        found = np.array(model.decode(mx.array(new, mx.int32), layers, mx.zeros(new.shape, mx.int32))[0])
        group.commit(mx.full(len(LENGTHS), num_kept, mx.int32))
        for row, start in enumerate(at):
            np.testing.assert_allclose(
                found[row, :num_kept], expected[row][start : start + num_kept], atol=TOLERANCE, err_msg=f"{row} {start}"
            )


def test_rows_that_leave_a_group_and_join_another_go_on_with_the_same_logits(lm, token_ids, expected):
    model = LanguageModel(lm)
    group = BatchCache.of(rows_of(model, token_ids)[0], as_offset=True)
    group.join(rows_of(model, token_ids)[1:])
    group.select([2, 1], 200)
    group.join([group.row(0, LENGTHS[2]), rows_of(model, token_ids)[0]])
    order = [2, 1, 2, 0]
    for done in range(6):
        at = [LENGTHS[i] + done for i in order]
        new = mx.array([[token_ids[i][start]] for i, start in zip(order, at, strict=True)], mx.int32)
        found = model.decode(new, group.at(mx.array(at, mx.int32), max(at) + 1), mx.zeros(new.shape, mx.int32))[0]
        for logits, i, start in zip(np.array(found)[:, 0], order, at, strict=True):
            np.testing.assert_allclose(logits, expected[i][start], atol=TOLERANCE)
    for index, i in enumerate(order):
        row = group.row(index, LENGTHS[i] + 6)
        rest = token_ids[i][LENGTHS[i] + 6 :]
        np.testing.assert_allclose(extend(model, row, rest, 5), expected[i][-len(rest) :], atol=TOLERANCE)


def contents(row: SequenceCache) -> list[np.ndarray]:
    return [np.array(array) for layer in row for array in layer.state]


def test_a_join_that_fails_leaves_the_rows_as_they_were(lm, token_ids, monkeypatch):
    model = LanguageModel(lm)
    rows = rows_of(model, token_ids)
    start = 270  # more tokens than the slots of one step
    extend(model, rows[0], token_ids[0][LENGTHS[0] : start])
    group = BatchCache.of(rows[0], as_offset=True)
    before = contents(group.row(0, start))

    def fail(rows: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(group.layers[-1], "append", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        group.join(rows[1:])
    assert all(np.array_equal(*pair) for pair in zip(before, contents(group.row(0, start)), strict=True))


def test_prompts_that_share_forwards_get_the_logits_of_one_forward(lm, token_ids, expected):
    """In pieces that end before, at and behind the ends of windows."""
    model = LanguageModel(lm)
    prompts = [
        PromptState(
            np.array(ids, np.int32),
            np.array([*ids[1:], 0], np.int32),
            model.make_cache(),
            np.broadcast_to(np.arange(len(ids), dtype=np.int32), (3, 1, len(ids))),
            len(ids),
            np.zeros(0, np.int32),
        )
        for ids in token_ids
    ]
    burst = BurstPrefill(model, None)
    for lengths in ([100, 7, 2], [29, 121, 5], [1, 1, 1], [130, 2, 4]):
        burst.advance(prompts, lengths)
    for one, ids, logits in zip(prompts, token_ids, expected, strict=True):
        found = extend(model, one.cache, ids[one.done :], 4)
        np.testing.assert_allclose(found, logits[one.done :], atol=TOLERANCE)


def snapshots(model: LanguageModel, token_ids: list[int], boundaries: list[int]) -> list[StateSnapshot]:
    """Return snapshots at these boundaries of one row, each behind the one before."""
    row, taken, done = model.make_cache(), [], 0
    for boundary in boundaries:
        extend(model, row, token_ids[done:boundary])
        parent = taken[-1].segment if taken else None
        taken.append(take(row, None, boundary, parent))
        done = boundary
    return taken


@pytest.mark.parametrize(
    "boundaries",
    some_at_night(
        [[1, 3], [2, 4, 5], [7, 9, 130], [126, 127, 128], [127, 255, 257]],
        [[2, 4, 5], [127, 255, 257]],
        "the gate has the first pools of each ratio, and boundaries before and behind two windows",
    ),
)
def test_a_row_goes_on_from_a_snapshot_at_any_boundary(lm, token_ids, expected, boundaries):
    model, ids = LanguageModel(lm), token_ids[0]
    for snapshot in snapshots(model, ids, boundaries):
        row = model.make_cache()
        restore(snapshot, row, len(ids))
        rest = ids[snapshot.num_tokens :]
        found = extend(model, row, rest, 23)
        np.testing.assert_allclose(found, expected[0][snapshot.num_tokens :], atol=TOLERANCE)


def test_a_row_goes_on_from_snapshots_that_another_node_sent(lm, token_ids, expected):
    """The prefixes differ in length from the snapshot that gives the shapes, which has no entry of 128 tokens."""
    model, ids = LanguageModel(lm), token_ids[0]
    [like] = snapshots(model, token_ids[2], [2])
    parent = None
    for sent in snapshots(model, ids, [3, 127, 131, 257]):
        *_, received = import_arrays(export(sent), like, sent.num_tokens, parent)
        assert received is not None
        row, parent = model.make_cache(), received.segment
        restore(received, row, len(ids))
        found = extend(model, row, ids[sent.num_tokens :], 23)
        np.testing.assert_allclose(found, expected[0][sent.num_tokens :], atol=TOLERANCE)


@pytest.mark.parametrize("how", ["drop", "fill"])
def test_a_decoding_row_returns_the_entries_that_it_took_over_bit_for_bit(tmp_path, how):
    path = make(tmp_path / "model", FAMILIES["deepseek_v4"])
    limits = {"max_context_tokens": 320, "max_running": 2}
    runner = load_cold(EngineConfig.model_validate({"model": str(path), **limits}))

    def row(name: str) -> Row:
        return Row(EngineRequest(name, np.array(prompt(260), np.int32), SamplingParams(40, temperature=0.0), ()))

    cold, taken = row("cold"), list[StateSnapshot]()
    for num_tokens in (9, 150, 257):
        runner.prefill([cold], num_tokens - (taken[-1].num_tokens if taken else 0))
        snapshot = runner.snapshot([cold], taken[-1].segment if taken else None)
        assert snapshot is not None
        taken.append(snapshot)
    runner.drop([cold.id])
    segments = [snapshot.segment for snapshot in taken]
    before = [np.array(array) for segment in segments for pair in segment.keys_values for array in pair]
    runner.restore([new := row("new")], taken[-1], segments)
    assert all(segment.is_lent for segment in segments)
    runner.prefill([new], 8)
    for _ in range(6):
        runner.decode()
    if how == "fill":
        runner.fill(new.id, segments)
    else:
        runner.drop([new.id], {new.id: segments})
    after = [np.array(array) for segment in segments for pair in segment.keys_values for array in pair]
    assert all(np.array_equal(*pair) for pair in zip(before, after, strict=True))


def test_the_bytes_of_a_group_are_those_of_the_costs(lm, token_ids):
    """Up to the fraction of a byte per token; the costs are read off a snapshot without an entry of 128 tokens."""
    model = LanguageModel(lm)
    costs = _exact(snapshots(model, token_ids[2], [2])[0], 0, 0, 0, 0)
    row = model.make_cache()
    extend(model, row, token_ids[0])
    group = BatchCache.of(row, as_offset=True)
    group.reserve(1024)
    group.select([0], 1024)
    assert 0 <= costs.slots(1024) * costs.token_bytes + costs.fixed(1024) - group.nbytes < 1024


def test_a_pool_has_a_slot_per_entry(lm, token_ids):
    model = LanguageModel(lm)
    row = model.make_cache()
    extend(model, row, token_ids[0])
    pools = [layer for layer in row if isinstance(layer, PooledCache)]
    assert [layer.ratio for layer in pools] == ([4, 4, 128, 4, 4] if model.args.model_type == "deepseek_v4" else [4])
    assert [layer.offset for layer in pools] == [len(token_ids[0]) // layer.ratio for layer in pools]
    slots = [layer.keys.shape[2] for layer in BatchCache.of(row).layers if isinstance(layer, BatchPoolLayer)]
    assert all(layer.offset <= num_slots <= 512 // layer.ratio for layer, num_slots in zip(pools, slots, strict=True))
