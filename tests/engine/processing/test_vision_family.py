"""Families of vision models: patches are those of the library's image processor, placeholders those of its prompts."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mlx_vlm.models.llava_next.processing_llava_next import LlavaNextProcessor
from mlx_vlm.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from PIL import Image

from engine.errors import EngineFailed
from engine.media_config import MediaConfig
from engine.processing.checkpoint import images_unsupported_reason, media_kinds, read_config, vocab_size
from engine.processing.images import ImagePreprocessor, normalize
from engine.processing.media import MediaLoader
from engine.processing.message import ImageSource, text_part
from engine.processing.tokenizer import ChatTokenizer
from engine.processing.vision_families import vision_family
from engine.protocol import ImagePatches
from tests.support.image_files import data_url, encoded
from tests.support.night import some_at_night
from tests.support.sighted_family import IDS, PATCH, SightedFamily
from tests.support.vision_families import SIGHTED
from tests.support.vision_zoo import image, write_files

SIZES = [(64, 40), (33, 64), (32, 32), (8, 8), (500, 90), (90, 501), (100, 40), (700, 900)]


PADDED = [("llava_onevision", 384, 1), ("llava_onevision", 384, 9), ("llava_next", 336, None)]


@pytest.fixture(scope="module", params=SIGHTED)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def family(name: str) -> SightedFamily:
    return SIGHTED[name]


@pytest.fixture(scope="module")
def model_dir(family: SightedFamily, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("files"), family)


def test_normalised_patches_are_those_of_the_library(family: SightedFamily, model_dir: Path):
    preprocessor = ImagePreprocessor(model_dir)
    for size in SIZES:
        one = image(*size, seed=size[0])
        library, made = family.pixels([one]), preprocessor.patches(one)
        expected = library["pixel_values"]
        ours = family.rounded(normalize(made.patches, preprocessor.normalization))
        if expected.ndim == 3:  # Molmo2's, Gemma 4's and LFM2-VL's, whose colours are last; the latter two have padding
            places = library.get("image_position_ids", np.zeros((*expected.shape[:2], 2)))
            is_patch = library.get("pixel_attention_mask", places[..., 0] >= 0) > 0
            expected = expected[is_patch]
            expected = expected.reshape(-1, PATCH, PATCH, 3).transpose(0, 3, 1, 2).reshape(len(ours), -1)
        elif expected.shape[-1] == PATCH:
            expected = expected.reshape(len(ours), -1)
        elif expected.ndim > 2:
            ours, expected = _frames(ours, made), expected.reshape(-1, *expected.shape[-3:])
            expected = expected[..., : ours.shape[-2], : ours.shape[-1]]
        assert ours.shape == expected.shape
        assert np.abs(ours - expected).max() < 1e-5, size


OF_EACH_GRID = {
    *("gemma3", "gemma3 with pan-and-scan", "gemma4", "pixtral", "llava_next", "molmo", "molmo2", "kimi_vl", "lfm2_vl"),
    *("phi3_v", "phi4-siglip", "idefics3", "internvl", "qwen2_5_vl", "deepseekocr", "deepseek_vl_v2", "paddleocr_vl"),
    *("llama4", "kimi_k25"),
}
"""A family of each class of grids: a process that decodes gets the grid, and knows nothing else of a family."""


def test_the_gate_has_each_grid(tmp_path: Path):
    kinds = {name: type(ImagePreprocessor(write_files(tmp_path / name, SIGHTED[name])).grid) for name in SIGHTED}
    assert {kinds[name] for name in OF_EACH_GRID} == set(kinds.values())


@pytest.mark.parametrize(
    "name", some_at_night(SIGHTED, OF_EACH_GRID, "the gate has each class of grids"), indirect=True, scope="module"
)
def test_images_from_the_workers_are_those_of_the_preprocessor_and_within_their_limits(model_dir: Path):
    preprocessor = ImagePreprocessor(model_dir)
    pictures = [image(*size, seed=size[0]) for size in SIZES]

    async def load(**limits: int) -> list[ImagePatches]:
        loader = MediaLoader(MediaConfig.model_validate(limits), preprocessor.grid)
        try:
            sources = [ImageSource("messages", data_url(encoded(one))) for one in pictures]
            async with loader.load(sources) as images:
                assert all(one.num_tokens <= loader.grid.max_tokens for one in images)
                return list(images)
        finally:
            loader.workers.close()

    for ours, one in zip(asyncio.run(load()), pictures, strict=True):
        expected = preprocessor.patches(one)
        assert np.array_equal(ours.patches, expected.patches)
        facts = ("grid_thw", "tiles", "unpadded", "thumbnail", "inner", "num_tokens", "content_hash")
        assert [getattr(ours, name) for name in facts] == [getattr(expected, name) for name in facts]


def test_copy_that_is_decoded_at_half_its_size_is_cut_into_the_same_tiles(model_dir: Path):
    """As large JPEGs are, see ImageFile.rgb."""
    grid = ImagePreprocessor(model_dir).grid
    for size in ((1401, 363), (301, 905)):
        one = image(*size)
        whole, half = grid.cut(one), grid.cut(one.reduce(2), size)
        assert (half.layout, half.patches.shape) == (whole.layout, whole.patches.shape)
        assert np.abs(half.patches.astype(int) - whole.patches).mean() < 3


def test_prompt_has_the_tokens_that_the_library_gives_an_image(family: SightedFamily, model_dir: Path):
    preprocessor, tokenizer = ImagePreprocessor(model_dir), ChatTokenizer(model_dir)
    for size in SIZES:
        made = preprocessor.patches(image(*size))
        content = [{"type": "text", "text": "Is <image> this"}, {"type": "image"}, {"type": "text", "text": "?"}]
        messages = [{"role": "user", "content": content}]
        placeholders = [tokenizer.placeholder(made)]
        ids = tokenizer.encode_chat(messages, template_kwargs={}, placeholders=placeholders)
        before, inside = ("", family.placed(made))
        if family.images_first is not None:
            before, inside = f"{inside}{family.images_first}", ""
        expected = f"{before}<|im_start|>user\nIs <image> this{inside}?<|im_end|>\n<|im_start|>assistant\n"
        assert tokenizer.decode(ids.tolist()) == expected
        assert int((ids == tokenizer.image_token_id).sum()) == made.num_tokens


def test_another_image_processor_or_none_or_a_broken_file_is_refused_by_name(family: SightedFamily, tmp_path: Path):
    model_dir = write_files(tmp_path, family)
    config = read_config(model_dir)
    assert "image" in media_kinds(model_dir, config)
    path = model_dir / "preprocessor_config.json"
    path.write_text(json.dumps({"image_processor_type": "OtherProcessor"}))
    assert media_kinds(model_dir, config) == frozenset()
    reason = images_unsupported_reason(model_dir, config)
    assert reason is not None and "the image processor is OtherProcessor; supported are" in reason
    path.unlink()
    reason = images_unsupported_reason(model_dir, config)
    found = vision_family(config)
    assert found is not None
    if found.needs_processor:
        assert reason is not None and "the image processor is None; supported are" in reason
    else:
        assert reason is None
    path.write_text("{")
    with pytest.raises(EngineFailed, match="cannot be read as JSON"):
        images_unsupported_reason(model_dir, config)


def test_family_without_support_is_refused_by_name(tmp_path: Path):
    config = {"model_type": "mllama", "vision_config": {}}
    assert images_unsupported_reason(tmp_path, config) == "images of the family mllama are not supported"
    assert images_unsupported_reason(tmp_path, {"model_type": "llama"}) == "it is a text model"


def test_limit_of_tokens_reduces_large_images_or_is_refused_at_the_start(model_dir: Path):
    grid = ImagePreprocessor(model_dir).grid
    smallest = grid.limited(1).max_tokens
    for most in (max(smallest, 4), 2 * smallest + 4, 3 * smallest + 5, grid.max_tokens):
        limited = grid.limited(most)
        tokens = [limited.num_tokens(limited.layout(*size)) for size in SIZES]
        assert max(tokens) <= limited.max_tokens <= max(most, smallest)
        low = limited.for_detail(True)
        assert max(low.num_tokens(low.layout(*size)) for size in SIZES) <= low.max_tokens
    assert grid.limited(grid.max_tokens) == grid
    if smallest > 4:
        with pytest.raises(EngineFailed, match=rf"max_image_tokens is 4; .* at least {smallest} tokens"):
            MediaLoader(MediaConfig(max_image_tokens=4), grid)


def test_features_that_the_engine_does_not_compute_are_refused_by_name(tmp_path: Path):
    def reason(name: str, settings: dict[str, Any], **config: Any) -> str | None:
        model_dir = write_files(tmp_path, replace(SIGHTED[name], processor={**SIGHTED[name].processor, **settings}))
        return images_unsupported_reason(model_dir, {**read_config(model_dir), **config})

    assert reason("llava", {"do_pad": True}) == "the image processor has do_pad: True, which is not supported"
    assert reason("molmo2", {"do_resize": False}) == "the image processor has do_resize: False; supported is True"
    assert reason("molmo2", {"do_resize": None}) is None
    assert reason("lfm2_vl", {"do_resize": False}) is None  # as published; the library resizes nevertheless
    assert reason("llava", {}, vision_config={"model_type": "vit"}) == (
        "the vision tower is vit; supported are clip_vision_model"
    )
    assert reason("internvl_chat", {}, use_thumbnail=False) == "config.json has use_thumbnail: False; supported is True"
    assert reason("internvl_chat", {}, ps_version=None) == "config.json has ps_version: None; supported is 'v2'"
    assert reason("llava_onevision", {}, vision_feature_select_strategy="default") == (
        "config.json has vision_feature_select_strategy: 'default'; supported is 'full'"
    )
    siglip = "llava with siglip_vision_model"
    for strategy in ("default", None):
        assert reason(siglip, {}, vision_feature_select_strategy=strategy) == (
            f"config.json has vision_feature_select_strategy: {strategy!r}; supported is 'full'"
        )
    assert reason("llava", {}, vision_feature_layer=[-2, -5]) == (
        "the features are those of several layers, [-2, -5]; one is supported"
    )
    assert reason("llava", {}, vision_feature_select_strategy="full") == (
        "config.json has vision_feature_select_strategy: 'full'; supported is 'default'"
    )
    assert reason("qwen3_5_moe", {}, vision_config={"deepstack_visual_indexes": [1]}) == (
        "the language model of qwen3_5_moe takes no deepstack features"
    )


def test_image_token_of_internvls_own_repositories_is_found_by_its_name(tmp_path: Path):
    family = SIGHTED["internvl_chat"]
    model_dir = write_files(tmp_path, family)
    assert (read_config(model_dir)["image_token_index"], vocab_size(read_config(model_dir))) == (IDS["<image>"], 512)
    (model_dir / "tokenizer.json").unlink()
    assert images_unsupported_reason(model_dir, read_config(model_dir)) == (
        "config.json has no image_token_index, and the tokenizer no token <IMG_CONTEXT>"
    )
    decoder = {"77": {"content": "<IMG_CONTEXT>"}}
    (model_dir / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    assert read_config(model_dir)["image_token_index"] == 77
    assert images_unsupported_reason(model_dir, read_config(model_dir)) is None


def test_template_without_parts_gets_images_at_their_place_in_the_text_which_clients_cannot_spell(tmp_path: Path):
    family = SIGHTED["internvl_chat"]
    model_dir = write_files(tmp_path, family)
    preprocessor, tokenizer = ImagePreprocessor(model_dir), ChatTokenizer(model_dir)
    first, second = (preprocessor.patches(image(*size)) for size in ((64, 40), (33, 64)))
    texts = [text_part("One <IMG_CONTEXT>"), text_part("more: "), text_part(" and again?")]
    content = [{"type": "image"}, *texts[:2], {"type": "image"}, texts[2]]
    placeholders = [tokenizer.placeholder(one) for one in (first, second)]
    ids = tokenizer.encode_chat([{"role": "user", "content": content}], template_kwargs={}, placeholders=placeholders)
    placed = family.placed(first), family.placed(second)
    expected = f"<|im_start|>user\n{placed[0]}One <IMG_CONTEXT>\nmore: {placed[1]} and again?<|im_end|>\n"
    assert tokenizer.decode(ids.tolist()) == f"{expected}<|im_start|>assistant\n"
    assert int((ids == tokenizer.image_token_id).sum()) == first.num_tokens + second.num_tokens


def test_limits_of_pan_and_scan_that_leave_no_crop_are_refused(tmp_path: Path):
    family = SIGHTED["gemma3 with pan-and-scan"]
    for key in ("pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops", "pan_and_scan_min_ratio_to_activate"):
        model_dir = write_files(tmp_path, replace(family, processor={**family.processor, key: 0}))
        with pytest.raises(EngineFailed, match=r"the limits of pan-and-scan are .*; each must be at least 1"):
            ImagePreprocessor(model_dir)


@pytest.mark.parametrize(("name", "side", "most"), PADDED)
def test_tokens_of_a_padded_image_are_those_of_the_processor_for_images_of_any_shape(
    name: str, side: int, most: int | None, tmp_path: Path
):
    """With the sizes of the published checkpoints, whose tiles have 27 or 24 features per side.

    most: See AnyresGrid.max_features.
    """
    family = SIGHTED[name]
    pinpoints = [[side * rows, side * columns] for rows in range(1, 7) for columns in range(1, 7)]
    config = {
        **family.config,
        "vision_config": {**family.config["vision_config"], "image_size": side, "patch_size": 14},
        "image_grid_pinpoints": pinpoints,
        "vision_aspect_ratio": f"anyres_max_{most}",
    }
    size = {"height": side, "width": side}
    sizes = {"size": size} if most else {"size": {"shortest_edge": side}, "crop_size": size}
    settings = {**family.processor, **sizes, "image_grid_pinpoints": pinpoints}
    grid = ImagePreprocessor(write_files(tmp_path, replace(family, config=config, processor=settings))).grid
    processor = LlavaOnevisionProcessor if most else LlavaNextProcessor
    library: Any = processor.__new__(processor)
    library.image_processor = SimpleNamespace(image_grid_pinpoints=pinpoints)
    library.num_image_tokens, library.vision_aspect_ratio = (side // 14) ** 2, f"anyres_max_{most}"
    library.patch_size, library.num_additional_image_tokens = 14, 0
    sides = (1, 13, 160, 383, 384, 385, 512, 767, 1000, 1537, 2304, 4001)
    for width, height in ((width, height) for width in sides for height in sides):
        if max(width, height) <= 200 * min(width, height):
            layout = grid.layout(width, height)
            num_tokens = grid.num_tokens(layout)
            assert num_tokens == library._get_number_of_features(height, width, side, side), (width, height)
            assert num_tokens <= grid.max_tokens
            assert 3 * layout.num_patches * 14**2 <= grid.max_tokens * grid.token_bytes


def test_black_images_with_other_padding_are_not_taken_for_each_other(tmp_path: Path):
    preprocessor = ImagePreprocessor(write_files(tmp_path, SIGHTED["llava_onevision"]))
    one, other = (preprocessor.patches(Image.new("RGB", size)) for size in ((60, 20), (60, 30)))
    assert np.array_equal(one.patches, other.patches)
    assert one.unpadded != other.unpadded and one.content_hash != other.content_hash


def test_processor_that_does_not_fit_the_vision_tower_is_refused(tmp_path: Path):
    family = SIGHTED["gemma3"]
    model_dir = write_files(
        tmp_path, replace(family, processor={**family.processor, "size": {"height": 64, "width": 64}})
    )
    with pytest.raises(EngineFailed, match="makes images of 64 pixels per side; the vision tower takes 32"):
        ImagePreprocessor(model_dir)


def test_tiles_that_the_model_does_not_know_are_refused(tmp_path: Path):
    family = SIGHTED["llava_onevision"]

    def make(*pinpoints: list[int], **config: Any) -> None:
        processor = {**family.processor, "image_grid_pinpoints": list(pinpoints)}
        named = {**family.config, "image_grid_pinpoints": list(pinpoints), **config}
        ImagePreprocessor(write_files(tmp_path, replace(family, processor=processor, config=named)))

    with pytest.raises(EngineFailed, match=r"its image_grid_pinpoints differ from those of config\.json"):
        make([32, 64], image_grid_pinpoints=[[64, 32]])
    with pytest.raises(EngineFailed, match=r"image_grid_pinpoints are \(\(32, 40\),\); each .* multiple of 32 pixels"):
        make([32, 40])
    with pytest.raises(EngineFailed, match="vision_aspect_ratio is 'pad'; supported is anyres_max_N"):
        make([32, 64], vision_aspect_ratio="pad")


def _frames(patches: np.ndarray, image: ImagePatches) -> np.ndarray:
    """Put patches [n, 3 * side * side] together to [tiles, 3, height, width]."""
    tiles, rows, columns = image.grid_thw
    side = image.patches.shape[-1]
    blocks = patches.reshape(tiles, rows, columns, 3, side, side).transpose(0, 3, 1, 4, 2, 5)
    return blocks.reshape(tiles, 3, rows * side, columns * side)
