"""Aya Vision's images and prompts: as transformers' processor makes them, and which checkpoints are text models."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers.models.aya_vision.processing_aya_vision import AyaVisionProcessor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from engine.errors import EngineFailed
from engine.processing.checkpoint import images_unsupported_reason, media_kinds, read_config
from engine.processing.family_grids import GRIDS
from engine.processing.image_grid import ImageGrid
from engine.processing.images import ImagePreprocessor
from engine.processing.tokenizer import ChatTokenizer
from engine.processing.vision_families import AYA_VISION as FAMILY
from tests.support.aya_family import AYA_VISION, PROCESSOR
from tests.support.sighted_family import IDS
from tests.support.vision_zoo import image, write_files

PUBLISHED: dict[str, Any] = {
    "crop_to_patches": True,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "max_patches": 12,
    "min_patches": 1,
    "resample": 3,
    "size": {"height": 364, "width": 364},
}
"""The image processor of the published checkpoints."""
GRID: ImageGrid = GRIDS["aya_vision"](
    FAMILY.settings(PUBLISHED), {"vision_config": {"image_size": 364, "patch_size": 14}, "downsample_factor": 2}
)
SIZES = [(640, 480), (480, 640), (100, 100), (364, 364), (365, 364), (3000, 500), (90, 2000), (1456, 1092), (5, 5)]


@pytest.mark.parametrize("size", SIZES)
def test_published_settings_give_the_tiles_and_tokens_of_the_library(size: tuple[int, int]):
    library: Any = object.__new__(AyaVisionProcessor)
    library.img_size, library.patch_size = 364, 28
    library.image_processor = GotOcr2ImageProcessorPil(**PUBLISHED)
    library._merge_kwargs = lambda **kwargs: {"images_kwargs": AyaVisionProcessor.images_kwargs}
    counted = library._get_num_multimodal_tokens(image_sizes=[size[::-1]])
    made = library.image_processor(images=[Image.new("RGB", size)])
    layout = GRID.layout(*size)
    assert layout.grid_thw == (made["num_patches"][0], 26, 26) == (counted.num_image_patches[0], 26, 26)
    names = 2 + layout.grid_thw[0]  # of each tile, and the two tokens around all
    assert GRID.num_tokens(layout) + names == counted.num_image_tokens[0]
    assert GRID.max_tokens == 13 * 169 and GRID.limited(500).max_tokens <= 500


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


PLACED = (
    "<|START_OF_IMG|>"
    + "".join(f"{name}{'<|IMG_PATCH|>' * 4}" for name in ("TILE_1", "TILE_2", "TILE_GLOBAL"))
    + "<|END_OF_IMG|>"
)


@pytest.mark.parametrize("is_token", [False, True])
def test_images_are_placed_whether_or_not_the_templates_placeholder_is_a_token(is_token: bool, tmp_path: Path):
    names = {**AYA_VISION.names, **({"<break>": "<image>"} if is_token else {})}
    path = write_files(tmp_path, replace(AYA_VISION, names=names))
    assert ("<image>" in ChatTokenizer(path).control_ids) == is_token
    text, num_tokens = encoded(path, "Is ", None, " it?")
    assert f"user\nIs {PLACED} it?<|im_end|>" in text and num_tokens == 12


@pytest.mark.parametrize("role", ["user", "assistant", "system"])
@pytest.mark.parametrize("is_token", [False, True])
def test_no_text_of_a_client_stands_for_an_image(role: str, is_token: bool, tmp_path: Path):
    names = {**AYA_VISION.names, **({"<break>": "<image>"} if is_token else {})}
    path = write_files(tmp_path, replace(AYA_VISION, names=names))
    for contents in (["An <image> here"], ["An <ima", "ge> here"], ["<|IMG_PATCH|> <image>"]):
        text, num_tokens = encoded(path, *contents, role=role)
        assert "".join(contents) in text.replace("\n", "") and num_tokens == 0
    text, num_tokens = encoded(path, "An <image> and ", None)
    assert f"An <image> and {PLACED}" in text and num_tokens == 12


def test_names_of_processor_config_are_used(tmp_path: Path):
    names = {"tile_token": "PART", "tile_global_token": "ALL", "image_token": "[IMG]"}
    config = {**AYA_VISION.processor_config, **names}
    path = write_files(tmp_path, replace(AYA_VISION, processor_config=config, template="[IMG]"))
    text, _ = encoded(path, "a [IMG] ", None)
    assert f"a [IMG] {PLACED.replace('TILE_GLOBAL', 'ALL').replace('TILE', 'PART')}<|im_end|>" in text


@pytest.mark.parametrize(
    ("names", "config", "reason"),
    [
        ({"<start>": "<s>"}, {}, "the tokenizer has no token <|START_OF_IMG|>"),
        ({"<end>": "<e>"}, {}, "the tokenizer has no token <|END_OF_IMG|>"),
        ({"<image>": "<i>"}, {}, "the tokenizer has no token <|IMG_PATCH|>"),
        ({"<image>": "<image>"}, {}, "the tokenizer has no token <|IMG_PATCH|>"),
        (
            {"<image>": "<i>"},
            {"image_token_id": None, "image_token_index": None},
            "config.json has no image_token_index, and the tokenizer no token <|IMG_PATCH|>",
        ),
        (
            {},
            {"vision_feature_select_strategy": "default"},
            "config.json has vision_feature_select_strategy: 'default'; supported is 'full'",
        ),
        (
            {},
            {"vision_feature_layer": [-1, -2]},
            "the features are those of several layers, [-1, -2]; one is supported",
        ),
    ],
)
def test_checkpoint_whose_images_cannot_be_placed_is_a_text_model_for_a_named_reason(
    names: Mapping[str, str], config: Mapping[str, Any], reason: str, tmp_path: Path
):
    family = replace(AYA_VISION, names={**AYA_VISION.names, **names}, config={**AYA_VISION.config, **config})
    path = write_files(tmp_path, family)
    found = read_config(path)
    assert images_unsupported_reason(path, found) == reason and not media_kinds(path, found)
    assert encoded(path, "An <image>?")[0].endswith("An <image>?<|im_end|>\n<|im_start|>assistant\n")
    with pytest.raises(EngineFailed, match="the model accepts no images"):
        ImagePreprocessor(path)


def test_tower_with_another_activation_is_refused_by_name(tmp_path: Path):
    vision = {**AYA_VISION.config["vision_config"], "hidden_act": "gelu"}
    path = write_files(tmp_path, replace(AYA_VISION, config={**AYA_VISION.config, "vision_config": vision}))
    assert images_unsupported_reason(path, read_config(path)) == (
        "config.json has vision_config.hidden_act: 'gelu'; supported is 'gelu_pytorch_tanh'"
    )


@pytest.mark.parametrize(
    ("settings", "config", "message"),
    [
        ({"size": {"height": 40, "width": 40}}, {}, "images of 40 pixels per side; the vision tower takes 32"),
        ({"size": {"height": 32, "width": 40}}, {}, "images of 40 x 32 pixels; supported are squares"),
        ({"max_patches": 65}, {}, "max_patches is 65; it must be at most 64"),
        ({}, {"downsample_factor": 3}, "downsample_factor is 3; it must divide the 4 patches of a tile's side"),
        ({}, {"downsample_factor": 0}, "downsample_factor is 0; it must divide"),
    ],
)
def test_sizes_that_the_model_does_not_take_are_refused(
    settings: Mapping[str, Any], config: Mapping[str, Any], message: str, tmp_path: Path
):
    family = replace(AYA_VISION, processor={**PROCESSOR, **settings}, config={**AYA_VISION.config, **config})
    with pytest.raises(EngineFailed, match=message):
        ImagePreprocessor(write_files(tmp_path, family))


def test_settings_that_stand_in_processor_config_alone_are_read(tmp_path: Path):
    config = {**AYA_VISION.processor_config, "image_processor": PROCESSOR}
    path = write_files(tmp_path, replace(AYA_VISION, processor_config=config))
    (path / "preprocessor_config.json").unlink()
    assert json.loads((path / "processor_config.json").read_text())["image_processor"] == PROCESSOR
    assert encoded(path, None)[1] == 12
