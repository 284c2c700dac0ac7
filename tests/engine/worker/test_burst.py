"""Chunks of several prompts in one forward: each prompt gets the tokens and the state that it would get alone."""

import asyncio
import zlib
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest

from engine.config import EngineConfig, GrammarConfig
from engine.core.row import Row
from engine.core.runner import Drafts, PromptChunk
from engine.processing.grammar import GrammarCompiler
from engine.protocol import EngineRequest, GrammarSpec, SamplingParams
from engine.worker import loader, patches
from engine.worker.burst import BurstPrefill
from engine.worker.language_model import LanguageModel
from engine.worker.model_runner import MLXRunner
from engine.worker.prefill import PromptState
from tests.support.families import FAMILIES
from tests.support.night import some_at_night
from tests.support.zoo import make

LENGTHS = (5, 33, 1, 17, 2, 70)
STATE_TOLERANCE = 1e-4
"""Between two forwards of different shapes: the order of sums."""

MODELS: dict[str, dict[str, Any]] = {
    "deep": {"layers": 4, "interval": 4, "agree": 0.3},
    "alternating": {"layers": 4, "interval": 2, "agree": 0.1, "seed": 1},
    "foreign head": {"layers": 2, "interval": 2, "seed": 3},
    "no head": {"layers": 4, "interval": 2, "mtp": False},
    "compiled": {"layers": 2, "interval": 2, "agree": 0.3, "seed": 2},
}


def row_of(name: str, num_prompt: int, max_tokens: int = 12, rectangle: int = 0, **sampling: Any) -> Row:
    ids = np.random.default_rng(zlib.crc32(name.encode())).integers(20, 500, num_prompt).astype(np.int32)
    params = SamplingParams(max_tokens, **{"temperature": 0.0, "seed": num_prompt} | sampling)
    return Row(EngineRequest(name, ids, params, ()), decode_group=rectangle)


def rows_of(lengths: Sequence[int] = LENGTHS, **more: Any) -> list[Row]:
    return [row_of(f"r{i}", length, **more) for i, length in enumerate(lengths)]


def chunks_of(runner: MLXRunner, rows: Sequence[Row], most: int = 1000) -> list[PromptChunk]:
    """The next tokens of each prompt, at most so many."""
    done = [prompt.done if (prompt := runner._prompts.get(row.id)) else 0 for row in rows]
    return [PromptChunk(row, min(most, row.num_tokens - n)) for row, n in zip(rows, done, strict=True)]


def take(rows: Sequence[Row], outputs: Mapping[str, Any]) -> list[str]:
    """Appends what came; returns the rows that have all of their tokens."""
    for row in rows:
        for token in outputs[row.id].token_ids if row.id in outputs else ():
            if len(row.output_token_ids) < row.sampling.max_tokens:
                row.append(token)
    return [row.id for row in rows if len(row.output_token_ids) == row.sampling.max_tokens]


def decode(runner: MLXRunner, rows: Sequence[Row], num_drafts: int = 0) -> dict[str, list[int]]:
    """All of the rows to their ends. Returns the tokens by request."""
    left = list(rows)
    while left:
        ended = take(left, runner.decode(Drafts(num_drafts)))
        runner.drop(ended)
        left = [row for row in left if row.id not in ended]
    return {row.spec.request_id: list(row.output_token_ids) for row in rows}


def start(runner: MLXRunner, row: Row, most: int = 1000) -> None:
    """A prompt alone, to its end."""
    while (first := runner.prefill([row], most).first) is None:
        pass
    take([row], first)


def start_together(runner: MLXRunner, rows: Sequence[Row], most: int = 1000) -> None:
    left = list(rows)
    while left:
        chunks = chunks_of(runner, left, most)
        for row, output in zip(list(left), runner.prefill_burst(chunks), strict=True):
            if output.first is not None:
                take([row], output.first)
                left.remove(row)


