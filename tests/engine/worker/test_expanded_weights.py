"""Quantized weights that are expanded when they are loaded: the same model, and what is said about it."""

import logging
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import mlx.nn as nn
import numpy as np
import pytest
from mlx_vlm.models.mla import MultiLinear
from mlx_vlm.models.switch_layers import SwitchLinear

from engine.config import EngineConfig
from engine.errors import EngineFailed
from engine.worker import loader
from engine.worker.expanded_weights import expand
from tests.support.families import FAMILIES
from tests.support.zoo import empty_cache, load, make, prompt

PLENTY = 2**40


class Layers(nn.Module):
    """One module of each kind that can be quantized."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 32)
        self.embedding = nn.Embedding(16, 64)
        self.experts = SwitchLinear(64, 32, 4)
        self.heads = [MultiLinear(64, 32, 2)]
        self.norm = nn.RMSNorm(64)

    def outputs(self) -> list[mx.array]:
        x = mx.random.normal((2, 3, 64), key=mx.random.key(1))
        ids = mx.array([[1, 5, 2], [3, 3, 0]])
        experts = self.experts(x[:, :, None, None], ids[..., None] % 4)
        return [
            self.linear(x),
            self.embedding(ids),
            self.embedding.as_linear(x),
            experts,
            self.heads[0](x[:, None]),
            self.heads[0](x[:, None, :, :32], transpose=False),
        ]


def quantized(**how: Any) -> Layers:
    mx.random.seed(0)
    layers = Layers()
    nn.quantize(layers, **how)
    return layers


@pytest.mark.parametrize(("mode", "group_size", "bits"), [("affine", 32, 4), ("mxfp4", 32, 4), ("nvfp4", 16, 4)])
def test_expanded_modules_compute_what_the_quantized_ones_do(mode, group_size, bits):
    layers = quantized(group_size=group_size, bits=bits, mode=mode)
    expected = layers.outputs()
    done = expand("auto", layers, mx.float32, on_gpu=False, available_bytes=PLENTY)
    assert done.num_expanded == 4 and not [name for name, _ in loader.weights_of(layers) if "scales" in name]
    assert {w.dtype for _, w in loader.weights_of(layers)} == {mx.float32}
    for got, wanted in zip(layers.outputs(), expected, strict=True):
        np.testing.assert_allclose(np.array(got), np.array(wanted.astype(mx.float32)), atol=1e-5)


@pytest.mark.parametrize(
    ("choice", "on_gpu", "available", "reason"),
    [
        ("off", False, PLENTY, "stay quantized: expand_quantized_weights is off"),
        ("auto", True, PLENTY, "stay quantized: the device is a GPU"),
        (
            "auto",
            False,
            122_879,
            r"61440 bytes, and of the machine's memory 122879 bytes are available, less than 2 times",
        ),
        ("auto", False, 122_880, r"4 quantized modules expanded, from 11520 to 61440 bytes"),
        ("on", True, 0, r"4 quantized modules expanded, from 11520 to 61440 bytes"),
    ],
)
def test_weights_are_expanded_where_choice_device_and_memory_allow_it(choice, on_gpu, available, reason):
    layers = quantized(group_size=32, bits=4)
    done = expand(choice, layers, mx.float32, on_gpu, available)
    assert reason in done.text and (done.num_expanded > 0) == ("modules expanded" in reason)


def test_module_of_an_unknown_kind_stays_quantized_and_is_named():
    class Own(nn.QuantizedLinear):
        pass

    layers = Layers()
    layers.update_modules({"linear": Own(64, 32)})
    done = expand("on", layers, mx.float32, on_gpu=False, available_bytes=PLENTY)
    assert done.num_expanded == 0 and done.text.endswith("; Own cannot be expanded and stay quantized")


@pytest.mark.parametrize("family", ["qwen3 4-bit", "qwen3 nvfp4", "qwen3_moe mxfp4"])
def test_loaded_model_has_expanded_weights_and_gives_the_logits_of_the_quantized_one(family, tmp_path, caplog):
    path = make(tmp_path / "model", FAMILIES[family])
    with caplog.at_level(logging.INFO, "orchard.engine"):
        model = loader.load(EngineConfig(model=str(path)), lambda progress: None)
    ids, lm, own = mx.array([prompt(40)], mx.int32), load(path), model.module.language_model
    expected = np.array(lm(ids, cache=empty_cache(lm)).logits)
    np.testing.assert_allclose(np.array(own(ids, cache=empty_cache(own)).logits), expected, atol=1e-3)
    weights = [w for _, w in loader.weights_of(model.module)]
    assert model.num_weight_bytes == sum(w.nbytes for w in weights) and mx.uint32 not in {w.dtype for w in weights}
    assert "quantized modules expanded, from" in model.quantized_weights and model.quantized_weights in caplog.text
    off = loader.load(EngineConfig(model=str(path), expand_quantized_weights="off"), lambda progress: None)
    assert mx.uint32 in {w.dtype for _, w in loader.weights_of(off.module)} and off.fingerprint != model.fingerprint


def test_expanding_the_weights_of_a_model_without_quantized_ones_is_refused(tmp_path):
    path = make(tmp_path / "model", FAMILIES["qwen3"])
    with pytest.raises(EngineFailed, match="expand_quantized_weights is on, but the model has no quantized weights"):
        loader.open_model(EngineConfig(model=str(path), expand_quantized_weights="on"))
