"""Decode groups side by side: no token of any row tells, whatever the rows hold and whatever is in flight."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine.worker  # noqa: F401  # before MLX
from engine.config import EngineConfig
from engine.core.row import Row
from engine.core.runner import PLAIN, Drafts
from engine.protocol import EngineRequest, SamplingParams
from engine.worker.model_runner import MLXRunner
from tests.support.cold_runner import load_cold
from tests.support.night import some_at_night

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
GATE = [
    *(("alternating", drafts) for drafts in ("no drafts", "prompt lookup", "mixed proposers")),
    *(("foreign head", drafts) for drafts in ("3 drafts", "mixed drafts")),
    ("no head", "no drafts"),
]
"""Pairs of model and drafts in the gate: each of both."""
ROWS = {"long": (330, 0), "short": (20, 1), "middle": (60, 1), "late": (30, 2)}
"""Name -> tokens of the prompt, decode group."""


@pytest.fixture(scope="module")
def runner_of(tiny_model: Callable[..., Path]) -> Callable[[str], MLXRunner]:
    """Never closed: that would take the main thread's streams from the tests that follow."""
    runners: dict[str, MLXRunner] = {}

    def of(name: str) -> MLXRunner:
        if name not in runners:
            config = EngineConfig(model=str(tiny_model(**MODELS[name])))
            runners[name] = load_cold(config)
        return runners[name]

    return of


def row_of(name: str, **sampling: Any) -> Row:
    num_prompt, group = ROWS[name]
    ids = np.random.default_rng(num_prompt).integers(20, VOCAB, num_prompt).astype(np.int32)
    params = SamplingParams(1000, **{"temperature": 0.0, "seed": num_prompt} | sampling)
    return Row(EngineRequest(name, ids, params, ()), decode_group=group)


@dataclass
class Batch:
    """Rows that decode in groups."""

    runner: MLXRunner
    drafts: Callable[[int], Drafts]
    tokens: dict[str, list[int]] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)
    step: int = 0

    def join(self, row: Row) -> None:
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

    def drop(self, row: Row) -> None:
        del self.rows[row.id]
        self.runner.drop([row.id])

    @property
    def num_groups(self) -> int:
        return len(self.runner._batch._groups)


def alone(runner: MLXRunner, row: Row, count: int) -> list[int]:
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
    some_at_night(
        [*product(("alternating", "foreign head"), DRAFTS), *product(["no head"], ("no drafts", "3 drafts"))],
        GATE,
        "the gate has each kind of drafts and each model, but not each pair of them",
        are_sets=True,
    ),
)
def test_rows_of_several_groups_get_the_tokens_that_they_get_alone(runner_of, expected_of, name: str, drafts: str):
    runner, expected = runner_of(name), expected_of(name)
    batch = Batch(runner, DRAFTS[drafts])
    rows = {row: row_of(row, **SAMPLING[row]) for row in ROWS}
    batch.join(rows["long"])
    batch.decode(3)
    batch.join(rows["short"])
    batch.decode(2)
    batch.join(rows["middle"])
    batch.decode(4)
    batch.join(rows["late"])
    assert batch.num_groups == 3
    batch.decode(3)
    batch.drop(rows["long"])
    assert batch.num_groups == 2
    batch.decode(40)
    for row in list(batch.rows.values()):
        batch.drop(row)
    for row in ROWS:
        given = batch.tokens[f"{row}/0"][:40]
        assert given == expected[row][: len(given)] and len(given) > 10, row
    assert runner.memory()["decode_cache_bytes"] == 0