def alone(runner: MLXRunner, rows: Sequence[Row]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for row in rows:
        fresh = Row(row.spec)
        start(runner, fresh)
        tokens |= decode(runner, [fresh])
    return tokens


def state_of(prompt: PromptState) -> list[np.ndarray]:
    arrays = [array for layer in prompt.layers for array in layer.state]
    return [np.array(array) for array in (arrays if prompt.hidden is None else [*arrays, prompt.hidden])]


def assert_same_state(one: PromptState, other: PromptState) -> None:
    assert one.done == other.done
    for mine, its in zip(state_of(one), state_of(other), strict=True):
        np.testing.assert_allclose(mine, its, atol=STATE_TOLERANCE, rtol=STATE_TOLERANCE)


@pytest.mark.parametrize(
    ("model", "num_drafts"),
    some_at_night(
        product([*MODELS, "demo", "text"], [0, 1, 3]),
        [
            *(("deep", 3), ("alternating", 3), ("foreign head", 0), ("foreign head", 3)),
            *(("no head", 0), ("compiled", 3), ("text", 0)),
        ],
        "the gate has each tiny model, with the most drafts or without; they have the layers of the demo model",
        are_sets=True,
    ),
)
def test_prompts_in_a_burst_get_the_tokens_that_each_gets_alone(runner_of, model, num_drafts):
    runner = runner_of(model)
    rows = rows_of()
    expected = alone(runner, rows)
    start_together(runner, rows)
    assert decode(runner, rows, num_drafts) == expected


@pytest.mark.parametrize("most", [1, 3, 16])
def test_a_prompt_may_be_cut_anywhere_into_chunks_of_bursts(tiny, most):
    rows = rows_of()
    expected = alone(tiny, rows)
    start_together(tiny, rows, most)
    assert decode(tiny, rows, 2) == expected


@pytest.mark.parametrize("model", MODELS)
def test_the_state_behind_a_burst_is_that_of_each_prompt_alone(runner_of, model):
    runner = runner_of(model)
    rows, others = rows_of((40, 21, 64, 9)), rows_of((40, 21, 64, 9))
    for row, length in zip(others, (11, 7, 30, 1), strict=True):
        runner.prefill([row], length)
        runner.prefill([row], 6)
    expected = [runner._prompts[row.id] for row in others]
    runner._prompts.clear()
    for lengths in ((11, 7, 30, 1), (6, 6, 6, 6)):
        runner.prefill_burst([PromptChunk(row, length) for row, length in zip(rows, lengths, strict=True)])
    for row, prompt in zip(rows, expected, strict=True):
        assert_same_state(runner._prompts[row.id], prompt)
    runner.drop([row.id for row in rows])


@pytest.mark.parametrize("padding_id", [1, 499])
@pytest.mark.parametrize("begun", [0, 3])
def test_padding_tokens_change_neither_logits_nor_states(tiny, padding_id, begun):
    def states(padding_id: int) -> list[np.ndarray]:
        prompts = [tiny._prefill.begin(row) for row in rows_of((5, 33, 17, 10))]
        burst = BurstPrefill(tiny._language_model, tiny._heads)
        if begun:
            burst.advance(prompts[:2], [begun, begun])
        logits = burst.advance(prompts, [2, 30, 4, 10], padding_id)
        assert logits is not None
        return [np.array(logits), *(array for prompt in prompts for array in state_of(prompt))]

    for mine, its in zip(states(0), states(padding_id), strict=True):
        assert np.array_equal(mine, its)


@pytest.mark.parametrize("model", ["alternating", "no head"])
def test_prompts_restored_from_snapshots_share_a_burst_with_others(runner_of, model):
    runner = runner_of(model)
    rows = rows_of()
    expected = alone(runner, rows)
    for i, at in ((1, 20), (3, 16), (5, 3)):
        first = Row(rows[i].spec)
        runner.prefill([first], at)
        snapshot = runner.snapshot([first])
        runner.drop([first.id])
        runner.restore([rows[i]], snapshot)
    start_together(runner, rows)
    assert decode(runner, rows, 3) == expected


def test_a_burst_joins_rows_that_decode_already_in_their_groups(tiny):
    old = [row_of("old", 50, 30), row_of("older", 8, 40, rectangle=7)]
    new = [*rows_of((4, 19, 30)), row_of("far", 12, rectangle=7), row_of("lone", 3, rectangle=9)]
    expected = alone(tiny, [*old, *new])
    for row in old:
        start(tiny, row)
    for num_drafts in (0, 3, 2):
        take(old, tiny.decode(Drafts(num_drafts)))
    start_together(tiny, new)
    assert decode(tiny, [*old, *new], 2) == expected


def test_sampled_rows_of_a_burst_get_the_same_tokens_as_alone(tiny):
    rows = [row_of(f"hot{i}", 5 + 9 * i, temperature=1.0, top_p=0.9, repetition_penalty=1.1) for i in range(4)]
    rows += rows_of((6, 7), logprobs=2)
    expected = alone(tiny, rows)
    start_together(tiny, rows)
    assert decode(tiny, rows, 2) == expected


def test_a_prompt_dropped_between_two_bursts_does_not_affect_the_others(tiny):
    rows = rows_of((30, 40, 25))
    expected = alone(tiny, rows)
    tiny.prefill_burst(chunks_of(tiny, rows, 20))
    tiny.drop([rows[1].id])
    rest = [rows[0], rows[2]]
    start_together(tiny, rest)
    assert decode(tiny, rest, 1) == {row.spec.request_id: expected[row.spec.request_id] for row in rest}
    assert tiny.memory()["prefill_cache_bytes"] == tiny.memory()["decode_cache_bytes"] == 0


def test_a_burst_that_fails_leaves_no_prompt_behind_and_no_row(tiny, monkeypatch):
    running = row_of("running", 9, 20)
    expected = alone(tiny, [running])
    start(tiny, running)
    held = tiny.memory()["decode_cache_bytes"]
    rows = rows_of((30, 4))

    def fail(*args: Any) -> None:
        raise RuntimeError("out of memory")

    for part, method in ((tiny._language_model, "logits"), (tiny._batch, "join")):
        with monkeypatch.context() as patch:
            patch.setattr(part, method, fail)
            with pytest.raises(RuntimeError, match="out of memory"):
                tiny.prefill_burst(chunks_of(tiny, rows))
        assert not tiny._prompts and tiny.memory()["decode_cache_bytes"] == held
    assert decode(tiny, [running]) == expected


def test_dropped_rows_of_a_burst_free_the_memory_of_their_caches(tiny):
    rows = rows_of((40,) * 8)
    tiny.prefill_burst(chunks_of(tiny, rows, 20))
    prompts = [tiny._prompts[row.id] for row in rows]
    mx.clear_cache()
    before, freed = mx.get_active_memory(), sum(prompt.num_bytes for prompt in prompts[1:])
    del prompts
    tiny.drop([row.id for row in rows[1:]])
    mx.synchronize()
    assert before - mx.get_active_memory() >= freed
    tiny.drop([rows[0].id])


def test_first_tokens_sampled_again_after_a_failed_burst_advance_each_grammar_once(tiny, monkeypatch):
    compiler = GrammarCompiler(tiny._model.path, tiny.vocab_size, (1,), GrammarConfig())

    def constrained() -> list[Row]:
        matchers = [asyncio.run(compiler.compile(GrammarSpec("regex", f"[{c}-z]{{60,90}}"))) for c in "agm"]
        return [Row(row.spec, matcher=each) for row, each in zip(rows_of((9, 30, 4)), matchers, strict=True)]

    expected: dict[str, list[int]] = {}
    for row in constrained():
        start(tiny, row)
        expected |= decode(tiny, [row])
    rows, fresh = constrained(), constrained()
    with monkeypatch.context() as patch:
        patch.setattr(tiny._batch, "join", lambda *new: [][0])
        with pytest.raises(IndexError):
            tiny.prefill_burst(chunks_of(tiny, rows))
    for row, untouched in zip(rows, fresh, strict=True):
        assert row.matcher and untouched.matcher
        assert np.array_equal(row.matcher.masks(), untouched.matcher.masks())
    start_together(tiny, rows)
    assert decode(tiny, rows, 2) == expected
    assert len({tuple(tokens) for tokens in expected.values()}) == 3


def test_every_tiny_model_takes_bursts_of_any_lengths(runner_of):
    for model in (*MODELS, "demo", "text"):
        assert runner_of(model).no_bursts is None
        assert runner_of(model)._burst.skips_padding


@pytest.mark.parametrize(("family", "expected"), [("qwen3_5", True), ("nemotron_h", True), ("mamba", False)])
def test_a_family_is_known_to_skip_padding_in_low_precision_too(family, expected, tmp_path):
    path = make(tmp_path / "model", FAMILIES[family])
    module = loader.load(EngineConfig(model=str(path), dtype="bfloat16"), lambda progress: None).module
    patches.install(decodes=True)
    assert BurstPrefill(LanguageModel(module.language_model), None).skips_padding == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "expected"), [("qwen3_5", True), ("mamba2", True), ("recurrent_gemma", False)])
def test_a_family_is_known_to_begin_prompts_with_states_of_zeros(family, expected, dtype, tmp_path):
    path = make(tmp_path / "model", FAMILIES[family])
    module = loader.load(EngineConfig(model=str(path), dtype=dtype), lambda progress: None).module
    patches.install(decodes=True)
    assert BurstPrefill(LanguageModel(module.language_model), None).begins_with_zeros == expected
