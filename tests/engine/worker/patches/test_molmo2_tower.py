"""Molmo2's vision tower takes the layers that config.json names, and computes the GELU that it names."""

import copy
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import mlx.nn as nn
import numpy as np
import pytest
from mlx_vlm.models.molmo2.config import VisionConfig

from engine.worker.patches import families, molmo2_tower
from tests.support.molmo2_family import MOLMO2
from tests.support.zoo import new_module

CASES = [
    ({"num_hidden_layers": 27}, {"vit_layers": [-3, -9]}, [24, 18], 25),  # as published
    ({}, {}, [24, 18], 25),
    ({"num_hidden_layers": 27}, {"vit_layers": [-1, 3]}, [26, 3], 27),
    ({"num_hidden_layers": 12}, {"vit_layers": [2, 5]}, [2, 5], 6),
]


@pytest.mark.parametrize(("vit", "adapter", "layers", "num_layers"), CASES)
def test_layers_are_counted_among_those_that_are_declared(
    vit: dict[str, Any], adapter: dict[str, Any], layers: list[int], num_layers: int
):
    families.correct()
    made: Any = VisionConfig.from_dict({"vit_config": vit, "adapter_config": adapter})
    assert (made.adapter_config.vit_layers, made.vit_config.num_hidden_layers) == (layers, num_layers)


@pytest.mark.parametrize("layer", [27, 40, -28, -30])
def test_layer_that_the_tower_does_not_have_is_refused(layer: int):
    families.correct()
    with pytest.raises(ValueError, match=rf"vit_layers has {layer}; it must be between -27 and 26"):
        VisionConfig.from_dict({"vit_config": {}, "adapter_config": {"vit_layers": [-3, layer]}})


def test_a_tower_has_the_layers_that_are_needed():
    families.correct()
    tower = new_module(copy.deepcopy(MOLMO2.config)).vision_tower
    assert (tower.vit_layers, len(tower.image_vit.transformer)) == ([2, 1], 3)


def test_the_block_computes_the_tanh_approximation():
    families.correct()
    mlp = new_module(copy.deepcopy(MOLMO2.config)).vision_tower.image_vit.transformer[0].feed_forward
    x = mx.linspace(-3, 3, 32)[None]
    np.testing.assert_array_equal(mlp(x), mlp.w2(nn.gelu_approx(mlp.w1(x))))


def test_the_patch_is_still_needed():
    params = {"vit_config": {"num_hidden_layers": 27}, "adapter_config": {"vit_layers": [-3, -9]}}
    made = molmo2_tower.library_from_dict.__func__(VisionConfig, params)
    assert (made.adapter_config.vit_layers, made.vit_config.num_hidden_layers) == ([-3, -9], 25)
    mlp = new_module(copy.deepcopy(MOLMO2.config)).vision_tower.image_vit.transformer[0].feed_forward
    x = mx.linspace(-3, 3, 32)[None]
    np.testing.assert_array_equal(molmo2_tower.library_call(mlp, x), mlp.w2(nn.gelu_fast_approx(mlp.w1(x))))
