"""The zoo itself: mlx_vlm's caches give the tokens that mlx_vlm gives without any state, and mlx_lm the same logits."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip

import numpy as np
import pytest
from mlx.utils import tree_flatten

from tests.support.families import FAMILIES
from tests.support.zoo import Turn, conversation, empty_cache, incremental_greedy, load, make, prompt

pytestmark = pytest.mark.night("it tests mlx_vlm and mlx_lm, whose versions are pinned: nothing of Orchard")

LOGPROB_TOLERANCE = 1e-3  # chunks of 7 tokens change logprobs of granitemoehybrid by 1e-4
LOGIT_TOLERANCE = 1e-3  # between the two libraries, of logits of size 9
UNLIKE_MLX_LM = {
    "lfm2": "mlx_lm always uses the embedding as output layer; the zoo's checkpoint has one of its own",
    "lfm2_moe": "mlx_lm always uses the embedding as output layer; the zoo's checkpoint has one of its own",
    "deepseek_v32": "mlx_vlm 0.7.10 always interleaves the indexer's rope, mlx_lm only if `indexer_rope_interleave` is "
    "set: other tokens are attended to in prompts longer than `index_topk`",
    "gemma": "mlx_lm computes the exact GELU",
    "glm": "mlx_lm turns all dimensions of a head",
    "gpt_bigcode": "mlx_lm computes the exact GELU",
    "gpt_neox": "mlx_lm computes the approximation of the GELU",
    "mimo_v2_flash": "mlx_lm does not count the token itself in a window",
    "starcoder2": "mlx_lm computes the exact GELU",
    "recurrent_gemma": "mlx_lm computes the norms of its layers with an epsilon of 1e-5, not with rms_norm_eps",
}
NOT_IN_MLX_LM = {
    "laguna": "mlx_lm names the weights of its experts otherwise",
    "olmo": "mlx_lm's module needs the package hf_olmo",
    "phi3small": "mlx_lm's module writes the logits of unused tokens outside of its arrays",
}
MLX_LM_NAMES = {"mistral": "llama"}
"""Families by model_type that mlx_lm has under another name."""
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
    assert len(weights) < 8e6
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


def _in_mlx_lm(name: str) -> str | None:
    """Return the module of a family in mlx_lm; None for vision models and families that it lacks."""
    config, quantization = FAMILIES[name].config, FAMILIES[name].quantization
    module = f"mlx_lm.models.{MLX_LM_NAMES.get(config['model_type'], config['model_type'])}"
    has_tower = "text_config" in config or "vision_config" in config
    is_other = has_tower or quantization or name in NOT_IN_MLX_LM
    return None if is_other or find_spec(module) is None else module


def _difference(name: str, path: Path) -> float:
    """Return the largest difference of the logits of a prompt in mlx_lm."""
    lm, module = load(make(path, FAMILIES[name])), import_module(str(_in_mlx_lm(name)))
    other = module.Model(module.ModelArgs.from_dict(FAMILIES[name].config))
    weights: Any = tree_flatten(lm.parameters())
    other.load_weights(weights, strict=name not in UNLIKE_MLX_LM)
    ids = mx.array([prompt(45)], mx.int32)
    mine = lm(ids, cache=empty_cache(lm)).logits
    cache = other.make_cache() if hasattr(other, "make_cache") else None
    return float(mx.abs(mine - other(ids, cache=cache)).max())


@pytest.mark.parametrize("family", [name for name in FAMILIES if _in_mlx_lm(name)])
def test_other_library_gives_the_same_logits(family, tmp_path):
    """When a family of UNLIKE_MLX_LM fails, see whether it can leave the table."""
    assert (_difference(family, tmp_path / "model") > LOGIT_TOLERANCE) == (family in UNLIKE_MLX_LM)


def test_best_token_is_never_nearly_as_likely_as_the_second(turns):
    assert min(turn.answer.margin for turn in turns.values()) > MIN_MARGIN
