"""Aya Vision's tower: the features of the library for tiles of any arrangement, from any layer."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from mlx_vlm.utils import load_model

from engine.processing.images import ImagePreprocessor
from engine.worker.square_towers import AyaVisionTower
from engine.worker.vision import VisionEncoder
from tests.support.aya_family import AYA_VISION
from tests.support.sighted_family import IDS
from tests.support.vision_zoo import image, make

SIZES = [(64, 40), (33, 64), (20, 20), (300, 20), (64, 64), (20, 300)]


@pytest.mark.parametrize("layer", [-1, -2, 1])
def test_features_are_those_of_the_library(layer: int, tmp_path: Path):
    config = {**AYA_VISION.config, "vision_feature_layer": layer}
    path = make(tmp_path / "model", replace(AYA_VISION, config=config))
    module: Any = load_model(path)
    preprocessor = ImagePreprocessor(path)
    vision = VisionEncoder(AyaVisionTower(module), preprocessor.normalization, 0)
    arrangements = set()
    for size in SIZES:
        patches = preprocessor.patches(image(*size))
        arrangements.add(patches.tiles)
        ids = mx.full((1, patches.num_tokens), IDS["<image>"])
        pixels = mx.array(AYA_VISION.pixels([image(*size)])["pixel_values"])
        expected = module.get_input_embeddings(ids, pixel_values=pixels).inputs_embeds[0]
        np.testing.assert_allclose(vision.encode(patches), expected, rtol=1e-4, atol=1e-4, err_msg=str(size))
    assert len(arrangements) > 3
