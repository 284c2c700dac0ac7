"""The square and the tiles of DeepSeek-OCR, and the checkpoints whose settings this grid does not follow."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx_vlm.models.deepseekocr.processing_deepseekocr import find_closest_aspect_ratio
from PIL import Image

from engine.processing.checkpoint import images_unsupported_reason, media_kinds, read_config
from engine.processing.images import ImagePreprocessor
from engine.processing.message import text_part
from engine.processing.tokenizer import ChatTokenizer
from engine.processing.view_grid import ViewGrid
from tests.support.sighted_family import IDS
from tests.support.view_families import DEEPSEEK_OCR, DEEPSEEK_OCR_2, VIEWS, VIEWS_2
from tests.support.vision_zoo import image, write_files


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> ViewGrid:
    found = ImagePreprocessor(write_files(tmp_path_factory.mktemp("files"), DEEPSEEK_OCR)).grid
    assert isinstance(found, ViewGrid)
    return found


def test_tiles_are_those_of_the_library_for_images_of_any_shape(grid: ViewGrid):
    pairs = {(width, height) for width in range(1, 10) for height in range(1, 10) if 2 <= width * height <= 9}
    ratios = sorted(pairs, key=lambda pair: pair[0] * pair[1])
    sides = (5, 213, 639, 640, 641, 800, 960, 1000, 1280, 1281, 1600, 1919, 1920, 2560, 3000, 4001, 5760)
    for width, height in ((width, height) for width in sides for height in sides):
        columns, rows = find_closest_aspect_ratio(width / height, ratios, width, height, 640)
        expected = (0, 0) if max(width, height) <= 640 else (rows, columns)
        assert grid.layout(width, height).tiles == expected, (width, height)


@pytest.mark.parametrize("size", [(640, 640), (641, 640), (2000, 700), (300, 1000), (1920, 1920), (5000, 200)])
def test_tokens_are_as_many_as_the_library_gives_an_image(grid: ViewGrid, size: tuple[int, int]):
    layout = grid.layout(*size)
    assert grid.num_tokens(layout) == VIEWS.num_tokens(Image.new("RGB", size)) <= grid.max_tokens
    assert 3 * layout.num_patches * grid.patch_size**2 <= grid.num_tokens(layout) * grid.token_bytes


@pytest.mark.parametrize("size", [(768, 768), (769, 768), (2000, 700), (300, 1000), (1920, 1920), (5000, 200)])
def test_second_model_has_no_tokens_for_ends_of_rows(size: tuple[int, int], tmp_path: Path):
    grid = ImagePreprocessor(write_files(tmp_path, DEEPSEEK_OCR_2)).grid
    layout = grid.layout(*size)
    expected = VIEWS_2.num_tokens(Image.new("RGB", size))
    assert grid.num_tokens(layout) == expected == 257 + layout.tiles[0] * layout.tiles[1] * 144 <= grid.max_tokens
    assert 3 * layout.num_patches * grid.patch_size**2 <= grid.num_tokens(layout) * grid.token_bytes


def test_largest_image_within_a_limit_has_as_many_tiles_as_fit(grid: ViewGrid):
    assert grid.max_tokens == 273 + 9 * 10 * 11
    assert [grid.limited(most).max_tiles for most in (1262, 493, 492, 273, 1)] == [8, 2, 1, 1, 1]
    assert grid.limited(492).layout(2000, 2000) == grid.layout(8, 8)


@pytest.mark.parametrize("size", [(1, 20000), (20000, 1), (6368, 32)])
@pytest.mark.parametrize("most", [4, 64, 300])
def test_very_narrow_images_are_within_the_limit(most: int, size: tuple[int, int], grid: ViewGrid):
    limited = grid.limited(most)
    for one in (limited, limited.for_detail(True), grid.for_detail(True)):
        assert one.num_tokens(one.layout(*size)) <= one.max_tokens
    assert limited.max_tokens <= max(most, grid.limited(1).max_tokens)


def test_images_of_one_colour_with_other_tiles_are_not_taken_for_each_other(grid: ViewGrid):
    """In the colour of the padding, the squares are the same, and so are the tiles."""
    wide, tall = (grid.cut(Image.new("RGB", size, grid.padding)) for size in ((1280, 640), (640, 1280)))
    assert np.array_equal(wide.patches, tall.patches)
    assert wide.content_hash != tall.content_hash


@pytest.mark.parametrize("processor_class", ["DeepseekVLV2Processor", "DeepseekOCRProcessor"])
def test_settings_of_published_checkpoints_are_found_in_processor_config(processor_class: str, tmp_path: Path):
    settings = {**DEEPSEEK_OCR.processor, "processor_class": processor_class, "sft_format": "deepseek"}
    model_dir = write_files(tmp_path, replace(DEEPSEEK_OCR, processor={}, processor_config=settings))
    (model_dir / "preprocessor_config.json").unlink()
    config = {key: value for key, value in read_config(model_dir).items() if key != "image_token_id"}
    (model_dir / "config.json").write_text(json.dumps(config))
    assert media_kinds(model_dir, read_config(model_dir)) == {"image"}
    preprocessor = ImagePreprocessor(model_dir)
    assert preprocessor.normalization.mean == (0.5, 0.4, 0.5)
    assert ChatTokenizer(model_dir).image_token_id == IDS["<image>"]


def test_template_without_parts_gets_an_image_as_a_line_of_the_text(tmp_path: Path):
    model_dir = write_files(tmp_path, replace(DEEPSEEK_OCR, template=None))
    tokenizer, made = ChatTokenizer(model_dir), ImagePreprocessor(model_dir).patches(image(64, 40))
    messages = [{"role": "user", "content": [{"type": "image"}, text_part("Free OCR.")]}]
    ids = tokenizer.encode_chat(messages, template_kwargs={}, placeholders=[tokenizer.placeholder(made)])
    expected = f"<|im_start|>user\n{'<image>' * 273}\nFree OCR.<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids.tolist()) == expected


PUBLISHED_VISION: dict[str, Any] = {
    "image_size": 1024,
    "mlp_ratio": 3.7362,
    "model_name": "deeplip_b_l",
    "width": {
        "clip-l-14-224": {"heads": 16, "image_size": 224, "layers": 24, "patch_size": 14, "width": 1024},
        "sam_vit_b": {
            "downsample_channels": [512, 1024],
            "global_attn_indexes": [2, 5, 8, 11],
            "heads": 12,
            "layers": 12,
            "width": 768,
        },
    },
}


def test_towers_and_settings_for_which_the_library_is_not_written_are_refused_by_name(tmp_path: Path):
    model_dir = write_files(tmp_path, DEEPSEEK_OCR)
    config = {**read_config(model_dir), "vision_config": PUBLISHED_VISION, "tile_tag": "2D", "global_view_pos": "head"}
    assert images_unsupported_reason(model_dir, config) is None

    def reason(settings: dict[str, Any], **changes: Any) -> str | None:
        (model_dir / "preprocessor_config.json").write_text(json.dumps({**DEEPSEEK_OCR.processor, **settings}))
        return images_unsupported_reason(model_dir, {**config, **changes})

    published = PUBLISHED_VISION["width"]["sam_vit_b"]
    sam = {**published, "layers": 24}
    width = {**PUBLISHED_VISION["width"], "sam_vit_b": sam}
    assert reason({}, vision_config={**PUBLISHED_VISION, "width": width}) == (
        f"config.json has vision_config.width.sam_vit_b: {sam!r}; supported is {published!r}"
    )
    assert reason({}, projector_config={"projector_type": "downsample_mlp_gelu"}) == (
        "config.json has projector_config.projector_type: 'downsample_mlp_gelu'; supported is 'linear'"
    )
    assert reason({}, global_view_pos="tail") == "config.json has global_view_pos: 'tail'; supported is 'head'"
    assert reason({"normalize": None}) is None
    assert reason({"normalize": False}) == "the image processor has normalize: False; supported is True"
    assert reason({"patch_size": 14}) == "the image processor has patch_size: 14; supported is 16"
    assert reason({"candidate_resolutions": [[1280, 1280]]}) == (
        "the image processor has candidate_resolutions: [[1280, 1280]]; supported is [[1024, 1024]]"
    )


def test_towers_of_the_second_model_are_checked_as_well(tmp_path: Path):
    model_dir = write_files(tmp_path, DEEPSEEK_OCR_2)
    width = {"qwen2-0-5b": {"dim": 896}, "sam_vit_b": PUBLISHED_VISION["width"]["sam_vit_b"]}
    vision = {"image_size": 1024, "mlp_ratio": 3.7362, "model_name": "deepencoderv2", "width": width}
    config = {**read_config(model_dir), "vision_config": vision}
    assert images_unsupported_reason(model_dir, config) is None
    changed = {**config, "vision_config": {**vision, "width": {**width, "qwen2-0-5b": {"dim": 1024}}}}
    assert images_unsupported_reason(model_dir, changed) == (
        "config.json has vision_config.width.qwen2-0-5b: {'dim': 1024}; supported is {'dim': 896}"
    )
    settings = {**DEEPSEEK_OCR_2.processor, "min_patches": 1}
    (model_dir / "preprocessor_config.json").write_text(json.dumps(settings))
    assert images_unsupported_reason(model_dir, config) == "the image processor has min_patches: 1; supported is 2"
