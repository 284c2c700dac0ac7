"""DeepSeek-VL2's tower: the features of the library for tiles of any arrangement."""

from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
from mlx_vlm.utils import load_model

from engine.processing.images import ImagePreprocessor
from engine.worker.deepseek_vl2_tower import DeepseekVL2Tower
from engine.worker.vision import VisionEncoder
from tests.support.deepseek_vl2_family import DEEPSEEK_VL2, embedder, pixels_of
from tests.support.sighted_family import IDS
from tests.support.vision_zoo import image, make

SIZES = [(64, 40), (33, 64), (20, 20), (300, 20), (56, 56), (20, 300)]


def test_features_are_those_of_the_library(tmp_path: Path):
    path = make(tmp_path / "model", DEEPSEEK_VL2)
    module: Any = load_model(path)
    preprocessor = ImagePreprocessor(path)
    vision = VisionEncoder(DeepseekVL2Tower(module), preprocessor.normalization, 0)
    arrangements = set()
    for size in SIZES:
        patches = preprocessor.patches(image(*size))
        arrangements.add(patches.tiles)
        arrays = {name: mx.array(value) for name, value in pixels_of([image(*size)]).items()}
        expected = embedder(module, arrays)(mx.full((1, patches.num_tokens), IDS["<image>"])).inputs_embeds[0]
        np.testing.assert_allclose(vision.encode(patches), expected, rtol=1e-4, atol=1e-4, err_msg=str(size))
    assert len(arrangements) > 3
