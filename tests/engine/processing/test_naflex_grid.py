"""Sizes of Phi-4-reasoning-vision's images are those of transformers' function, for images of any shape."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers.models.siglip2.image_processing_pil_siglip2 import get_image_size_for_max_num_patches

from engine.errors import EngineFailed
from engine.processing.grid_settings import PHI4_PATCHES
from engine.processing.images import ImagePreprocessor
from engine.processing.naflex_grid import NaFlexGrid
from tests.support.phi4_family import PHI4, PUBLISHED, own_patches
from tests.support.vision_zoo import write_files

GRID = NaFlexGrid(patch_size=16, merge_size=1, resample=2, min_patches=256, max_patches=3600)
SIDES = (1, 13, 16, 160, 255, 256, 384, 512, 767, 960, 1000, 1537, 2304, 4001)


def test_images_of_any_shape_get_the_size_of_the_library():
    for width, height in ((width, height) for width in SIDES for height in SIDES):
        if max(width, height) <= 200 * min(width, height):
            most = own_patches(width, height, 16, PHI4_PATCHES)
            expected = get_image_size_for_max_num_patches(height, width, patch_size=16, max_num_patches=most)
            assert GRID.target_size(width, height) == expected[::-1], (width, height)
            rows, columns = GRID.layout(width, height).grid_thw[1:]
            assert (rows * 16, columns * 16) == expected and rows * columns <= GRID.max_tokens


def test_an_image_between_the_limits_keeps_its_size_and_others_come_near_the_limit():
    assert GRID.target_size(640, 480) == (640, 480)
    assert GRID.target_size(64, 64) == (256, 256)
    assert GRID.target_size(4000, 3000) == (1104, 832)  # 69 x 52 patches of 3600


def test_checkpoint_without_an_image_processor_has_the_limits_of_config_json(tmp_path: Path):
    grid = ImagePreprocessor(write_files(tmp_path, PUBLISHED)).grid
    assert grid == ImagePreprocessor(write_files(tmp_path, PHI4)).grid
    assert isinstance(grid, NaFlexGrid) and (grid.min_patches, grid.max_patches) == (6, 20)
    sizes = {key: value for key, value in PHI4.config.items() if key not in PHI4_PATCHES}
    defaults = ImagePreprocessor(write_files(tmp_path, replace(PUBLISHED, config=sizes))).grid
    assert defaults == replace(grid, min_patches=256, max_patches=3600)


@pytest.mark.parametrize(
    ("processor", "config", "reason"),
    [
        ({"max_num_patches": 256}, {}, "the image processor has max_num_patches: 256; config.json means 20"),
        ({"patch_size": 16}, {}, "the image processor has patch_size: 16; config.json means 8"),
        ({}, {"mm_vision_tower": "google/siglip2-so400m-patch14-384"}, "mm_vision_tower is google/siglip2-so400m"),
        ({}, {"mm_vision_tower": None}, "mm_vision_tower is None; supported are towers for images of any shape"),
        ({"min_num_patches": 30}, {"min_num_patches": 30}, "min_num_patches is 30; .* max_num_patches, 20"),
    ],
)
def test_settings_that_contradict_or_are_of_other_towers_are_refused(
    processor: dict[str, Any], config: dict[str, Any], reason: str, tmp_path: Path
):
    family = replace(PHI4, processor={**PHI4.processor, **processor}, config={**PHI4.config, **config})
    with pytest.raises(EngineFailed, match=reason):
        ImagePreprocessor(write_files(tmp_path, family))
