"""LFM2-VL's tiles, thumbnails and placeholders are those of the library's processor, for images of any shape."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx_vlm.models.lfm2_vl.processing_lfm2_vl import Lfm2VlNumpyImageProcessor

from engine.errors import EngineFailed
from engine.processing.checkpoint import images_unsupported_reason, read_config
from engine.processing.images import ImagePreprocessor, normalize
from engine.processing.thumbnail_grid import ThumbnailGrid
from engine.processing.tokenizer import ChatTokenizer
from tests.support.lfm2_family import LFM2_VL, UNDIVIDED, library_images, library_placed
from tests.support.sighted_family import SightedFamily
from tests.support.vision_zoo import image, write_files

PUBLISHED = ThumbnailGrid(
    patch_size=16,
    merge_size=2,
    resample=3,
    min_whole=64,
    max_whole=256,
    tolerance=2.0,
    side=512,
    min_tiles=2,
    max_tiles=10,
    has_thumbnail=True,
)
SIDES = (1, 13, 32, 160, 384, 512, 767, 768, 1000, 1024, 1537, 2304, 4001)
SIZES = [(width, height) for width in SIDES for height in SIDES if max(width, height) <= 200 * min(width, height)]


class Blank:
    """An image of which only the sizes are computed."""

    def __init__(self, width: int, height: int):
        self.size = width, height

    def resize(self, size: tuple[int, int], resample: Any) -> "Blank":
        return Blank(*size)

    def crop(self, box: tuple[int, int, int, int]) -> "Blank":
        left, top, right, bottom = box
        return Blank(right - left, bottom - top)


@pytest.mark.parametrize(("max_tiles", "splits", "thumbnail"), [(10, True, True), (4, True, False), (10, False, True)])
def test_images_of_any_shape_have_the_tiles_of_the_library(max_tiles: int, splits: bool, thumbnail: bool):
    grid = replace(PUBLISHED, max_tiles=max_tiles if splits else 0, has_thumbnail=thumbnail)
    library = Lfm2VlNumpyImageProcessor()
    for width, height in SIZES:
        one: Any = Blank(width, height)
        views, rows, columns, _ = library._views_for_image(one, splits, 2, max_tiles, thumbnail)
        layout = grid.layout(width, height)
        shapes = [layout.grid_thw[1:]] * layout.grid_thw[0] + [layout.thumbnail] * any(layout.thumbnail)
        assert shapes == [(view.size[1] // 16, view.size[0] // 16) for view in views], (width, height)
        assert layout.tiles == ((rows, columns) if rows * columns > 1 else (0, 0))
        assert grid.num_tokens(layout) <= grid.max_tokens


@pytest.mark.parametrize("size", [(1, 20000), (20000, 1), (6368, 32)])
@pytest.mark.parametrize("most", [4, 64, 300])
def test_very_narrow_images_are_within_the_limit(most: int, size: tuple[int, int]):
    grid = PUBLISHED.limited(most)
    assert grid.max_tokens <= most
    for one in (grid, grid.for_detail(True), replace(PUBLISHED, min_whole=200), PUBLISHED.for_detail(True)):
        assert one.num_tokens(one.layout(*size)) <= one.max_tokens
    close = replace(PUBLISHED, min_whole=most, max_whole=most, max_tiles=0)
    assert close.num_tokens(close.layout(*size)) <= most


def test_pixels_of_the_published_settings_are_those_of_the_library(tmp_path: Path):
    settings = {"image_processor_type": "Lfm2VlImageProcessor", "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    vision = {**LFM2_VL.config["vision_config"], "patch_size": 16}
    config = {**LFM2_VL.config, "vision_config": vision, "tile_size": 512, "max_image_tokens": 256}
    unmarked = {"use_image_special_tokens": False}
    family = replace(LFM2_VL, config=config, processor=settings, processor_config=unmarked)
    preprocessor = ImagePreprocessor(write_files(tmp_path, family))
    assert preprocessor.grid == PUBLISHED
    for size in ((320, 240), (1600, 700)):
        one = image(*size)
        ours = normalize(preprocessor.patches(one).patches, preprocessor.normalization).reshape(-1, 3, 16, 16)
        library = library_images({}, [one])
        kept = library["pixel_values"][library["pixel_attention_mask"] > 0]
        assert np.abs(ours - kept.reshape(-1, 16, 16, 3).transpose(0, 3, 1, 2)).max() < 1e-5


@pytest.mark.parametrize("has_marks", [True, False])
@pytest.mark.parametrize("has_thumbnail", [True, False])
@pytest.mark.parametrize("family", [LFM2_VL, UNDIVIDED])
def test_placeholder_has_the_tokens_of_the_processor(
    family: SightedFamily, has_thumbnail: bool, has_marks: bool, tmp_path: Path
):
    changed = replace(
        family,
        processor={**family.processor, "use_thumbnail": has_thumbnail},
        processor_config={"use_image_special_tokens": has_marks},
    )
    model_dir = write_files(tmp_path, changed)
    made = ImagePreprocessor(model_dir).patches(image(90, 50))
    placeholder = ChatTokenizer(model_dir).placeholder(made)
    parts, text = placeholder.text.split("<image>"), ""
    for part, length in zip(parts, (*placeholder.runs, 0), strict=True):
        text += part + "<image>" * length
    assert text == library_placed(made, has_marks)
    assert text.count("<image>") == made.num_tokens == len(made.patches) // 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder_patch_size": 16}, "encoder_patch_size is 16; config.json has 8"),
        ({"downsample_factor": 4}, "downsample_factor is 4; config.json has 2"),
        ({"tile_size": 64}, "tile_size is 64; config.json has 32"),
        ({"max_image_tokens": 8}, "max_image_tokens is 8; config.json has 4"),
        ({"min_tiles": 1}, "min_tiles is 1; it must be between 2 and max_tiles, 3"),
        ({"downsample_factor": 0}, "downsample_factor is 0; it must be at least 1"),
        ({"min_image_tokens": 0}, "min_image_tokens is 0; it must be at least 1"),
        ({"min_image_tokens": 5}, "min_image_tokens is 5; it must be at most max_image_tokens, 4"),
        ({"max_pixels_tolerance": 0}, r"max_pixels_tolerance is 0\.0; it must be above 0"),
        ({"max_tiles": 65}, "max_tiles is 65; it must be at most 64"),
        ({"min_tiles": 4}, "min_tiles is 4; it must be between 2 and max_tiles, 3"),
    ],
)
def test_settings_that_the_model_does_not_take_are_refused(changes: dict[str, Any], message: str, tmp_path: Path):
    unmarked = {"use_image_special_tokens": False}
    family = replace(LFM2_VL, processor={**LFM2_VL.processor, **changes}, processor_config=unmarked)
    with pytest.raises(EngineFailed, match=message):
        ImagePreprocessor(write_files(tmp_path, family))


@pytest.mark.parametrize(("key", "default"), [("tile_size", 512), ("max_image_tokens", 256)])
def test_settings_that_config_lacks_are_those_of_the_library(key: str, default: int, tmp_path: Path):
    config = {name: value for name, value in LFM2_VL.config.items() if name != key}
    with pytest.raises(EngineFailed, match=rf"{key} is \d+; config.json lacks it, which means {default}"):
        ImagePreprocessor(write_files(tmp_path, replace(LFM2_VL, config=config)))


@pytest.mark.parametrize("mark", ["<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", "<|img_row_1_col_3|>"])
def test_tokenizer_without_a_token_around_tiles_is_refused_by_its_name(mark: str, tmp_path: Path):
    names = {name: "<other>" if one == mark else one for name, one in LFM2_VL.names.items()}

    def reason(**settings: bool) -> str | None:
        family = replace(LFM2_VL, names=names, processor={**LFM2_VL.processor, **settings})
        return images_unsupported_reason(tmp_path, read_config(write_files(tmp_path, family)))

    assert reason() == f"the tokenizer has no token {mark}"
    assert (reason(do_image_splitting=False) is None) == mark.startswith("<|img_")
    write_files(tmp_path, replace(LFM2_VL, names=names, processor_config={"use_image_special_tokens": False}))
    assert images_unsupported_reason(tmp_path, read_config(tmp_path)) is None


def test_towers_that_the_library_computes_otherwise_are_refused_by_name(tmp_path: Path):
    config = read_config(write_files(tmp_path, LFM2_VL))
    assert images_unsupported_reason(tmp_path, config) is None
    write_files(tmp_path, replace(LFM2_VL, processor={**LFM2_VL.processor, "max_tiles": "all"}))
    assert images_unsupported_reason(tmp_path, config) == (
        "the settings of the image processor cannot be read (invalid literal for int() with base 10: 'all')"
    )
    vision = {**config["vision_config"], "hidden_act": "gelu"}
    assert images_unsupported_reason(tmp_path, {**config, "vision_config": vision}) == (
        "config.json has vision_config.hidden_act: 'gelu'; supported is 'gelu_pytorch_tanh'"
    )
    for key, value, supported in (("projector_hidden_act", "silu", "gelu"), ("vision_feature_layer", -2, -1)):
        reason = images_unsupported_reason(tmp_path, {**config, key: value})
        assert reason == f"config.json has {key}: {value!r}; supported is {supported!r}"
