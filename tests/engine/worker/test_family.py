"""Families that cannot be served are refused before a weight is read, with the reason."""

import json
import re
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from mlx_vlm.models.cache import (
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    PoolingCache,
    RotatingKVCache,
)

from engine.config import EngineConfig
from engine.errors import EngineFailed
from engine.worker import loader
from engine.worker.family import unsupported_reason
from engine.worker.refused_families import REFUSED
from tests.support import zoo
from tests.support.families import FAMILIES
from tests.support.families.family import EXPERTS, TOWER, Family, text, vlm
from tests.support.zoo import make

OTHER_CACHE = Family(text("z1t", num_hidden_layers=2, aft_heads=2), "Z1TCache*2")


@pytest.fixture
def reads_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*arguments: Any) -> int:
        raise AssertionError("weights were read")

    monkeypatch.setattr(loader, "_read_weights", read)


def load(path: Path) -> None:
    loader.load(EngineConfig(model=str(path), device="cpu"), lambda progress: None)


def test_a_family_with_another_kind_of_cache_is_named_with_its_layer(tmp_path, reads_no_weight):
    path = make(tmp_path / "z1t", OTHER_CACHE)
    with pytest.raises(EngineFailed, match=r"family z1t .*layer 0 keeps its state in a Z1TCache.*KVCache"):
        load(path)


def test_a_declared_vision_tower_without_weights_is_an_error_that_says_what_to_do(tmp_path, reads_no_weight):
    path = make(tmp_path / "text only", FAMILIES["qwen3_5"])
    config = json.loads((path / "config.json").read_text())
    assert config["model_type"] == "qwen3_5" and config["vision_config"]
    processor = {"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 8, "merge_size": 2}
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    with pytest.raises(EngineFailed, match=r"no weights of a vision tower.*remove vision_config"):
        load(path)


class Module:
    """A model of the library, reduced to its language model and the caches of its layers."""

    def __init__(self, *caches: Any):
        self.language_model = LanguageModel(caches)


class LanguageModel:
    def __init__(self, caches: Any):
        self._caches = caches

    def __call__(self, inputs: mx.array, cache: Any = None) -> None: ...

    def make_cache(self) -> list[Any]:
        return list(self._caches)


@pytest.mark.parametrize(
    ("caches", "reason"),
    [
        ((KVCache(), RotatingKVCache(8)), None),
        ((CacheList(KVCache(), RotatingKVCache(8)),), None),
        ((CacheList(KVCache(), ChunkedKVCache(8)),), None),
        ((CacheList(RotatingKVCache(8), PoolingCache(4)),), None),
        ((KVCache(), CacheList(KVCache(), ConcatenateKVCache())), "layer 1 keeps its state in a ConcatenateKVCache"),
        ((RotatingKVCache(8, keep=4),), "layer 0 has a window that keeps its first 4 tokens"),
    ],
)
def test_caches_decide_whether_layers_can_be_batched(caches, reason):
    found = unsupported_reason(Module(*caches), frozenset())
    assert found is None if reason is None else reason in (found or "")


def test_a_model_without_a_language_model_is_refused():
    assert "no language model" in (unsupported_reason(object(), frozenset()) or "")


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_whose_tokens_would_be_wrong_is_refused_by_name_before_its_weights_are_sought(family: str, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(text(family)))
    with pytest.raises(
        EngineFailed, match=re.escape(f"models of the family {family}") + ".*" + re.escape(REFUSED[family])
    ):
        load(tmp_path)


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llada2_moe", text("llada2_moe", EXPERTS)),
        ("mllama", vlm("mllama", text("mllama", cross_attention_layers=[1]), TOWER)),
    ],
)
def test_tokens_of_refused_families_depend_on_how_a_prompt_is_cut(family: str, config: dict[str, Any], tmp_path):
    """When this fails, see whether the family can be served."""
    lm, token_ids = zoo.load(make(tmp_path / family, Family(config, ""))), zoo.prompt(20)
    whole = zoo.incremental_greedy(lm, token_ids, 2)
    cut = zoo.incremental_greedy(lm, token_ids, 2, 7)
    assert family in REFUSED and not np.allclose(cut.logprobs, whole.logprobs, atol=1e-3)
