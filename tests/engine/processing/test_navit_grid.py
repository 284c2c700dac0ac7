"""Kimi K2.5's images: sizes are those of the published function, and settings are read by both of their names."""

import ast
import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import transformers

from engine.config import EngineConfig
from engine.errors import EngineFailed
from engine.processing.checkpoint import images_unsupported_reason, read_config
from engine.processing.context import library_config
from engine.processing.family_grids import GRIDS
from engine.processing.images import ImagePreprocessor
from engine.processing.navit_grid import NavitGrid, most_squares
from engine.processing.vision_families import KIMI_K25 as FAMILY
from tests.support.kimi_family import K25_SETTINGS, KIMI_K25
from tests.support.sighted_family import NORMALIZED, PATCH
from tests.support.vision_zoo import image, write_files

PUBLISHED: dict[str, Any] = {
    "patch_size": 14,
    "merge_kernel_size": 2,
    "in_patch_limit": 16384,
    "patch_limit_on_one_side": 512,
    "fixed_output_tokens": None,
}
GRID: Any = GRIDS["kimi_k25"](FAMILY.settings(PUBLISHED), {"vision_config": {"patch_size": 14}})
NATIVE: dict[str, Any] = {
    "image_processor_type": "Kimi_K25ImageProcessor",
    "patch_size": PATCH,
    "merge_size": 2,
    "max_patches": 48,
    "size": {"max_height": 24, "max_width": 24},
    **NORMALIZED,
}
"""The settings of the vision zoo by the names of transformers' class."""


@cache
def published() -> Callable[..., Any]:
    """Return `navit_resize` of transformers, whose module needs torch."""
    assert transformers.__file__ is not None
    path = Path(transformers.__file__).parent / "models" / "kimi_k25" / "image_processing_kimi_k25.py"
    found = [node for node in ast.parse(path.read_text()).body if getattr(node, "name", None) == "navit_resize"]
    names: dict[str, Any] = {"math": math}
    exec(compile(ast.Module(list(found), []), str(path), "exec"), names)  # noqa: S102  # the installed package's source
    return names["navit_resize"]


