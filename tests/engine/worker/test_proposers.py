"""A new kind of proposer is a class and an entry in `PROPOSERS`: two that repeat a row's newest token, without more."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import mlx.nn as nn
import numpy as np
import pytest

from engine.config import DraftLimits, DraftMode, EngineConfig
from engine.core.runner import Drafts
from engine.protocol import EngineRequest, SamplingParams
from engine.worker import proposers
from engine.worker.draft_block import DraftBlock
from engine.worker.drafter import DraftingModel
from engine.worker.heads.head import SharingHead
from engine.worker.loaded_model import FoundProposer, OpenedModel
from engine.worker.model_runner import MLXRunner
from engine.worker.proposer import ModelProposer, Proposer, RowDrafts, Target, TextProposer
from tests.support.cold_runner import load_cold
from tests.support.driver import Driver

NUM_DRAFTS = 2


class Newest:
    """Repeats a row's newest token. Implements RowDrafts."""

    has_drafts = True

    def __init__(self, token_id: int):
        self._token_id = token_id

    def append(self, token_ids: tuple[int, ...]) -> None:
        self._token_id = token_ids[-1]

    def drafts(self, num_tokens: int) -> list[int]:
        return [self._token_id] * num_tokens


class Repeat(TextProposer):
    """Implements Proposer."""

    name = "repeat"

    def lengths(self, target: Target, model: DraftingModel | None) -> Sequence[int]:
        return (NUM_DRAFTS,)

    def row_drafts(self, token_ids: np.ndarray) -> RowDrafts:
        return Newest(int(token_ids[-1]))


class Echo:
    """Gives the token that it has read the highest logit, and keeps nothing. Implements DraftingModel."""

    lead, as_offset = 1, True
    block: DraftBlock | None = None
    sharing: SharingHead | None = None

    def __init__(self, vocab_size: int):
        self._vocab_size = vocab_size

    def make_cache(self) -> list[Any]:
        return []

    def begin(self, first_token_id: int, cache: list[Any]) -> None:
        pass

    def prime(self, next_token_ids: mx.array, hidden: mx.array, cache: list[Any]) -> None:
        pass

    def __call__(self, token_ids: mx.array, hidden: mx.array, cache: list[Any], positions: mx.array) -> mx.array:
        return token_ids[..., None].astype(mx.float32)

    def logits(self, hidden: mx.array) -> mx.array:
        return (hidden.astype(mx.int32) == mx.arange(self._vocab_size)).astype(mx.float32)

    def read(self, hidden: mx.array | None, token_ids: mx.array) -> mx.array:
        return mx.zeros((*token_ids.shape, 1), mx.float32)


class RepeatByModel(ModelProposer):
    """Implements Proposer."""

    name, label, replaces_others = "repeat", "repeating model", True

    def load(
        self,
        config: EngineConfig,
        found: FoundProposer,
        target: OpenedModel,
        opening: Callable[[EngineConfig], OpenedModel],
    ) -> FoundProposer:
        return replace(found, module=nn.Module())

    def drafting_model(self, module: Any, target: Target) -> DraftingModel:
        return Echo(target.vocab_size)

    def lengths(self, model: DraftingModel, target: Target) -> Sequence[int]:
        return (NUM_DRAFTS,)


class Config(EngineConfig):
    """A configuration with fixed limits of the new proposer alone."""

    repeat_rows: int = 64

    @property
    def draft_modes(self) -> dict[str, DraftMode]:
        return super().draft_modes | {"repeat": DraftLimits(max_draft_tokens=NUM_DRAFTS, max_rows=self.repeat_rows)}


OPTIONS: dict[str, Any] = {"mtp": "off", "prompt_lookup": "off", "prefix_cache": {"enabled": True}}
KINDS: dict[str, Proposer] = {"from the row's tokens": Repeat(), "by a model": RepeatByModel()}


@pytest.fixture(scope="module", params=KINDS)
def runner(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> MLXRunner:
    path = str(tiny_model(layers=4, interval=2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proposers, "PROPOSERS", (*proposers.PROPOSERS, KINDS[request.param]))
        return load_cold(Config.model_validate({"model": path} | OPTIONS | {"mtp": "auto"}))


@pytest.fixture(autouse=True)
def registered(runner: MLXRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the kind while rows of the runner join."""
    kind = next(one for one in KINDS.values() if one.is_selective == runner.drafts[-1].is_selective)
    monkeypatch.setattr(proposers, "PROPOSERS", (*proposers.PROPOSERS, kind))


def requests(temperature: float) -> list[EngineRequest]:
    """Return prompts of different lengths whose answers consist of two tokens, and so often repeat the newest one."""
    prompts = [np.random.default_rng(n).integers(20, 25, n).astype(np.int32) for n in (20, 60, 100)]
    bias = tuple((token, 30.0) for token in (20, 21))
    return [
        EngineRequest(f"r{i}", ids, SamplingParams(30 + 7 * i, temperature=temperature, seed=i, logit_bias=bias), ())
        for i, ids in enumerate(prompts)
    ]


def test_it_is_offered_with_its_name(runner):
    assert runner.drafts[-1] == Drafts(NUM_DRAFTS, "repeat") and "repeat" not in runner.no_drafts


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_its_drafts_change_no_token_and_are_counted_under_its_name(runner, temperature):
    expected = {}
    for one in requests(temperature):
        expected |= Driver(runner, EngineConfig.model_validate(OPTIONS)).run({0: [one]})
    batch = requests(temperature)
    driver = Driver(runner, Config.model_validate(OPTIONS))
    assert driver.run({0: batch[:1], 9: batch[1:]}) == expected
    status = driver.core.figures.speculation["repeat"]
    assert status["mode"] == "fixed" and status["num_drafted"] > status["num_accepted"] > 0
    assert status["num_drafted"] == driver.core.stats.num_drafted


def test_steps_without_its_drafts_change_no_token(runner):
    """Three rows are too many for drafts, which the first one has before and the last one after the others."""
    expected = {}
    for one in requests(0.0):
        expected |= Driver(runner, EngineConfig.model_validate(OPTIONS)).run({0: [one]})
    first, *others = requests(0.0)
    driver = Driver(runner, Config.model_validate(OPTIONS | {"repeat_rows": 1}))
    assert driver.run({0: [first], 4: others}) == expected
    assert driver.core.figures.speculation["repeat"]["num_drafted"] > 2 * NUM_DRAFTS


def test_a_continued_conversation_has_the_tokens_of_one_without_a_prefix_cache(runner):
    """Snapshots of rows that it drafts for hold all that it keeps."""
    [first, *_] = requests(0.0)
    driver = Driver(runner, Config.model_validate(OPTIONS))
    answer = driver.run({0: [first]})["r0"]
    ids = np.concatenate([first.token_ids, np.array(answer, np.int32), np.array([22, 23], np.int32)])
    second = replace(first, request_id="r1", token_ids=ids)
    found = driver.run({0: [second]})["r1"]
    assert driver.core.stats.num_cached_tokens > 0
    plain = Driver(runner, EngineConfig.model_validate(OPTIONS | {"prefix_cache": {"enabled": False}}))
    assert found == plain.run({0: [second]})["r1"]
