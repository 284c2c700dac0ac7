"""The GELU of four families is the one that config.json names."""

import copy
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import mlx.nn as nn
import numpy as np
import pytest

from engine.worker.patches import families, gelu
from tests.support.families import FAMILIES
from tests.support.zoo import new_module

X = mx.linspace(-3, 3, 64)[None]
CASES = [
    ("gemma", {}, nn.gelu_approx),
    ("gemma", {"hidden_act": "gelu"}, nn.gelu_approx),
    ("starcoder2", {}, nn.gelu_approx),
    ("gpt_neox", {}, nn.gelu),
    ("gpt_neox", {"hidden_act": "gelu_fast"}, nn.gelu_approx),
    ("gpt_bigcode", {}, nn.gelu_approx),
    ("gpt_bigcode", {"activation_function": "gelu"}, nn.gelu),
]


def mlp(name: str, **fields: Any) -> Any:
    families.correct()
    return new_module(copy.deepcopy(FAMILIES[name].config) | fields).language_model.layers[0].mlp


def computed(made: Any, act: Any) -> mx.array:
    """The block with another function, from its own matrices."""
    if hasattr(made, "gate_proj"):
        return made.down_proj(act(made.gate_proj(X)) * made.up_proj(X))
    inner, outer = ("c_fc", "c_proj") if hasattr(made, "c_fc") else ("dense_h_to_4h", "dense_4h_to_h")
    return getattr(made, outer)(act(getattr(made, inner)(X)))


@pytest.mark.parametrize(("name", "fields", "act"), CASES)
def test_the_block_computes_the_gelu_of_the_checkpoint(name: str, fields: dict[str, Any], act: Any):
    made = mlp(name, **fields)
    other = nn.gelu if act is nn.gelu_approx else nn.gelu_approx
    np.testing.assert_array_equal(made(X), computed(made, act))
    assert not np.array_equal(np.array(made(X)), np.array(computed(made, other))), "the two differ"


def test_another_function_is_refused():
    with pytest.raises(ValueError, match=r"config.json has hidden_act 'relu'; expected one of gelu, "):
        mlp("gpt_neox", hidden_act="relu")


@pytest.mark.parametrize(("name", "act"), [("gemma", nn.gelu), ("starcoder2", nn.gelu), ("gpt_neox", nn.gelu_approx)])
def test_the_patch_is_still_needed(name: str, act: Any):
    made = mlp(name)
    library_call = gelu.LIBRARY[type(made)][1]
    np.testing.assert_array_equal(library_call(made, X), computed(made, act))
