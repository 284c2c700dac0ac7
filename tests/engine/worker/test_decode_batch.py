"""Decode groups that become one: no token of any row tells, whatever the rows hold and whatever is in flight."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest

from engine.config import EngineConfig, GrammarConfig
from engine.core.batch import PLAIN, Drafts
from engine.core.request import Request
from engine.processing.grammar import GrammarCompiler
from engine.protocol import EngineRequest, GrammarSpec, SamplingParams
from engine.worker.model_runner import MLXRunner, load_runner

VOCAB = 512
MODELS: dict[str, dict[str, Any]] = {
    "alternating": {"layers": 4, "interval": 2, "agree": 0.3},
    "foreign head": {"layers": 4, "interval": 4, "seed": 3},
    "no head": {"layers": 4, "interval": 2, "mtp": False},
}
LOOKUP = Drafts(5, "prompt_lookup", is_forced=True)
DRAFTS: dict[str, Callable[[int], Drafts]] = {
    "no drafts": lambda step: PLAIN,
    "3 drafts": lambda step: Drafts(3),
    "mixed drafts": lambda step: Drafts((3, 0, 1, 2, 0, 0, 3, 3, 1)[step % 9]),
    "prompt lookup": lambda step: Drafts(4, "prompt_lookup", is_forced=step % 2 == 0),
    "mixed proposers": lambda step: (LOOKUP, Drafts(2), PLAIN, LOOKUP, LOOKUP, Drafts(1), PLAIN)[step % 7],
}
ROWS = {"long": (330, 0), "short": (20, 1), "middle": (60, 1), "late": (30, 2)}
"""Name -> tokens of the prompt, decode group."""


@pytest.fixture(scope="module")
def runner_of(tiny_model: Callable[..., Path]) -> Callable[[str], MLXRunner]:
    """Never closed: that would take the main thread's streams from the tests that follow."""
    runners: dict[str, MLXRunner] = {}

    def of(name: str) -> MLXRunner:
        if name not in runners:
            config = EngineConfig(model=str(tiny_model(**MODELS[name])))
            runners[name] = load_runner(config, lambda progress: None)
        return runners[name]

    return of


def row_of(name: str, **sampling: Any) -> Request:
    num_prompt, group = ROWS[name]
    ids = np.random.default_rng(num_prompt).integers(20, VOCAB, num_prompt).astype(np.int32)
    params = SamplingParams(1000, **{"temperature": 0.0, "seed": num_prompt} | sampling)
    return Request(EngineRequest(name, ids, params, ()), decode_group=group)


@dataclass
class Batch:
    """Rows that decode in groups that are merged on the way."""

    runner: MLXRunner
    drafts: Callable[[int], Drafts]
    tokens: dict[str, list[int]] = field(default_factory=dict)
    rows: dict[str, Request] = field(default_factory=dict)
    step: int = 0

    def join(self, row: Request) -> None:
        while (first := self.runner.prefill([row], 64).first) is None:
            pass
        self.rows[row.id] = row
        self.tokens[row.id] = list(first[row.id].token_ids)

    def decode(self, count: int = 1) -> None:
        for _ in range(count):
            for row_id, output in self.runner.decode(self.drafts(self.step)).items():
                assert output.error is None
                self.tokens[row_id] += output.token_ids
            self.step += 1

    def merge(self, source: int, target: int) -> None:
        for row in self.rows.values():
            row.decode_group = target if row.decode_group == source else row.decode_group
        self.runner.merge_groups(source, target)
        self.decode()

    def drop(self, row: Request) -> None:
        del self.rows[row.id]
        self.runner.drop([row.id])

    @property
    def num_groups(self) -> int:
        return len(self.runner._batch._groups)


def alone(runner: MLXRunner, row: Request, count: int) -> list[int]:
    batch = Batch(runner, DRAFTS["no drafts"])
    batch.join(row)
    batch.decode(count)
    batch.drop(row)
    return batch.tokens[row.id][:count]


SAMPLING: dict[str, dict[str, Any]] = {
    "long": {"presence_penalty": 0.5, "temperature": 0.9},
    "short": {"temperature": 1.0, "top_k": 20, "logprobs": 2},
    "middle": {},
    "late": {"repetition_penalty": 1.3, "logit_bias": ((30, 2.0),)},
}


@pytest.fixture(scope="module")
def expected_of(runner_of: Callable[[str], MLXRunner]) -> Callable[[str], dict[str, list[int]]]:
    """expected_of(name of one of MODELS): the tokens of each of ROWS alone and without drafts."""
    return cache(lambda name: {row: alone(runner_of(name), row_of(row, **SAMPLING[row]), 40) for row in ROWS})


