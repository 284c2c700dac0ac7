"""Molmo's tower: the features of the library for crops of any arrangement and padding."""

from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from mlx_vlm.utils import load_model

from engine.processing.images import ImagePreprocessor
from engine.worker.molmo_tower import MolmoTower, _shares
from engine.worker.refused_families import refusal
from engine.worker.vision import VisionEncoder
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


@pytest.mark.parametrize("name", ["attention_layer_norm", "norm_after"])
def test_norms_that_the_library_lacks_are_refused_by_name(name: str):
    assert refusal(MOLMO.config) is None
    assert refusal({"model_type": "molmo", name: False}) is None
    reason = f"config.json has {name} True, which the library's module does not read"
    assert refusal({"model_type": "molmo", name: True}) == reason
    assert refusal({"model_type": "molmo", "text_config": {"d_model": 64}, name: True}) == reason
