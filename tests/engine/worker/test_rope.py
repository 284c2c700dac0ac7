"""A model with a rope scaling is the library's own with that config.json; families that ignore it are refused."""

import copy
import json
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from mlx_vlm.models.rope_utils import SuScaledRoPE

from engine.config import EngineConfig
from engine.errors import EngineFailed
from engine.spec_prefill_config import SpecPrefillConfig
from engine.worker import loader
from engine.worker.model_report import report
from engine.worker.spec_prefill.draft import draft_engine_config
from tests.support.families import FAMILIES
from tests.support.families.family import Family
from tests.support.family_calls import in_gate, recorded
from tests.support.night import some_at_night
from tests.support.zoo import empty_cache, make, prompt
from tests.support.zoo import load as load_by_library

IDS = prompt(60)
YARN = {"type": "yarn", "factor": 4.0}
ORIGINAL = 64
LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [4.0 + i for i in range(8)],
    "original_max_position_embeddings": ORIGINAL,
}


def logits(module: Any, ids: list[int] = IDS) -> np.ndarray:
    lm = module.language_model if hasattr(module, "language_model") else module
    return np.array(lm(mx.array([ids]), cache=empty_cache(lm)).logits[0])


def checkpoint(out: Path, family: str, **changes: Any) -> Path:
    """A checkpoint whose weights are those of the family, whatever is changed in its configuration."""
    config = copy.deepcopy(FAMILIES[family].config)
    path = make(out, Family(config, "", seed=FAMILIES[family].seed))
    (config.get("text_config") or config).update({"max_position_embeddings": ORIGINAL, **changes})
    (path / "config.json").write_text(json.dumps(config))
    return path


def load(path: Path, **options: Any) -> loader.LoadedModel:
    config = EngineConfig.model_validate({"model": str(path), "device": "cpu", "dtype": "float32", **options})
    return loader.load(config, lambda progress: None)


@pytest.mark.parametrize("kind", ["yarn", "linear", "llama3"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "deepseek_v3", "qwen3_next", "ministral3"])
def test_a_scaling_of_the_settings_is_that_of_a_config_json_with_it(tmp_path, family, kind):
    plain = checkpoint(tmp_path / "plain", family)
    before = {path.name: path.read_bytes() for path in plain.iterdir()}
    scaling = {"type": kind, "factor": 4.0}
    scaled = load(plain, rope_scaling=scaling)
    whole = {**scaling, "original_max_position_embeddings": ORIGINAL}
    parameters = FAMILIES[family].config.get("rope_parameters")
    changes = {} if parameters is None else {"rope_parameters": {**parameters, **whole, "rope_type": kind}}
    by_library = load_by_library(checkpoint(tmp_path / "scaled", family, rope_scaling=whole, **changes))
    assert np.array_equal(logits(scaled.module), logits(by_library))
    assert not np.array_equal(logits(scaled.module), logits(load(plain).module))
    assert scaled.max_context_tokens == 4 * ORIGINAL
    assert {path.name: path.read_bytes() for path in plain.iterdir()} == before


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_a_model_without_the_option_is_the_librarys(tmp_path, family):
    path = checkpoint(tmp_path, family)
    loaded = load(path)
    assert np.array_equal(logits(loaded.module), logits(load_by_library(path)))
    assert loaded.max_context_tokens == ORIGINAL


@pytest.mark.parametrize(
    "family",
    some_at_night(
        [name for name, family in FAMILIES.items() if family.quantization is None],
        in_gate(tuple(FAMILIES), recorded()),
        "the gate has a family for each function of engine/worker",
    ),
)
def test_a_family_either_computes_with_a_scaling_or_is_refused(tmp_path, family):
    path = checkpoint(tmp_path, family)
    try:
        opened = loader.open_model(
            EngineConfig.model_validate({"model": str(path), "device": "cpu", "rope_scaling": YARN})
        )
    except EngineFailed as error:
        assert "rope" in str(error)
        return
    assert np.abs(logits(opened.module) - logits(load_by_library(path))).max() > 1e-3


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("qwen3_5", "rope_scaling asks for .* yarn with the factor 4.0, but models of the family qwen3_5 .*"
         "does not apply it: it has Qwen3_5RotaryEmbedding"),
        ("nemotron_h", "does not apply it: it has no rope"),
        ("gemma2", "does not apply it: it has RoPE"),
        ("deepseek_v2", "rope_scaling: yarn cannot be applied: .* a scaling of its own, yarn"),
        ("qwen2_vl", "could not be loaded with the rope_scaling yarn: rope_scaling must contain keys"),
    ],
)  # fmt: skip
def test_a_scaling_that_the_family_does_not_apply_is_refused_with_the_reason(tmp_path, family, reason):
    with pytest.raises(EngineFailed, match=reason):
        load(checkpoint(tmp_path, family), rope_scaling=YARN)