@pytest.mark.parametrize(
    ("name", "drafts"),
    [*product(("alternating", "foreign head"), DRAFTS), *product(["no head"], ("no drafts", "3 drafts"))],
)
def test_rows_of_merged_groups_get_the_tokens_that_they_get_alone(runner_of, expected_of, name: str, drafts: str):
    runner, expected = runner_of(name), expected_of(name)
    batch = Batch(runner, DRAFTS[drafts])
    rows = {row: row_of(row, **SAMPLING[row]) for row in ROWS}
    batch.join(rows["long"])
    batch.decode(3)
    batch.join(rows["short"])
    batch.decode(2)
    batch.join(rows["middle"])
    batch.decode(4)
    assert batch.num_groups == 2
    batch.merge(1, 0)
    assert batch.num_groups == 1
    batch.join(rows["late"])
    batch.merge(2, 0)  # it has not been decoded yet
    batch.decode(3)
    batch.drop(rows["long"])
    batch.decode(40)
    for row in list(batch.rows.values()):
        batch.drop(row)
    for row in ROWS:
        given = batch.tokens[f"{row}/0"][:40]
        assert given == expected[row][: len(given)] and len(given) > 10, row
    assert runner.memory()["decode_cache_bytes"] == 0


def test_groups_without_rows_in_the_batch_are_merged_without_a_copy(runner_of):
    batch = Batch(runner_of("alternating"), DRAFTS["3 drafts"])
    short = row_of("short")
    expected = alone(batch.runner, row_of("short"), 20)
    batch.join(short)
    batch.merge(7, 1)
    batch.merge(1, 9)
    assert list(batch.runner._batch._groups) == [9]
    batch.decode(20)
    batch.drop(short)
    assert batch.tokens["short/0"][:20] == expected


@pytest.mark.parametrize("drafts", ["no drafts", "3 drafts"])
def test_rows_with_grammars_get_the_same_tokens_in_a_merged_group(runner_of, tiny_model, drafts: str):
    """Their matchers have seen what the steps under way have given."""
    runner = runner_of("alternating")
    compiler = GrammarCompiler(tiny_model(**MODELS["alternating"]), VOCAB, (2,), GrammarConfig())
    matcher = asyncio.run(compiler.compile(GrammarSpec("regex", "[a-f]{100}")))
    compiler.close()
    given = []
    for merges in (False, True):
        batch = Batch(runner, DRAFTS[drafts])
        rows = [row_of("long"), row_of("short")]
        for row in rows:
            row.matcher = matcher.fork()
            batch.join(row)
            batch.decode(2)
        if merges:
            batch.merge(1, 0)
        batch.decode(12)
        for row in rows:
            batch.drop(row)
        given.append([batch.tokens[row.id][:10] for row in rows])
    assert given[0] == given[1]


def test_the_snapshot_of_a_row_is_the_same_after_a_merge_of_its_group(runner_of):
    runner = runner_of("alternating")
    states = []
    for merges in (False, True):
        batch = Batch(runner, DRAFTS["3 drafts"])
        rows = [row_of("long"), row_of("short")]
        for row in rows:
            batch.join(row)
            batch.decode(2)
        if merges:
            batch.merge(1, 0)
        else:
            batch.decode()
        kept = runner.snapshot_row("short/0")
        assert kept is not None
        states.append((kept.token_ids.tolist(), _arrays(kept.snapshot)))
        for row in rows:
            batch.drop(row)
    (ids, arrays), (merged_ids, merged) = states
    assert ids == merged_ids and all(np.allclose(a, b, atol=1e-4) for a, b in zip(arrays, merged, strict=True))


def _arrays(snapshot: Any) -> Sequence[np.ndarray]:
    return [np.array(array, dtype=np.float32) for state in snapshot.states for array in state]


def test_a_merge_takes_the_memory_of_its_result_and_of_one_more_layer(runner_of):
    """The books count one layer of the merged group twice."""
    runner = runner_of("no head")
    batch = Batch(runner, DRAFTS["no drafts"])
    rows = [row_of("long"), row_of("middle")]
    for row in rows:
        batch.join(row)
    batch.decode(3)
    mx.clear_cache()
    before, cache = mx.get_active_memory(), runner.memory()["decode_cache_bytes"]
    mx.reset_peak_memory()
    for row in rows:
        row.decode_group = 0
    runner.merge_groups(1, 0)
    peak, merged = mx.get_peak_memory() - before + cache, runner.memory()["decode_cache_bytes"]
    largest = max(layer.nbytes for layer in runner._batch._groups[0]._cache.layers)
    batch.decode()
    for row in rows:
        batch.drop(row)
    assert peak <= merged + largest + 2**16, (peak, merged, largest)
