"""Llama 4's images and prompts: as transformers' processor makes them, and which checkpoints are text models."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.llama4.processing_llama4 import Llama4Processor

from engine.errors import EngineFailed
from engine.processing.canvas_grid import canvases
from engine.processing.checkpoint import images_unsupported_reason, media_kinds, read_config
from engine.processing.family_grids import GRIDS
from engine.processing.images import ImagePreprocessor, normalize
from engine.processing.patch_normalization import PatchNormalization
from engine.processing.tiled_families import LLAMA4 as FAMILY
from engine.processing.tokenizer import ChatTokenizer
from tests.support.llama4_family import LLAMA4, PROCESSOR, Published, Tensor, published
from tests.support.sighted_family import IDS
from tests.support.vision_zoo import image, write_files

PUBLISHED: dict[str, Any] = {
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "max_patches": 16,
    "resample": 2,
    "resize_to_max_canvas": False,
    "size": {"height": 336, "width": 336},
}
"""The image processor of the published checkpoints."""
VISION = {"image_size": 336, "patch_size": 14, "pixel_shuffle_ratio": 0.5}
GRID: Any = GRIDS["llama4"](FAMILY.settings(PUBLISHED), {"vision_config": VISION})


@pytest.mark.parametrize(
    ("size", "tiles", "inner", "num_tokens"),
    [
        ((640, 480), (2, 2), (640, 480), 5 * 144),  # 672 x 672 enlarges it by 1.05, and is not filled
        ((100, 100), (1, 1), (336, 336), 144),
        ((336, 336), (1, 1), (336, 336), 144),
        ((337, 336), (1, 2), (337, 336), 3 * 144),
        ((90, 2000), (6, 1), (90, 2000), 7 * 144),
        ((3000, 500), (2, 8), (2688, 448), 17 * 144),  # no canvas has its size: reduced to 0.896
        ((1104, 1472), (4, 3), (1008, 1344), 13 * 144),  # 1007 wide with scales in float64
        ((772, 2123), (6, 2), (672, 1847), 13 * 144),  # 1848 high with scales in float64
        ((400, 300), (1, 2), (400, 300), 3 * 144),
        ((5, 5), (1, 1), (336, 336), 144),
        ((1, 400), (2, 1), (1, 400), 3 * 144),
    ],
)
def test_published_settings_give_the_canvas_that_enlarges_an_image_least(
    size: tuple[int, int], tiles: tuple[int, int], inner: tuple[int, int], num_tokens: int
):
    layout = GRID.layout(*size)
    assert layout.tiles == tiles and GRID._inner(*size) == inner and GRID.num_tokens(layout) == num_tokens
    assert layout.grid_thw == (num_tokens // 144, 24, 24)
    assert GRID.max_tokens == 17 * 144 and GRID.limited(800).max_tokens == 5 * 144 and GRID.limited(1).max_tokens == 144
    assert GRID.for_detail(True).max_tokens == 144


def test_canvases_have_the_order_of_the_published_processor():
    for most in (1, 4, 5, 16):
        expected = published()["find_supported_resolutions"](most, published()["SizeDict"](336, 336))
        assert [(rows * 336, columns * 336) for rows, columns in canvases(most)] == expected


def test_sizes_of_any_image_are_those_of_the_published_functions():
    """With scales in float32; the first few sizes are rounded down otherwise in float64."""
    rng, names = np.random.default_rng(0), published()
    resolutions = np.array(names["find_supported_resolutions"](16, names["SizeDict"](336, 336)), np.float32)
    lengths = [*rng.integers(1, 4000, 1500).tolist(), 336, 672, 1008, 1344, 2016, 2688, 5376, 335, 337]
    rounded = [(1104, 1472), (772, 2123), (861, 2214), (2480, 992), (2529, 843)]
    for width, height in [*rounded, *zip(lengths, rng.permutation(lengths).tolist(), strict=True)]:
        best = names["get_best_fit"]((height, width), resolutions.view(Tensor))
        limits = [min(max(own, 336), most) for own, most in zip((height, width), best, strict=True)]
        expected = names["get_max_res_without_distortion"]((height, width), limits)
        assert GRID._canvas(width, height) == (best[0] // 336, best[1] // 336), (width, height)
        assert GRID._inner(width, height) == (max(int(expected[1]), 1), max(int(expected[0]), 1)), (width, height)


@pytest.mark.parametrize("size", [(640, 480), (90, 700), (1000, 300), (3000, 500), (20, 30)])
def test_pixels_are_those_of_the_published_processor(size: tuple[int, int]):
    one = image(*size, seed=size[0])
    expected, tiles = Published(PUBLISHED)(one)
    cut, normalization = GRID.cut(one), PatchNormalization.of(FAMILY.settings(PUBLISHED))
    assert cut.layout.tiles == tiles
    ours = normalize(cut.patches, normalization).reshape(len(expected), 24, 24, 3, 14, 14)
    assert np.abs(ours.transpose(0, 3, 1, 4, 2, 5).reshape(expected.shape) - expected).max() < 1e-6


def encoded(path: Path, *contents: str | None, role: str = "user") -> tuple[str, int]:
    """Return the prompt of one message, and how many image tokens it has. contents: None for an image."""
    tokenizer, shown = ChatTokenizer(path), [image(40, 20) for one in contents if one is None]
    parts = [{"type": "image"} if one is None else {"type": "text", "text": one} for one in contents]
    messages = [{"role": "user", "content": "Hi"}, {"role": role, "content": parts}]
    preprocessor = ImagePreprocessor(path) if shown else None
    placeholders = [tokenizer.placeholder(preprocessor.patches(one)) for one in shown] if preprocessor else []
    prompt = tokenizer.chat_prompt(messages, template_kwargs={}, placeholders=placeholders)
    ids = tokenizer.encode_chat(messages, template_kwargs={}, placeholders=placeholders)
    assert prompt.token_ids.tolist() == ids.tolist()
    return tokenizer.decode(ids.tolist()), int((ids == IDS["<image>"]).sum())


@pytest.mark.parametrize("tiles", [(1, 1), (1, 2), (2, 1), (2, 3), (4, 4)])
def test_words_around_published_tiles_are_those_of_the_processor(tiles: tuple[int, int], tmp_path: Path):
    rows, columns = tiles
    tokenizer = ChatTokenizer(write_files(tmp_path, LLAMA4))
    cut = GRID.cut(Image.new("RGB", (columns * 336, rows * 336)))
    assert cut.layout.tiles == tiles
    made = ImagePreprocessor(write_files(tmp_path, LLAMA4)).patches(image(20, 20))
    shown = replace(made, grid_thw=cut.layout.grid_thw, tiles=tiles, num_tokens=GRID.num_tokens(cut.layout))
    placeholder = tokenizer.placeholder(shown)
    text = placeholder.text.replace("<|patch|>", "<|patch|>" * 144)
    processor: Any = object.__new__(Llama4Processor)
    assert text == processor._prompt_split_image(tiles, 144)
    assert sum(placeholder.runs) == shown.num_tokens and len(placeholder.runs) == shown.grid_thw[0]


TILES = "<|image_start|>{0}<|tile_x_separator|>{0}<|tile_y_separator|><|image|>{0}<|image_end|>".format("<|patch|>" * 4)


@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_no_text_of_a_client_stands_for_an_image(role: str, tmp_path: Path):
    path = write_files(tmp_path, LLAMA4)
    for contents in (["An <|image|> here"], ["An <|ima", "ge|> here"], ["<|patch|> <|image_start|>"]):
        text, num_tokens = encoded(path, *contents, role=role)
        assert "".join(contents) in text.replace("\n", "") and num_tokens == 0
    text, num_tokens = encoded(path, "An <|image|> and ", None)
    assert f"An <|image|> and {TILES}" in text and num_tokens == 12
    text, num_tokens = encoded(path, None, " and ", None)
    assert f"{TILES} and {TILES}" in text and num_tokens == 24


@pytest.mark.parametrize("token", ["<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>"])
def test_checkpoint_without_a_token_around_tiles_is_a_text_model(token: str, tmp_path: Path):
    names = {key: "<other>" if name == token else name for key, name in LLAMA4.names.items()}
    path = write_files(tmp_path, replace(LLAMA4, names=names))
    found = read_config(path)
    assert images_unsupported_reason(path, found) == f"the tokenizer has no token {token}"
    assert not media_kinds(path, found)
    assert encoded(path, "An <image>?")[0].endswith("An <image>?<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("settings", "vision", "reason"),
    [
        ({"do_resize": False}, {}, "the image processor has do_resize: False; supported is True"),
        (
            {"resize_to_max_canvas": True},
            {},
            "the image processor has resize_to_max_canvas: True; supported is False",
        ),
        ({}, {"hidden_act": "relu"}, "config.json has vision_config.hidden_act: 'relu'; supported is 'gelu'"),
        (
            {},
            {"multi_modal_projector_bias": True},
            "config.json has vision_config.multi_modal_projector_bias: True; supported is False",
        ),
    ],
)
def test_what_the_library_does_not_compute_is_refused_by_name(
    settings: Mapping[str, Any], vision: Mapping[str, Any], reason: str, tmp_path: Path
):
    config = {**LLAMA4.config, "vision_config": {**LLAMA4.config["vision_config"], **vision}}
    path = write_files(tmp_path, replace(LLAMA4, processor={**PROCESSOR, **settings}, config=config))
    assert images_unsupported_reason(path, read_config(path)) == reason


@pytest.mark.parametrize(
    ("settings", "vision", "message"),
    [
        ({"size": {"height": 40, "width": 40}}, {}, "images of 40 pixels per side; the vision tower takes 32"),
        ({"size": {"height": 32, "width": 40}}, {}, "images of 40 x 32 pixels; supported are squares"),
        ({"max_patches": 65}, {}, "max_patches is 65; it must be between 1 and 64"),
        ({"max_patches": 0}, {}, "max_patches is 0; it must be between 1 and 64"),
        ({}, {"pixel_shuffle_ratio": 0.3}, "pixel_shuffle_ratio is 0.3; its inverse must divide the 4 patches of a"),
        ({}, {"pixel_shuffle_ratio": 0.125}, "pixel_shuffle_ratio is 0.125; its inverse must divide the 4 patches"),
        ({}, {"pixel_shuffle_ratio": 0.0}, "pixel_shuffle_ratio is 0.0; its inverse must divide the 4 patches of a"),
    ],
)
def test_sizes_that_the_model_does_not_take_are_refused(
    settings: Mapping[str, Any], vision: Mapping[str, Any], message: str, tmp_path: Path
):
    config = {**LLAMA4.config, "vision_config": {**LLAMA4.config["vision_config"], **vision}}
    family = replace(LLAMA4, processor={**PROCESSOR, **settings}, config=config)
    with pytest.raises(EngineFailed, match=message):
        ImagePreprocessor(write_files(tmp_path, family))
