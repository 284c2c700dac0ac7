"""Llama 4's tower: the features of the library for tiles of any arrangement, with the GELU of transformers."""

import math
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import mlx.nn as nn
import numpy as np
import pytest
from mlx_vlm.models.llama4.vision import Llama4VisionMLP
from mlx_vlm.utils import load_model

from engine.processing.images import ImagePreprocessor
from engine.worker.llama4_tower import Llama4Tower
from engine.worker.patches import llama4_gelu
from engine.worker.vision import VisionEncoder
from tests.support.llama4_family import LLAMA4
from tests.support.sighted_family import IDS
from tests.support.vision_zoo import image, make

SIZES = [(64, 40), (33, 64), (20, 20), (300, 20), (64, 64), (20, 300)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("llama4") / "model", LLAMA4)


@pytest.fixture(scope="module")
def module(path: Path) -> Any:
    return load_model(path)


def test_features_are_those_of_the_library(path: Path, module: Any):
    preprocessor = ImagePreprocessor(path)
    vision = VisionEncoder(Llama4Tower(module), preprocessor.normalization, 0)
    arrangements = set()
    for size in SIZES:
        patches = preprocessor.patches(image(*size))
        arrangements.add(patches.tiles)
        ids = mx.full((1, patches.num_tokens), IDS["<image>"])
        pixels = mx.array(LLAMA4.pixels([image(*size)])["pixel_values"])
        expected = module.get_input_embeddings(ids, pixel_values=pixels).inputs_embeds[0]
        np.testing.assert_allclose(vision.encode(patches), expected, rtol=1e-4, atol=1e-4, err_msg=str(size))
    assert len(arrangements) > 3


def test_embedding_of_patches_may_be_quantized(path: Path):
    module: Any = load_model(path)
    nn.quantize(module.vision_model.patch_embedding, group_size=32, bits=8)
    embedding, preprocessor = module.vision_model.patch_embedding, ImagePreprocessor(path)
    vision = VisionEncoder(Llama4Tower(module), preprocessor.normalization, 0)
    packed, one = embedding.linear, preprocessor.patches(image(64, 40))
    found = vision.encode(one)
    embedding.linear = nn.Linear(packed.weight.shape[1], packed.weight.shape[0], bias=False)
    embedding.linear.weight = mx.dequantize(packed.weight, packed.scales, packed.biases, group_size=32, bits=8)
    np.testing.assert_allclose(found, vision.encode(one), atol=1e-3, rtol=1e-3)


def gelu(x: mx.array) -> mx.array:
    return mx.array(np.vectorize(lambda one: 0.5 * one * (1 + math.erf(one / math.sqrt(2))))(np.array(x)), mx.float32)


def test_blocks_and_adapter_have_the_exact_gelu_which_the_library_approximates(
    module: Any, monkeypatch: pytest.MonkeyPatch
):
    config = module.config.vision_config
    block, adapter = module.vision_model.model.layers[0].mlp, module.vision_model.vision_adapter.mlp
    x = mx.random.normal((3, config.hidden_size), key=mx.random.key(0))
    np.testing.assert_allclose(block(x), block.fc2(gelu(block.fc1(x))), atol=1e-5)
    wide = mx.random.normal((3, config.intermediate_size), key=mx.random.key(1))
    np.testing.assert_allclose(adapter(wide), gelu(adapter.fc2(gelu(adapter.fc1(wide)))), atol=1e-5)
    monkeypatch.setattr(Llama4VisionMLP, "__init__", llama4_gelu.library_init)
    library = Llama4VisionMLP(config)
    library.fc1, library.fc2 = block.fc1, block.fc2
    assert mx.abs(library(x) - block(x)).max() > 1e-3, "the patch is still needed"