def test_a_declared_scaling_that_the_family_does_not_apply_is_refused(tmp_path):
    path = checkpoint(tmp_path, "gemma2", rope_scaling={"type": "linear", "factor": 2.0})
    with pytest.raises(EngineFailed, match=r"config\.json declares a rope scaling of the type linear .* factor 2\.0"):
        load(path)


def test_the_pooled_layers_of_deepseek_v4_are_scaled_by_yarn_and_by_nothing_else(tmp_path):
    path = checkpoint(tmp_path, "deepseek_v4", rope_scaling={**YARN, "original_max_position_embeddings": 16})
    loaded = load(path)
    assert np.array_equal(logits(loaded.module), logits(load_by_library(path)))
    assert loaded.max_context_tokens == ORIGINAL
    plain = checkpoint(tmp_path / "plain", "deepseek_v4")
    assert np.abs(logits(loaded.module) - logits(load(plain).module)).max() > 1e-3
    with pytest.raises(EngineFailed, match="rope_scaling linear: Unsupported DeepSeek-V4 RoPE type: linear"):
        load(plain, rope_scaling={"type": "linear", "factor": 4.0})


def test_base_and_scaling_in_the_format_of_transformers_5_are_applied(tmp_path):
    scaling = {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 16}
    old = checkpoint(tmp_path / "old", "llama", rope_theta=500.0, rope_scaling=scaling)
    new = checkpoint(tmp_path / "new", "llama", rope_parameters={"rope_theta": 500.0, **scaling})
    config = json.loads((new / "config.json").read_text())
    del config["rope_theta"], config["rope_scaling"]
    (new / "config.json").write_text(json.dumps(config))
    assert np.array_equal(logits(load(new).module), logits(load_by_library(old)))


def test_states_of_another_scaling_are_never_reused(tmp_path):
    path = checkpoint(tmp_path, "qwen3")
    options = [{}, {"rope_scaling": YARN}, {"rope_scaling": {**YARN, "factor": 2}}]
    assert len({load(path, **one).fingerprint for one in options}) == 3


def test_longrope_uses_the_factors_of_the_context_limit_for_prompts_of_any_length(tmp_path):
    path = checkpoint(tmp_path, "phi3", rope_scaling=LONGROPE, original_max_position_embeddings=ORIGINAL,
                      max_position_embeddings=4 * ORIGINAL)  # fmt: skip
    long, short = load(path), load(path, max_context_tokens=ORIGINAL)
    assert long.fingerprint != short.fingerprint
    library = load_by_library(path)
    ids, many = prompt(ORIGINAL), prompt(2 * ORIGINAL)
    assert np.array_equal(logits(short.module, ids), logits(library, ids))
    assert np.array_equal(logits(long.module, many), logits(library, many))
    together = logits(long.module, many)[: len(ids)]
    assert np.abs(logits(long.module, many[: len(ids)]) - together).max() < 1e-4
    assert np.abs(logits(library, many[: len(ids)]) - together).max() > 1e-3  # the library depends on the chunk


def test_longrope_ropes_are_found(tmp_path):
    family = load(checkpoint(tmp_path, "minicpm3"))
    ropes = [one for _, one in family.module.language_model.named_modules() if isinstance(one, SuScaledRoPE)]
    assert {rope.original_max_position_embeddings for rope in ropes} == {2**31 - 1}


def test_the_report_shows_the_scaling_and_its_context(tmp_path):
    path = checkpoint(tmp_path, "qwen3")
    config = EngineConfig.model_validate({"model": str(path), "device": "cpu", "rope_scaling": YARN})
    assert "context          256 tokens (rope scaling: yarn with the factor 4)" in list(report(config))


def test_a_drafts_scaling_is_its_own_option():
    config = SpecPrefillConfig.model_validate({"enabled": True, "draft_rope_scaling": YARN})
    assert draft_engine_config(config, "cpu").rope_scaling == config.draft_rope_scaling is not None
