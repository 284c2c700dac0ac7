"""Molmo's tower: the features of the library for crops of any arrangement and padding."""

import json
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from mlx_vlm.utils import load_model

from engine.config import EngineConfig
from engine.errors import EngineFailed
from engine.processing.checkpoint import num_embeddings
from engine.processing.context import MOLMO_NAMES
from engine.processing.images import ImagePreprocessor
from engine.worker.loader import open_model
from engine.worker.molmo_tower import MolmoTower, _shares
from engine.worker.refused_families import refusal
from engine.worker.vision import VisionEncoder
from tests.support import zoo
from tests.support.families import FAMILIES
from tests.support.molmo_family import MOLMO, PROCESSOR, library_features, library_image, library_pixels
from tests.support.vision_zoo import image, make

SIZES = [(64, 40), (33, 64), (64, 64), (300, 20), (160, 48), (48, 160), (200, 140), (96, 96)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("zoo") / "model", MOLMO)


def test_features_are_those_of_the_library(model_dir: Path):
    module: Any = load_model(model_dir)
    preprocessor = ImagePreprocessor(model_dir)
    vision = VisionEncoder(MolmoTower(module), preprocessor.normalization, 0)
    arrangements = set()
    for size in SIZES:
        patches = preprocessor.patches(image(*size))
        arrangements.add(patches.tiles)
        arrays = {name: mx.array(value) for name, value in library_pixels([image(*size)]).items()}
        [(_, expected)] = library_features(module, arrays)
        np.testing.assert_allclose(vision.encode(patches), expected, rtol=1e-4, atol=1e-3, err_msg=str(size))
    assert len(arrangements) > 3


def test_shares_of_padding_are_those_that_the_processor_passes(model_dir: Path):
    preprocessor = ImagePreprocessor(model_dir)
    for size in SIZES:
        one = preprocessor.patches(image(*size))
        expected = library_image(PROCESSOR, image(*size))[3]
        assert any(one.inner)
        ours = _shares(8, one.tiles, one.unpadded, one.inner, 8)
        np.testing.assert_allclose(ours, expected, atol=1e-6, err_msg=str(size))
        assert np.array_equal(ours == 0, expected == 0) and np.array_equal(ours < 1, expected < 1)


def test_sizes_and_epsilon_at_the_top_of_config_json_are_those_of_the_language_model(tmp_path: Path):
    """As published; mlx_vlm reads its own part of config.json alone."""
    path = zoo.make(tmp_path, FAMILIES["molmo"])
    text = FAMILIES["molmo"].config["text_config"]
    flat = {name: text[of_library] for name, of_library in MOLMO_NAMES.items()}
    more = {"model_type": "molmo", "embedding_size": text["vocab_size"], "layer_norm_eps": 1e-2, "clip_qkv": None}
    config = {**flat, **more, "vocab_size": text["vocab_size"], "rope_theta": text["rope_theta"]}
    (path / "config.json").write_text(json.dumps(config))
    opened = open_model(EngineConfig(model=str(path)))
    assert opened.module.language_model.model.blocks[0].attn_norm.eps == 1e-2
    assert len(opened.module.language_model.layers) == text["n_layers"]
    assert num_embeddings(opened.config) == text["vocab_size"] + 128
    (path / "config.json").write_text(json.dumps({**config, "clip_qkv": 8.0}))
    with pytest.raises(EngineFailed, match=r"config\.json has clip_qkv 8\.0"):
        open_model(EngineConfig(model=str(path)))


@pytest.mark.parametrize("name", ["attention_layer_norm", "norm_after"])
def test_norms_that_the_library_lacks_are_refused_by_name(name: str):
    assert refusal(MOLMO.config) is None
    assert refusal({"model_type": "molmo", name: False}) is None
    reason = f"config.json has {name} True, which the library's module does not read"
    assert refusal({"model_type": "molmo", name: True}) == reason
    assert refusal({"model_type": "molmo", "text_config": {"d_model": 64}, name: True}) == reason
