"""The zoo itself: mlx_vlm's caches give the tokens that mlx_vlm gives without any state."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.families import FAMILIES, UNSOUND
from tests.support.zoo import Turn, conversation, empty_cache, incremental_greedy, load, make

LOGPROB_TOLERANCE = 1e-3  # chunks of 7 tokens change logprobs of granitemoehybrid by 1e-4
MIN_MARGIN = 0.02
"""Least difference of the two best logprobs: what rounds otherwise must not become another token."""


@pytest.fixture(scope="module", params=FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def path(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("zoo") / "model", FAMILIES[name])


@pytest.fixture(scope="module")
def model(path: Path) -> Any:
    return load(path)


@pytest.fixture(scope="module")
def turns(model: Any) -> dict[str, Turn]:
    return conversation(model)


def test_checkpoint_is_tiny_and_always_the_same(name, path, tmp_path):
    weights = (path / "model.safetensors").read_bytes()
    assert len(weights) < 2e6
    assert (make(tmp_path / "again", FAMILIES[name]) / "model.safetensors").read_bytes() == weights


def test_layers_have_the_caches_of_the_table(name, model):
    assert [type(layer).__name__ for layer in empty_cache(model)] == FAMILIES[name].cache_names


@pytest.mark.parametrize("chunk", [2048, 16, 7])
def test_library_gives_the_same_tokens_with_its_caches_as_without(model, turns, chunk):
    """chunk: most prompt tokens per forward."""
    for turn in turns.values():
        answer = incremental_greedy(model, turn.token_ids, len(turn.answer.tokens), chunk)
        assert answer.tokens == turn.answer.tokens
        np.testing.assert_allclose(answer.logprobs, turn.answer.logprobs, atol=LOGPROB_TOLERANCE)


def test_best_token_is_never_nearly_as_likely_as_the_second(turns):
    assert min(turn.answer.margin for turn in turns.values()) > MIN_MARGIN


def test_unsound_families_are_not_in_the_zoo():
    assert not UNSOUND.keys() & FAMILIES
