"""Phi-3-vision's images: tiles, pixels and tokens of the published processor, and what is refused by name."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx_vlm.models.phi3_v.processing_phi3_v import _calc_hd_transform_size
from PIL import Image

from engine.errors import EngineFailed
from engine.processing.checkpoint import images_unsupported_reason, read_config
from engine.processing.hd_grid import HDGrid
from engine.processing.images import ImagePreprocessor, normalize
from engine.processing.tokenizer import ChatTokenizer
from tests.support.phi3v_family import CONFIG, PHI3_V, SETTINGS, num_tokens, pixels_of
from tests.support.sighted_family import IDS
from tests.support.vision_zoo import image, write_files

GRID = HDGrid(patch_size=14, merge_size=2, resample=2, side=336, max_tiles=16)
SIDES = (1, 13, 160, 336, 337, 512, 767, 1000, 1344, 2304, 4001)
SIZES = [(width, height) for width in SIDES for height in SIDES if max(width, height) <= 200 * min(width, height)]


@pytest.mark.parametrize("max_tiles", [1, 2, 4, 16])
def test_images_of_any_shape_have_the_tiles_of_the_library_and_the_tokens_of_the_processor(max_tiles: int):
    grid = replace(GRID, max_tiles=max_tiles)
    for width, height in SIZES:
        layout = grid.layout(width, height)
        rows, columns = layout.tiles
        assert (columns * 336, rows * 336) == _calc_hd_transform_size(width, height, max_tiles), (width, height)
        assert layout.grid_thw == (rows * columns, 24, 24)
        assert grid.num_tokens(layout) == num_tokens(rows, columns) <= grid.max_tokens
        inner = grid.target_size(width, height)
        assert [math.ceil(length / 336) for length in inner] == [columns, rows]


@pytest.mark.parametrize("size", [(640, 480), (480, 640), (300, 900), (100, 100), (37, 901)])
def test_pixels_are_those_of_the_published_processor(size: tuple[int, int], tmp_path: Path):
    """Compare the tiles; the tower computes the square from them."""
    family = replace(PHI3_V, processor={**SETTINGS, "num_crops": 4})
    preprocessor = ImagePreprocessor(write_files(tmp_path, family))
    assert preprocessor.grid == replace(GRID, max_tiles=4)
    one = image(*size)
    made, expected = preprocessor.patches(one), pixels_of([one], 4)
    assert made.tiles == tuple(expected["arrangements"][0])
    assert np.array_equal(normalize(made.patches, preprocessor.normalization), expected["pixel_values"])


def test_very_narrow_images_are_within_every_limit():
    for most in (1, 313, 500, 1000, 10_000):
        for grid in (GRID.limited(most), GRID.limited(most).for_detail(True)):
            for size in [(1, 20000), (20000, 1), (6368, 32)]:
                assert grid.num_tokens(grid.layout(*size)) <= grid.max_tokens <= max(most, 313)
    assert GRID.limited(GRID.max_tokens) == GRID and GRID.for_detail(True).max_tokens == 313


def test_same_pixels_in_another_arrangement_are_another_image():
    wide, tall = (GRID.cut(Image.new("RGB", size, (255, 255, 255))) for size in ((2000, 200), (200, 2000)))
    assert np.array_equal(wide.patches, tall.patches)
    assert wide.content_hash != tall.content_hash


def prompt_of(folder: Path, content: list[dict[str, Any]], sizes: list[tuple[int, int]], **settings: Any) -> str:
    """Return the prompt of a message with images of these sizes, each run of image tokens as their number.

    settings: Of tokenizer_config.json.
    """
    model_dir = write_files(folder, PHI3_V)
    path = model_dir / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "bos_token": "<s>", **settings}))
    preprocessor, tokenizer = ImagePreprocessor(model_dir), ChatTokenizer(model_dir)
    images = [preprocessor.patches(image(*size)) for size in sizes]
    messages = [{"role": "user", "content": content}]
    ids = tokenizer.encode_chat(messages, template_kwargs={}, placeholders=tokenizer.placeholders(images))
    text, runs = tokenizer.decode(ids.tolist()), [one.num_tokens for one in images]
    assert (ids == IDS["<start>"]).sum() == text.count("<s>"), "each is the token"
    for run in runs:
        text = text.replace("<|image|>" * run, f"[{run}]", 1)
    return text


PARTS: list[dict[str, Any]] = [
    {"type": "image"},
    {"type": "image"},
    {"type": "text", "text": "Is <|image|> or <|image_1|> it?"},
]


def test_texts_behind_images_begin_as_the_published_processor_begins_each(tmp_path: Path):
    """Images are in the order of the prompt, whatever the client's text says."""
    expected = (
        "<|im_start|>user\n[313]<s>\n[469]<s>\nIs <|image|> or <|image_1|> it?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt_of(tmp_path, PARTS, [(64, 40), (20, 64)]) == f"<s>{expected}"
    assert prompt_of(tmp_path, PARTS, [(64, 40), (20, 64)], add_bos_token=True) == f"<s>{expected}"


def test_tokenizer_that_begins_no_text_begins_none_behind_an_image(tmp_path: Path):
    text = prompt_of(tmp_path, PARTS, [(20, 64), (64, 40)], add_bos_token=False)
    assert text.startswith("<|im_start|>user\n[469]\n[313]\nIs <|image|>") and "<s>" not in text


def test_tokenizer_without_the_tokens_of_images_is_refused_by_their_names(tmp_path: Path):
    def reason(**names: str) -> str | None:
        path = write_files(tmp_path, replace(PHI3_V, names={**PHI3_V.names, **names}))
        return images_unsupported_reason(path, read_config(path))

    assert reason() is None
    assert reason(**{"<start>": "<other>"}) == "the tokenizer has no token <s>"
    assert reason(**{"<image>": "<other>"}) == (
        "config.json has no image_token_index, and the tokenizer no token <|image|>"
    )


@pytest.mark.parametrize(
    ("part", "change", "reason"),
    [
        (
            "embd_layer",
            {"hd_transform_order": "glb_sub"},
            "config.json has embd_layer.hd_transform_order: 'glb_sub'; supported is 'sub_glb'",
        ),
        ("embd_layer", {"projection_cls": "linear"}, "projection_cls: 'linear'; supported is 'mlp'"),
        ("embd_layer", {"use_hd_transform": False}, "use_hd_transform: False; supported is True"),
        ("img_processor", {"layer_idx": -1}, "img_processor.layer_idx: -1; supported is -2"),
        ("img_processor", {"image_dim_out": 768}, "img_processor.image_dim_out: 768; supported is 1024"),
        ("img_processor", {"type_feature": "cls_patch"}, "type_feature: 'cls_patch'; supported is 'patch'"),
    ],
)
def test_towers_that_the_library_does_not_build_are_refused_by_name(
    part: str, change: dict[str, Any], reason: str, tmp_path: Path
):
    path = write_files(tmp_path, replace(PHI3_V, config={**CONFIG, part: {**CONFIG[part], **change}}))
    found = images_unsupported_reason(path, read_config(path))
    assert found is not None and reason in found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_img_tokens": 145}, "the image processor has num_img_tokens: 145; supported is 144"),
        ({"num_crops": None}, "num_crops is None; it must be an integer of at least 1"),
        ({"num_crops": 0}, "num_crops is 0; it must be an integer of at least 1"),
        ({"num_crops": 65}, "num_crops is 65; it must be at most 64"),
    ],
)
def test_settings_of_other_tiles_are_refused(change: dict[str, Any], message: str, tmp_path: Path):
    with pytest.raises(EngineFailed, match=message):
        ImagePreprocessor(write_files(tmp_path, replace(PHI3_V, processor={**SETTINGS, **change})))


def test_checkpoint_without_a_tower_is_a_text_model(tmp_path: Path):
    path = write_files(tmp_path, replace(PHI3_V, config={**CONFIG, "img_processor": None}))
    assert images_unsupported_reason(path, read_config(path)) == "config.json has no vision_config"
