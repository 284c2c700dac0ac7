"""Weights that the library's loader drops are refused by name if they change the answers."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import pytest

from engine.config import EngineConfig
from engine.errors import EngineFailed
from engine.processing.reference_config import text_section
from engine.worker.dropped_weights import dropped_biases
from engine.worker.loader import open_model
from tests.support.families import FAMILIES
from tests.support.night import some_at_night
from tests.support.zoo import make

UNQUANTIZED = [name for name, family in FAMILIES.items() if family.quantization is None]


def tied(path: Path, name: str, head: mx.array | None) -> Path:
    """Make the family's tiny checkpoint with the embedding as output layer, and a copy or another one beside it."""
    family = FAMILIES[name]
    config = copy.deepcopy(family.config)
    text_section(config)["tie_word_embeddings"] = True
    make(path, replace(family, config=config))
    stored: Any = mx.load(str(path / "model.safetensors"))
    [embedding] = [key for key in stored if key.endswith("embed_tokens.weight")]
    weight = stored[embedding] if head is None else head
    mx.save_safetensors(str(path / "more.safetensors"), {"language_model.lm_head.weight": weight})
    return path


def opened(path: Path) -> Any:
    return open_model(EngineConfig(model=str(path), mtp="off")).module


HEAD = mx.random.normal((512, 64), key=mx.random.key(1))
DROPPING = ["llava_onevision", "lfm2_vl"]
"""Families whose library drops an output layer."""


@pytest.mark.parametrize("name", DROPPING)
def test_an_output_layer_that_differs_from_the_embedding_is_not_dropped(tmp_path, name: str):
    path = tied(tmp_path / "model", name, HEAD)
    with pytest.raises(EngineFailed, match=r"has an output layer .*lm_head\.weight that differs from its embedding"):
        opened(path)


@pytest.mark.parametrize("name", DROPPING)
def test_an_output_layer_that_is_the_embedding_may_be_dropped(tmp_path, name: str):
    assert "lm_head" not in opened(tied(tmp_path / "model", name, None)).language_model


def test_an_output_layer_that_the_library_does_not_drop_is_refused_by_its_name(tmp_path):
    with pytest.raises(EngineFailed, match=r"not in model: \n.*lm_head\.weight"):
        opened(tied(tmp_path / "model", "llama", HEAD))


def test_an_untied_checkpoint_without_an_output_layer_is_refused(tmp_path):
    path = make(tmp_path / "model", FAMILIES["llama"])
    stored: Any = mx.load(str(path / "model.safetensors"))
    left = {name: weight for name, weight in stored.items() if "lm_head" not in name}
    mx.eval(left)
    mx.save_safetensors(str(path / "model.safetensors"), left, metadata={"format": "mlx"})
    with pytest.raises(EngineFailed, match=r"Missing 1 parameters: \n?.*lm_head\.weight"):
        opened(path)


@pytest.mark.parametrize("name", some_at_night(UNQUANTIZED, ("llama", "qwen3", "cohere2_moe"), "the gate has three"))
def test_a_bias_that_the_module_lacks_is_refused(tmp_path, name: str):
    path = make(tmp_path / "model", FAMILIES[name])
    stored: Any = mx.load(str(path / "model.safetensors"))
    beside = [
        key for key in stored if key.endswith("_proj.weight") and f"{key.removesuffix('weight')}bias" not in stored
    ]
    beside = [key for key in beside if "layers." in key or ".h." in key]
    if not beside:
        return  # no projection of that name, or each has a bias
    for key in (beside[0], beside[-1]):
        extra = {f"{key.removesuffix('weight')}bias": mx.ones(stored[key].shape[-2])}
        mx.save_safetensors(str(path / "more.safetensors"), extra, metadata={"format": "mlx"})
        with pytest.raises(EngineFailed, match=r"bias"):
            opened(path)


def test_a_bias_of_zeros_may_be_dropped(tmp_path):
    path = make(tmp_path / "model", FAMILIES["cohere2_moe"])
    stored: Any = mx.load(str(path / "model.safetensors"))
    key = next(key for key in stored if key.endswith("q_proj.weight")).replace("weight", "bias")
    mx.save_safetensors(str(path / "more.safetensors"), {key: mx.zeros(64)}, metadata={"format": "mlx"})
    assert opened(path) is not None
    mx.save_safetensors(str(path / "more.safetensors"), {key: mx.ones(64)}, metadata={"format": "mlx"})
    with pytest.raises(EngineFailed, match=r"has the bias .*q_proj\.bias, but the library drops it"):
        opened(path)


def test_biases_of_towers_are_not_taken_for_those_of_the_language_model():
    names = ["language_model.model.layers.0.self_attn.q_proj.weight"]
    assert dropped_biases(["vision_tower.encoder.layers.0.self_attn.q_proj.bias"], names) == []
    bias = "model.layers.0.self_attn.q_proj.bias"
    assert dropped_biases([bias, "model.layers.0.self_attn.qkv.bias"], names) == [bias]
