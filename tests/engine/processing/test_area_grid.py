"""Sizes of Gemma 4's images are those of transformers' function, for images of any shape and any number of tokens."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

from engine.errors import EngineFailed
from engine.processing.area_grid import AreaGrid
from engine.processing.checkpoint import images_unsupported_reason, read_config
from engine.processing.images import ImagePreprocessor
from tests.support.gemma4_family import GEMMA4_SIGHTED
from tests.support.vision_zoo import write_files

GRID = AreaGrid(patch_size=16, merge_size=3, resample=3, most_tokens=280)
SIDES = (1, 13, 48, 160, 255, 384, 512, 767, 1000, 1537, 4001)


@pytest.mark.parametrize("most_tokens", [70, 140, 280, 560, 1120])
def test_images_of_any_shape_get_the_size_of_the_library(most_tokens: int):
    grid = GRID.limited(most_tokens) if most_tokens <= 280 else replace(GRID, most_tokens=most_tokens)
    for width, height in ((width, height) for width in SIDES for height in SIDES):
        if max(width, height) <= 200 * min(width, height):
            expected = get_aspect_ratio_preserving_size(height, width, 16, 9 * most_tokens, 3)
            assert grid.target_size(width, height) == expected[::-1], (width, height)
            layout = grid.layout(width, height)
            assert layout.num_patches * 256 == expected[0] * expected[1]
            assert grid.num_tokens(layout) <= most_tokens


def test_small_images_are_enlarged_and_any_limit_has_a_grid():
    assert GRID.target_size(64, 64) == GRID.target_size(4000, 4000) == (768, 768)
    for most_tokens in range(1, 40):
        grid = GRID.limited(most_tokens)
        for width, height in ((100, 100), (300, 100), (100, 1700), (20_000, 100)):
            assert 1 <= grid.num_tokens(grid.layout(width, height)) <= most_tokens, (most_tokens, width, height)


@pytest.mark.parametrize("key", ["patch_size", "pooling_kernel_size"])
def test_an_image_processor_of_another_tower_is_refused(key: str, tmp_path: Path):
    family = replace(GEMMA4_SIGHTED, processor={**GEMMA4_SIGHTED.processor, key: 4})
    with pytest.raises(EngineFailed, match=f"its {key} is 4; the vision tower takes {2 if 'pool' in key else 8}"):
        ImagePreprocessor(write_files(tmp_path, family))


@pytest.mark.parametrize(
    ("processor", "config", "reason"),
    [
        ({"do_resize": False}, {}, "the image processor has do_resize: False; supported is True"),
        ({}, {"hidden_activation": "relu"}, "config.json has vision_config.hidden_activation: 'relu'"),
    ],
)
def test_settings_that_are_not_computed_are_refused(
    processor: dict[str, Any], config: dict[str, Any], reason: str, tmp_path: Path
):
    vision = {**GEMMA4_SIGHTED.config["vision_config"], **config}
    family = replace(
        GEMMA4_SIGHTED,
        processor={**GEMMA4_SIGHTED.processor, **processor},
        config={**GEMMA4_SIGHTED.config, "vision_config": vision},
    )
    model_dir = write_files(tmp_path, family)
    found = images_unsupported_reason(model_dir, read_config(model_dir))
    assert found is not None and reason in found


def test_a_tokenizer_without_the_tokens_around_an_image_is_refused(tmp_path: Path):
    model_dir = write_files(tmp_path, replace(GEMMA4_SIGHTED, processor_config={}))
    found = images_unsupported_reason(model_dir, read_config(model_dir))
    assert found is not None and "<|image>" in found
