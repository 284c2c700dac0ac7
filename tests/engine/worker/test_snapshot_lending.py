"""Keys and values that a row takes over: they are in memory once, and come back bit for bit as a copy would be."""

import gc
from itertools import product
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest

from engine.core.prompt import Prompt
from engine.core.row import Row
from engine.core.runner import Drafts
from engine.protocol import EngineRequest, SamplingParams
from engine.worker.model_runner import MLXRunner
from engine.worker.snapshot import StateSnapshot
from tests.support.night import some_at_night

MODELS: dict[str, dict[str, Any]] = {
    "deep": {"layers": 4, "interval": 4, "agree": 0.3},
    "alternating": {"layers": 4, "interval": 2, "agree": 0.1, "seed": 1},
    "no head": {"layers": 4, "interval": 2, "mtp": False},
    "text": {},
}
"""`text` is the draft of the demo model, in bfloat16 as the checkpoint has it."""
NUM_FIRST, NUM_SECOND, NUM_PROMPT = 100, 230, 300


def row_of(name: str, seed: int, num_prompt: int = NUM_PROMPT) -> Row:
    ids = np.random.default_rng(seed).integers(20, 500, num_prompt).astype(np.int32)
    return Prompt([Row(EngineRequest(name, ids, SamplingParams(400, 0.8, seed=seed), ()))], arrived_s=0.0, rank=0.0).row


def prefill(runner: MLXRunner, row: Row, num_tokens: int) -> None:
    """Until so many tokens of its prompt are computed; with all of them it joins."""
    while row.prompt.num_prefilled < num_tokens:
        output = runner.prefill([row], min(64, num_tokens - row.prompt.num_prefilled))
        row.prompt.num_prefilled += output.num_tokens
        if output.first is not None:
            row.append(output.first[row.id].token_ids[0])


def snapshots(runner: MLXRunner, seed: int) -> list[StateSnapshot]:
    """Two of one prompt, the second behind the first."""
    row, taken, parent = row_of("cold", seed), list[StateSnapshot](), None
    for end in (NUM_FIRST, NUM_SECOND):
        prefill(runner, row, end)
        snapshot = runner.snapshot([row], parent)
        assert snapshot is not None
        taken.append(snapshot)
        parent = snapshot.segment
    runner.drop([row.id])
    return taken


def contents(taken: list[StateSnapshot]) -> list[np.ndarray]:
    mx.eval([snapshot.segment.keys_values for snapshot in taken])
    arrays = [array for snapshot in taken for pair in snapshot.segment.keys_values for array in pair]
    return [np.array(mx.view(array, mx.uint16) if array.dtype == mx.bfloat16 else array) for array in arrays]


def lend(runner: MLXRunner, row: Row, taken: list[StateSnapshot]) -> list[Any]:
    segments = [snapshot.segment for snapshot in taken]
    runner.restore([row], taken[-1], segments)
    row.prompt.num_prefilled = NUM_SECOND
    assert all(segment.is_lent and not segment.num_bytes for segment in segments)
    with pytest.raises(ValueError, match="lent to a row"):
        _ = segments[0].keys_values
    return segments


def decode(runner: MLXRunner, rows: list[Row], num_steps: int, drafts: int) -> None:
    for _ in range(num_steps):
        outputs = runner.decode(Drafts(drafts))
        for row in rows:
            for token in outputs[row.id].token_ids if row.id in outputs else ():
                row.append(token)


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return len(one) == len(other) and all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("how", ["drop", "fill"])
def test_a_prompt_in_progress_returns_its_kv_segments_bit_for_bit(runner_of, name, how):
    runner = runner_of(name)
    taken = snapshots(runner, 1)
    before, row = contents(taken), row_of("row", 1)
    segments = lend(runner, row, taken)
    prefill(runner, row, 280)
    if how == "fill":
        runner.fill(row.id, segments)
        prefill(runner, row, NUM_PROMPT)
        decode(runner, [row], 10, 0)
        runner.drop([row.id])
        cold = row_of("cold", 1)
        prefill(runner, cold, NUM_PROMPT)
        decode(runner, [cold], 10, 0)
        runner.drop([cold.id])
        assert row.output_token_ids == cold.output_token_ids or name == "text"
    else:
        runner.drop([row.id], {row.id: segments})
    assert same(contents(taken), before)
    assert runner.memory()["prefill_cache_bytes"] == 0


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("how", ["drop", "fill"])
def test_a_single_row_returns_its_kv_segments_bit_for_bit(runner_of, name, how, drafts):
    runner = runner_of(name)
    taken = snapshots(runner, 2)
    before, row = contents(taken), row_of("row", 2)
    segments = lend(runner, row, taken)
    prefill(runner, row, NUM_PROMPT)
    decode(runner, [row], 9, drafts)
    if how == "fill":
        runner.fill(row.id, segments)
        decode(runner, [row], 3, drafts)
        runner.drop([row.id])
    else:
        runner.drop([row.id], {row.id: segments})
    assert same(contents(taken), before)
    assert runner.memory()["decode_cache_bytes"] == 0


