"""Molmo2's tower on crops that overlap: memory is reserved for all their patches."""

from pathlib import Path
from typing import Any

import pytest
from mlx_vlm.utils import load_model

import engine.worker  # noqa: F401  # before MLX
from engine.core.memory.costs import MemoryCosts
from engine.processing.images import ImagePreprocessor
from engine.worker.memory_costs import _of_images
from engine.worker.vision import VisionEncoder
from engine.worker.vision_towers import make_tower
from tests.support.molmo2_family import MOLMO2
from tests.support.vision_zoo import bytes_between_pieces, image, make

SIZES = [(64, 40), (300, 20), (20, 300), (200, 140), (140, 200), (120, 120)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("zoo") / "model", MOLMO2)


def test_memory_between_the_pieces_of_an_image_of_any_size_is_reserved(model_dir: Path):
    """The probes have no overlap, and fewer patches per token."""
    preprocessor = ImagePreprocessor(model_dir)
    vision = VisionEncoder(make_tower(load_model(model_dir), "molmo2"), preprocessor.normalization, 0)
    measured: Any = _of_images(vision)
    costs, ratios = MemoryCosts(**measured), []
    for size in SIZES:
        patches = preprocessor.patches(image(*size))
        kept = bytes_between_pieces(vision, patches)
        assert len(kept) == vision.num_blocks - 1 and kept[0] == kept[-1]
        assert max(kept) <= costs.image_patch_bytes * len(patches.patches)
        features = vision.encode(patches)
        reserved = costs.kept_image(len(patches.patches), patches.num_tokens)
        assert max(kept) + 2 * features.nbytes <= reserved
        ratios.append(len(patches.patches) / patches.num_tokens)
    num_patches, num_tokens, _ = vision.probe(vision.probe_grids[0])
    assert max(ratios) > 1.4 * num_patches / num_tokens
