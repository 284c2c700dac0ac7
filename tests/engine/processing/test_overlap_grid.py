"""Molmo2's crops, squares of patches and placeholders are those of the library's processor, for images of any shape."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx_vlm.models.molmo2.processing import select_tiling

from engine.errors import EngineFailed
from engine.processing.checkpoint import images_unsupported_reason, num_embeddings, read_config
from engine.processing.images import ImagePreprocessor, normalize
from engine.processing.overlap_grid import OverlapGrid
from engine.processing.pooled_patches import pooled_patches
from engine.processing.tokenizer import ChatTokenizer
from tests.support.molmo2_family import MOLMO2, library_pixels, library_placed
from tests.support.vision_zoo import image, write_files

PUBLISHED = OverlapGrid(patch_size=14, merge_size=2, resample=2, side=378, margin=4, max_crops=8)
SIDES = (1, 13, 112, 113, 266, 378, 379, 600, 767, 1000, 1537, 2304, 4001)
SIZES = [(width, height) for width in SIDES for height in SIDES if max(width, height) <= 200 * min(width, height)]


@pytest.mark.parametrize("max_crops", [1, 8, 24])
def test_images_of_any_shape_have_the_crops_of_the_library(max_crops: int):
    grid = replace(PUBLISHED, max_crops=max_crops)
    for width, height in SIZES:
        layout = grid.layout(width, height)
        assert layout.tiles == tuple(select_tiling(height - 112, width - 112, 266, max_crops)), (width, height)
        assert grid.num_tokens(layout) <= grid.max_tokens
        assert 3 * layout.num_patches * 14**2 <= grid.max_tokens * grid.token_bytes


@pytest.mark.parametrize("size", [(1, 20000), (20000, 1), (6368, 32)])
@pytest.mark.parametrize("most", [4, 64, 300])
def test_very_narrow_images_are_within_the_limit(most: int, size: tuple[int, int]):
    grid, smallest = PUBLISHED.limited(most), PUBLISHED.limited(1).max_tokens
    for one in (grid, grid.for_detail(True), PUBLISHED.for_detail(True)):
        assert one.num_tokens(one.layout(*size)) <= one.max_tokens
    assert grid.max_tokens <= max(most, smallest)


@pytest.mark.parametrize("margin", [1, 2, 3])
def test_patches_of_each_token_are_those_of_the_library(margin: int):
    """With patches of a few pixels, and both even and odd sides of the crops."""
    for crop_side in (8, 9):
        grid = OverlapGrid(patch_size=2, merge_size=2, resample=2, side=2 * crop_side, margin=margin, max_crops=6)
        settings: dict[str, Any] = {"patch_size": 2, "max_crops": 6, "overlap_margins": [margin, margin]}
        settings["size"] = {"height": grid.side, "width": grid.side}
        for size in ((16, 16), (40, 20), (17, 60), (80, 30), (5, 9), (200, 190)):
            library, layout = library_pixels(settings, [image(*size)]), grid.layout(*size)
            ours = pooled_patches(crop_side, layout.tiles, layout.unpadded)
            np.testing.assert_array_equal(ours, library["image_token_pooling"])
            assert (len(ours), layout.grid_thw[0]) == (grid.num_tokens(layout), library["image_num_crops"][0])


def test_pixels_of_the_published_settings_are_those_of_the_library(tmp_path: Path):
    vit = {**MOLMO2.config["vit_config"], "image_patch_size": 14, "image_default_input_size": [378, 378]}
    settings = {"image_processor_type": "Molmo2ImageProcessor", "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    family = replace(MOLMO2, config={**MOLMO2.config, "vit_config": vit}, processor=settings)
    preprocessor = ImagePreprocessor(write_files(tmp_path, family))
    assert preprocessor.grid == PUBLISHED
    for size in ((640, 480), (300, 900)):
        one = image(*size)
        ours = normalize(preprocessor.patches(one).patches, preprocessor.normalization).reshape(-1, 3, 14, 14)
        library = library_pixels({}, [one])["pixel_values"].reshape(-1, 14, 14, 3).transpose(0, 3, 1, 2)
        assert np.abs(ours - library).max() < 1e-5


@pytest.mark.parametrize("ends_rows", [True, False])
@pytest.mark.parametrize("ends_whole", [True, False, None])
@pytest.mark.parametrize("has_start", [True, False])
def test_placeholder_has_the_tokens_that_processor_config_asks_for(
    ends_rows: bool, ends_whole: bool | None, has_start: bool, tmp_path: Path
):
    columns = {
        "image_use_col_tokens": ends_rows,
        "use_single_crop_col_tokens": ends_whole,
        "use_single_crop_start_token": has_start,
    }
    model_dir = write_files(tmp_path, replace(MOLMO2, processor_config=columns))
    made = ImagePreprocessor(model_dir).patches(image(90, 50))
    placeholder = ChatTokenizer(model_dir).placeholder(made)
    parts, text = placeholder.text.split("<im_patch>"), ""
    for part, length in zip(parts, (*placeholder.runs, 0), strict=True):
        text += part + "<im_patch>" * length
    height, width = (-(-length // 2) for length in made.unpadded)
    assert text == library_placed((3, 3, height, width), columns)


@pytest.mark.parametrize("mark", ["<im_start>", "<im_end>", "<im_col>", "<low_res_im_start>"])
def test_tokenizer_without_a_token_around_crops_is_refused_by_its_name(mark: str, tmp_path: Path):
    names = {name: "<other>" if one == mark else one for name, one in MOLMO2.names.items()}

    def reason(**columns: bool) -> str | None:
        family = replace(MOLMO2, names=names, processor_config=columns)
        return images_unsupported_reason(tmp_path, read_config(write_files(tmp_path, family)))

    assert reason() == f"the tokenizer has no token {mark}"
    assert (reason(image_use_col_tokens=False) is None) == (mark == "<im_col>")
    assert (reason(use_single_crop_start_token=False) is None) == (mark == "<low_res_im_start>")


def test_config_of_the_published_repositories_and_of_converted_ones_is_read(tmp_path: Path):
    config = read_config(write_files(tmp_path, MOLMO2))
    tower = {key: config[key] for key in ("vit_config", "adapter_config")}
    assert (config["image_token_id"], config["vision_config"]) == (config["image_patch_id"], tower)
    assert num_embeddings(config) == config["text_config"]["vocab_size"] + 8
    for wrong in (None, "8", -1):
        text = {**config["text_config"], "additional_vocab_size": wrong}
        with pytest.raises(
            EngineFailed, match=rf"additional_vocab_size is {wrong!r}; it must be an integer of at least 0"
        ):
            num_embeddings({**config, "text_config": text})
    (tmp_path / "config.json").write_text(json.dumps({**MOLMO2.config, "image_token_id": 1, "vision_config": tower}))
    assert read_config(tmp_path) == {**config, "vision_config": tower}


def test_towers_that_the_library_computes_otherwise_are_refused_by_name(tmp_path: Path):
    def reason(part: str, **changes: Any) -> str | None:
        config = {**MOLMO2.config, part: {**MOLMO2.config[part], **changes}}
        return images_unsupported_reason(tmp_path, read_config(write_files(tmp_path, replace(MOLMO2, config=config))))

    assert reason("vit_config") is None
    assert reason("vit_config", hidden_act="gelu") == (
        "config.json has vision_config.vit_config.hidden_act: 'gelu'; supported is 'gelu_pytorch_tanh'"
    )
    assert reason("adapter_config", hidden_act="gelu") == (
        "config.json has vision_config.adapter_config.hidden_act: 'gelu'; supported is 'silu'"
    )
    assert reason("adapter_config", pooling_attention_mask=None) == (
        "config.json has no vision_config.adapter_config.pooling_attention_mask"
    )
    config = {key: value for key, value in MOLMO2.config.items() if key != "image_patch_id"}
    write_files(tmp_path, replace(MOLMO2, config=config))
    assert images_unsupported_reason(tmp_path, read_config(tmp_path)) == "config.json has no image_patch_id"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": {"height": 80, "width": 80}}, "makes images of 80 pixels per side; the vision tower takes 40"),
        ({"size": {"height": 40, "width": 48}}, r"second overlap margin are \(48, 8, \[1\]\); .* \(40, 8, \[1\]\)"),
        ({"patch_size": 14}, r"second overlap margin are \(40, 14, \[1\]\); supported are \(40, 8, \[1\]\)"),
        ({"overlap_margins": [1, 2]}, r"second overlap margin are \(40, 8, \[2\]\); supported are \(40, 8, \[1\]\)"),
        ({"overlap_margins": [0, 0]}, "overlap_margins are 0 patches; supported are 1 to 2"),
        ({"overlap_margins": [3, 3]}, "overlap_margins are 3 patches; supported are 1 to 2"),
        ({"pooling_size": [3, 3]}, r"pooling_size is \[3, 3\]; supported is \[2, 2\]"),
        ({"max_crops": 0}, "max_crops is 0; it must be at least 1"),
        ({"max_crops": 65}, "max_crops is 65; it must be at most 64"),
    ],
)
def test_settings_that_the_tower_does_not_take_are_refused(changes: dict[str, Any], message: str, tmp_path: Path):
    with pytest.raises(EngineFailed, match=message):
        ImagePreprocessor(write_files(tmp_path, replace(MOLMO2, processor={**MOLMO2.processor, **changes})))


def test_tower_whose_images_are_not_square_is_refused(tmp_path: Path):
    vit = {**MOLMO2.config["vit_config"], "image_default_input_size": [40, 48]}
    with pytest.raises(EngineFailed, match=r"image_default_input_size is \[40, 48\]; supported are two equal numbers"):
        ImagePreprocessor(write_files(tmp_path, replace(MOLMO2, config={**MOLMO2.config, "vit_config": vit})))