@pytest.mark.parametrize(
    ("name", "drafts"),
    some_at_night(
        product(("deep", "alternating", "no head", "text"), (0, 3)),
        [("deep", 3), ("alternating", 0), ("no head", 3), ("text", 0)],
        "the gate has each model, with drafts or without",
        are_sets=True,
    ),
)
def test_rows_of_a_group_return_their_kv_segments_without_effect_on_the_others(runner_of, name, drafts):
    """Two leave with what they have, one after the other, and the third is asked for a copy and goes on."""
    runner = runner_of(name)

    def run(lends: bool) -> list[list[int]]:
        taken = [snapshots(runner, seed) for seed in (3, 4, 5)]
        before, rows = [contents(each) for each in taken], [row_of(f"row {seed}", seed) for seed in (3, 4, 5)]
        lent: dict[str, Any] = {}
        for row, each in zip(rows, taken, strict=True):
            if lends:
                lent[row.id] = lend(runner, row, each)
            else:
                runner.restore([row], each[-1])
                row.prompt.num_prefilled = NUM_SECOND
            prefill(runner, row, NUM_PROMPT)
            decode(runner, rows, 2, drafts)
        if lends:
            runner.fill(rows[2].id, lent[rows[2].id][:1])
        for left in (1, 0):
            decode(runner, rows, 5, drafts)
            runner.drop([rows[left].id], {rows[left].id: lent[rows[left].id]} if lends else None)
        decode(runner, rows, 8, drafts)
        runner.drop([rows[2].id], {rows[2].id: lent[rows[2].id][1:]} if lends else None)
        assert all(same(contents(each), then) for each, then in zip(taken, before, strict=True))
        return [row.output_token_ids for row in rows]

    assert run(lends=True) == run(lends=False)


def test_snapshots_lent_while_the_prompt_runs_equal_copied_ones(runner_of):
    for name in MODELS:
        runner = runner_of(name)
        copies, row, lent = snapshots(runner, 6), row_of("row", 6), list[StateSnapshot]()
        for end in (NUM_FIRST, NUM_SECOND):
            prefill(runner, row, end)
            snapshot = runner.snapshot([row], lent[-1].segment if lent else None, lend=True)
            assert snapshot is not None and snapshot.segment_bytes == 0
            lent.append(snapshot)
        prefill(runner, row, NUM_PROMPT)
        decode(runner, [row], 5, 2)
        runner.drop([row.id], {row.id: [snapshot.segment for snapshot in lent]})
        assert same(contents(lent), contents(copies)), name
        assert [one.segment.ends for one in lent] == [one.segment.ends for one in copies]


def test_unknown_or_reset_rows_fill_no_kv_segment(runner_of):
    runner = runner_of("alternating")
    taken, row = snapshots(runner, 7), row_of("row", 7)
    segments = lend(runner, row, taken)
    runner.fill("unknown/0", segments)
    runner.drop(["unknown/0"], {"unknown/0": segments})
    assert all(segment.is_lent for segment in segments)
    prefill(runner, row, NUM_PROMPT)
    runner.reset()
    runner.fill(row.id, segments)
    assert all(segment.is_lent for segment in segments)


def test_a_failed_copy_leaves_kv_segments_lent_and_can_be_repeated(runner_of, monkeypatch):
    runner = runner_of("alternating")
    taken = snapshots(runner, 8)
    before, row = contents(taken), row_of("row", 8)
    segments = lend(runner, row, taken)
    prefill(runner, row, NUM_PROMPT)
    from engine.worker import snapshot

    copied, num_calls = snapshot._between, 0

    def failing(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise RuntimeError("out of memory")
        return copied(*args)

    monkeypatch.setattr(snapshot, "_between", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        runner.fill(row.id, segments)
    monkeypatch.undo()
    assert all(segment.is_lent and not segment.num_bytes for segment in segments)
    runner.drop([row.id], {row.id: segments})
    assert same(contents(taken), before)


@pytest.mark.parametrize("name", some_at_night(["deep", "text"], ["deep"], "the gate has both kinds of layers"))
def test_keys_and_values_are_in_memory_once_while_they_are_lent(runner_of, name):
    runner = runner_of(name)

    def active_bytes(lends: bool) -> tuple[int, int]:
        taken, row = snapshots(runner, 9), row_of("row", 9)
        num_bytes = sum(snapshot.segment_bytes for snapshot in taken)
        if lends:
            segments = lend(runner, row, taken)
        else:
            segments = []
            runner.restore([row], taken[-1])
            row.prompt.num_prefilled = NUM_SECOND
        prefill(runner, row, NUM_PROMPT)
        decode(runner, [row], 3, 0)
        mx.synchronize()
        gc.collect()
        active = mx.get_active_memory()
        runner.drop([row.id], {row.id: segments} if lends else None)
        return active, num_bytes

    active_bytes(True)
    copied, num_bytes = active_bytes(False)
    lent, _ = active_bytes(True)
    assert 0.9 * num_bytes <= copied - lent <= 1.1 * num_bytes + 2**16