@pytest.mark.parametrize(("most", "side"), [(16384, 512), (1000, 64), (48, 24)])
def test_sizes_and_padding_of_any_image_are_those_of_the_published_function(most: int, side: int):
    grid = NavitGrid(14, 2, 3, most, most_squares(most, side, 2), side)
    rng = random.Random(0)
    shapes = [(rng.randint(1, 9000), rng.randint(1, 9000)) for _ in range(700)]
    shapes += [(rng.randint(1, 60), rng.randint(1, 30_000)) for _ in range(300)]
    shapes += [(27, 20_000), (13, 7169), (7168, 7168), (1, 1), (7167, 30), (14 * 128 + 13, 14 * 128 + 13), (50, 20_000)]
    for width, height in [*shapes, *((height, width) for width, height in shapes)]:
        own, padded = published()(height, width, 14, 2, most, side)
        layout = grid.layout(width, height)
        assert grid.target_size(width, height) == own[::-1], (width, height)
        assert layout.grid_thw == (1, padded[0] // 14, padded[1] // 14), (width, height)
        assert grid.num_tokens(layout) <= grid.max_tokens, (width, height)


def test_images_have_the_numbers_of_tokens_that_are_computed_by_hand():
    assert GRID.num_tokens(GRID.layout(28, 28)) == 1
    assert GRID.num_tokens(GRID.layout(640, 480)) == 23 * 18
    assert GRID.target_size(4000, 3000) == (2073, 1554)  # times the root of 16,384 / (285 * 214) patches
    assert GRID.num_tokens(GRID.layout(4000, 3000)) == 75 * 56
    assert GRID.limited(100).num_tokens(GRID.limited(100).layout(4000, 3000)) <= 100
    assert GRID.for_detail(True).max_tokens == 334


def test_settings_of_the_published_file_and_of_transformers_give_the_same_images(tmp_path: Path):
    own = ImagePreprocessor(write_files(tmp_path / "own", KIMI_K25))
    native = ImagePreprocessor(write_files(tmp_path / "native", replace(KIMI_K25, processor=NATIVE)))
    assert native.grid == own.grid and native.normalization == own.normalization
    assert native.patches(image(50, 30)).content_hash == own.patches(image(50, 30)).content_hash
    path = write_files(tmp_path / "none", replace(KIMI_K25, processor={}))
    (path / "preprocessor_config.json").unlink()
    with pytest.raises(EngineFailed, match="the vision tower takes"):
        ImagePreprocessor(path)  # the published patches have 14 pixels


@pytest.mark.parametrize(
    ("settings", "vision", "reason"),
    [
        ({"patch_size": 16}, {}, r"are \(2, 2, 16\); the vision tower takes \(2, 2, 8\)"),
        ({"merge_kernel_size": [2, 1]}, {}, r"are \(2, 1, 8\); the vision tower takes \(2, 2, 8\)"),
        ({"merge_kernel_size": 4}, {}, r"are \(4, 4, 8\); the vision tower takes \(2, 2, 8\)"),
        ({}, {"init_pos_emb_width": 8}, "has 4 x 8 positions; supported are squares"),
        ({"patch_limit_on_one_side": 514}, {}, "are at most 514; supported are multiples of 2 to 512"),
        ({"patch_limit_on_one_side": 7}, {}, "are at most 7; supported are multiples of 2 to 512"),
        ({"in_patch_limit": 3}, {}, "the most patches of an image are 3; it must be at least 4"),
    ],
)
def test_settings_that_contradict_the_tower_are_refused(
    settings: dict[str, Any], vision: dict[str, Any], reason: str, tmp_path: Path
):
    config = {**KIMI_K25.config, "vision_config": {**KIMI_K25.config["vision_config"], **vision}}
    family = replace(KIMI_K25, processor={"media_proc_cfg": {**K25_SETTINGS, **settings}}, config=config)
    with pytest.raises(EngineFailed, match=reason):
        ImagePreprocessor(write_files(tmp_path, family))


@pytest.mark.parametrize(
    ("settings", "vision", "reason"),
    [
        ({"fixed_output_tokens": 64}, {}, "the image processor has fixed_output_tokens: 64; supported is None"),
        (
            {},
            {"projector_hidden_act": "relu"},
            "config.json has vision_config.projector_hidden_act: 'relu'; supported is 'gelu'",
        ),
        (
            {},
            {"mm_projector_type": "patchmergerv2"},
            "config.json has vision_config.mm_projector_type: 'patchmergerv2'; supported is 'patchmerger'",
        ),
    ],
)
def test_what_the_library_does_not_compute_is_refused_by_name(
    settings: dict[str, Any], vision: dict[str, Any], reason: str, tmp_path: Path
):
    config = {**KIMI_K25.config, "vision_config": {**KIMI_K25.config["vision_config"], **vision}}
    family = replace(KIMI_K25, processor={"media_proc_cfg": {**K25_SETTINGS, **settings}}, config=config)
    path = write_files(tmp_path, family)
    assert images_unsupported_reason(path, read_config(path)) == reason


@pytest.mark.parametrize("is_native", [False, True])
def test_names_of_published_configurations_are_handed_to_the_library(is_native: bool):
    native = {
        "model_type": "kimi_k25_vision",
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "pos_emb_height": 16,
        "pos_emb_width": 16,
    }
    own = {
        "model_type": "",
        "vt_hidden_size": 96,
        "vt_intermediate_size": 160,
        "vt_num_attention_heads": 4,
        "vt_num_hidden_layers": 3,
        "init_pos_emb_height": 16,
        "init_pos_emb_width": 16,
    }
    config = {**KIMI_K25.config, "vision_config": native if is_native else own}
    vision = library_config(EngineConfig(model="demo"), config)["vision_config"]
    expected = {
        "model_type": "moonvit",
        "depth": 3,
        "embed_dim": 96,
        "hidden_size": 96,
        "init_pos_emb_height": 16,
        "init_pos_emb_width": 16,
        "intermediate_size": 160,
        "num_heads": 4,
    }
    assert {name: vision[name] for name in expected} == expected
