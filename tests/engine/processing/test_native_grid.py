"""Sizes of Kimi-VL's images are those of the library's processor, and within limits where it has none."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlx_vlm.models.kimi_vl.processing_kimi_vl import KimiVLImageProcessor
from PIL import Image

from engine.errors import EngineFailed
from engine.processing.images import ImagePreprocessor
from engine.processing.native_grid import MAX_SIDE, NativeGrid, most_tokens
from tests.support.kimi_family import KIMI_VL
from tests.support.vision_zoo import write_files

GRID = NativeGrid(patch_size=14, merge_size=2, resample=3, max_patches=4096, most_tokens=most_tokens(4096, 2))
SIDES = (1, 13, 28, 29, 160, 255, 384, 767, 1000, 1792, 2500)


def test_images_of_any_shape_get_the_size_of_the_library():
    processor = KimiVLImageProcessor(pad_input=True)
    for width, height in ((width, height) for width in SIDES for height in SIDES):
        expected = processor.rescale(Image.new("RGB", (width, height))).size
        rows, columns = GRID.layout(width, height).grid_thw[1:]
        assert (columns * 14, rows * 14) == expected, (width, height)
        assert GRID.num_tokens(GRID.layout(width, height)) == rows * columns // 4 <= GRID.max_tokens


def test_no_image_exceeds_a_limit_of_tokens_or_the_positions_of_the_tower():
    rng = random.Random(0)
    shapes = [(rng.randint(1, 20_000), rng.randint(1, 20_000)) for _ in range(300)]
    for grid in (GRID, GRID.limited(300), GRID.limited(1)):
        for width, height in [*shapes, (20_000, 100), (100, 20_000), (7168, 30)]:
            layout = grid.layout(width, height)
            assert 1 <= grid.num_tokens(layout) <= grid.max_tokens, (width, height)
            assert max(layout.grid_thw) < MAX_SIDE


def test_an_image_with_few_whole_patches_may_have_more_tokens_than_others():
    assert GRID.max_tokens == 1275
    assert GRID.num_tokens(GRID.layout(1792, 1792)) == 1024
    assert GRID.num_tokens(GRID.layout(254 * 28 + 1, 4 * 28 + 1)) == 1275


@pytest.mark.parametrize(
    ("processor", "vision", "reason"),
    [
        ({"patch_size": 16}, {}, "its patch_size is 16; the vision tower takes 8"),
        ({"pad_input": False}, {}, "pad_input is False; supported is True"),
        (
            {"merge_kernel_size": [1, 2]},
            {},
            r"merge_kernel_size is \[1, 2\], and \[2, 2\] in config.json; supported is \[2, 2\]",
        ),
        ({}, {"merge_kernel_size": [4, 4]}, r"merge_kernel_size is \[2, 2\], and \[4, 4\] in config.json"),
        ({}, {"model_type": "qwen2_vl"}, "the vision tower is qwen2_vl; supported are moonvit"),
    ],
)
def test_settings_that_contradict_or_are_of_other_towers_are_refused(
    processor: dict[str, Any], vision: dict[str, Any], reason: str, tmp_path: Path
):
    config = {**KIMI_VL.config, "vision_config": {**KIMI_VL.config["vision_config"], **vision}}
    family = replace(KIMI_VL, processor={**KIMI_VL.processor, **processor}, config=config)
    with pytest.raises(EngineFailed, match=reason):
        ImagePreprocessor(write_files(tmp_path, family))
