"""Vision towers whose embeddings of patches and positions are quantized: what they would compute with the same numbers.

The library's own module is no reference: it casts pixels to the dtype of packed weights.
"""

from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_vlm.utils import load_model

from engine.processing.images import ImagePreprocessor
from engine.worker.vision import VisionEncoder
from engine.worker.vision_towers import make_tower
from tests.support.gemma4_family import GEMMA4_SIGHTED
from tests.support.lfm2_family import LFM2_VL
from tests.support.molmo2_family import MOLMO2
from tests.support.molmo_family import MOLMO
from tests.support.phi4_family import PHI4
from tests.support.sighted_family import SightedFamily
from tests.support.vision_zoo import image, make

PACKED: dict[str, Any] = {"group_size": 32, "bits": 8}
PICTURES = (image(64, 40, seed=1), image(33, 64, seed=2))


FAMILIES = {"gemma4": GEMMA4_SIGHTED, "lfm2_vl": LFM2_VL, "molmo": MOLMO, "molmo2": MOLMO2, "phi4": PHI4}


@pytest.fixture(params=FAMILIES.values(), ids=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> SightedFamily:
    return request.param


def unpacked(layer: Any) -> Any:
    """Return a quantized layer's dense copy, other layers as they are."""
    if not isinstance(layer, nn.QuantizedLinear | nn.QuantizedEmbedding):
        return layer
    weight = mx.dequantize(layer.weight, layer.scales, layer.biases, **PACKED)
    rows, columns = weight.shape
    is_linear = isinstance(layer, nn.QuantizedLinear)
    dense: Any = nn.Linear(columns, rows, bias="bias" in layer) if is_linear else nn.Embedding(rows, columns)
    dense.weight = weight
    if "bias" in layer:
        dense.bias = layer.bias
    return dense


def features(path: Path, module: Any, family: SightedFamily) -> list[np.ndarray]:
    preprocessor = ImagePreprocessor(path)
    vision = VisionEncoder(make_tower(module, family.config["model_type"]), preprocessor.normalization, 0)
    return [np.array(vision.encode(preprocessor.patches(one))) for one in PICTURES]


def test_embeddings_of_patches_and_positions_may_be_quantized(family: SightedFamily, tmp_path: Path):
    path = make(tmp_path / "model", family)
    module: Any = load_model(path)
    nn.quantize(module.vision_tower, **PACKED)
    kinds = {type(layer) for name, layer in module.vision_tower.named_modules() if "_embed" in name}
    assert kinds & {nn.QuantizedLinear}, "the embedding of patches is quantized"
    assert nn.QuantizedEmbedding in kinds or family in (GEMMA4_SIGHTED, MOLMO, MOLMO2), "and so is that of positions"
    packed = features(path, module, family)
    leaves = module.vision_tower.leaf_modules()
    module.vision_tower.update_modules(tree_map(unpacked, leaves, is_leaf=nn.Module.is_module))
    for found, expected in zip(packed, features(path, module, family), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-3, rtol=1e-3)
