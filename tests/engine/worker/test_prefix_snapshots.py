"""Snapshots of fewer tokens than a row has: they equal those that are taken when no more tokens are computed."""

from dataclasses import replace
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest

from engine.config import EngineConfig
from engine.core.prompt import Prompt
from engine.core.row import Row
from engine.core.runner import PromptChunk
from engine.protocol import Boundary, EngineRequest, SamplingParams
from engine.worker.model_runner import MLXRunner
from engine.worker.snapshot import StateSnapshot
from tests.support.cold_runner import load_cold
from tests.support.driver import Driver, fix_prefill_costs
from tests.support.families import FAMILIES
from tests.support.zoo import make

NUM_PROMPT, ENDS = 60, (21, 47)


@pytest.fixture(scope="module", params=[16, 8])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MLXRunner:
    """Runner of a llama whose keys and values have so many bits."""
    llama, heads = FAMILIES["llama"], {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    family = replace(llama, config=llama.config | heads)
    path = make(tmp_path_factory.mktemp("zoo") / "model", family)
    config = {"model": str(path), "max_context_tokens": 192, "max_running": 4, "kv_cache": {"bits": request.param}}
    return load_cold(EngineConfig.model_validate(config))


def row_of(name: str, seed: int) -> Row:
    ids = np.random.default_rng(seed).integers(20, 90, NUM_PROMPT).astype(np.int32)
    return Prompt([Row(EngineRequest(name, ids, SamplingParams(8, seed=seed), ()))], arrived_s=0.0, rank=0.0).row


def prefill(runner: MLXRunner, row: Row, num_tokens: int) -> None:
    output = runner.prefill([row], num_tokens)
    row.prompt.num_prefilled += output.num_tokens
    if output.first is not None:
        row.append(output.first[row.id].token_ids[0])


def contents(taken: list[StateSnapshot]) -> list[np.ndarray]:
    mx.eval([snapshot.segment.keys_values for snapshot in taken])
    return [np.array(array) for one in taken for pair in one.segment.keys_values for array in pair]


def taken_at_chunk_ends(runner: MLXRunner, row: Row) -> list[StateSnapshot]:
    taken: list[StateSnapshot] = []
    for end in ENDS:
        prefill(runner, row, end - row.prompt.num_prefilled)
        snapshot = runner.snapshot([row], taken[-1].segment if taken else None)
        assert snapshot is not None
        taken.append(snapshot)
    runner.drop([row.id])
    return taken


def taken_behind(runner: MLXRunner, row: Row, lend: bool) -> list[StateSnapshot]:
    taken: list[StateSnapshot] = []
    for end in ENDS:
        snapshot = runner.snapshot([row], taken[-1].segment if taken else None, lend, end)
        assert snapshot is not None and snapshot.num_tokens == end
        assert bool(snapshot.segment_bytes) is not lend
        taken.append(snapshot)
    return taken


@pytest.mark.parametrize("lend", [False, True])
@pytest.mark.parametrize("at", ["in the prompt", "while decoding", "after others joined", "in a burst"])
def test_a_snapshot_of_a_prefix_equals_one_taken_at_its_end(runner, at, lend):
    assert runner.snapshots_prefixes
    expected, row, other = taken_at_chunk_ends(runner, row_of("cold", 3)), row_of("row", 3), row_of("other", 4)
    if at == "after others joined":
        prefill(runner, other, NUM_PROMPT)
    if at == "in a burst":
        runner.prefill_burst([PromptChunk(other, NUM_PROMPT), PromptChunk(row, NUM_PROMPT)])
    else:
        prefill(runner, row, NUM_PROMPT - 5 if at == "in the prompt" else NUM_PROMPT)
    if at == "while decoding":
        runner.decode()
    taken = taken_behind(runner, row, lend)
    runner.decode() if at != "in the prompt" else prefill(runner, row, 5)
    runner.drop([row.id, other.id], {row.id: [one.segment for one in taken]} if lend else None)
    assert [one.segment.ends for one in taken] == [one.segment.ends for one in expected]
    for mine, its in zip(contents(taken), contents(expected), strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-4, atol=1e-5)


def test_a_state_that_is_not_finite_gives_no_snapshot_of_a_decoding_row(runner):
    row = row_of("row", 5)
    prefill(runner, row, NUM_PROMPT)
    (group,) = runner._batch._groups.values()
    assert runner.snapshot([row], None, num_tokens=30) is not None
    for layer in group._cache.layers:
        if layer.kv_format is None:
            layer.keys[..., 29, :] = float("nan")
        else:  # the last words of a token are its scales and biases
            layer.keys[..., 29, :] = mx.array(0x7FC07FC0, mx.uint32)
    assert runner.snapshot([row], None, num_tokens=30) is None
    runner.drop([row.id])


def served(driver: Driver, *requests: EngineRequest) -> list[Any]:
    for one in requests:
        driver.run({0: [one]})
    return [(driver.tokens[one.request_id], driver.chunks[one.request_id][0].num_cached) for one in requests]


def test_prompts_that_run_past_their_boundaries_get_the_same_answers_and_hits(runner, monkeypatch):
    ids = np.random.default_rng(6).integers(20, 90, NUM_PROMPT).astype(np.int32)
    boundaries = (Boundary("turn", 40),)
    first = EngineRequest("first", ids, SamplingParams(8), (), boundaries=boundaries)
    second = replace(first, request_id="second", token_ids=np.append(ids[:42], ids[:15]))
    results = {}
    for passes in (True, False):
        monkeypatch.setattr(runner, "snapshots_prefixes", passes)
        driver = Driver(runner, EngineConfig.model_validate({"mtp": "off"}))
        fix_prefill_costs(driver.core, 0.02, 1e-5)
        num_chunks, forward = 0, runner.prefill

        def counting(*args: Any, forward: Any = forward) -> Any:
            nonlocal num_chunks
            num_chunks += 1
            return forward(*args)

        monkeypatch.setattr(runner, "prefill", counting)
        results[passes] = served(driver, first, second)
        monkeypatch.setattr(runner, "prefill", forward)
        assert [cached for _, cached in results[passes]] == [0, 40]
        assert driver.core.prefixes.store.integrity_error() is None
        assert num_chunks == (2 if passes else 5), passes
    assert results[True] == results[False]
