"""Molmo's images: crops, pixels and tokens of the library's processor, before the text; and what is refused by name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx_vlm.models.molmo.processing_molmo import select_tiling

from engine.errors import EngineFailed
from engine.processing.checkpoint import images_unsupported_reason, num_embeddings, read_config
from engine.processing.images import ImagePreprocessor, normalize
from engine.processing.padded_overlap_grid import PaddedOverlapGrid
from engine.processing.tokenizer import ChatTokenizer
from tests.support.molmo_family import MOLMO, PROCESSOR, library_image, placed
from tests.support.sighted_family import IDS
from tests.support.vision_zoo import image, write_files

PUBLISHED = PaddedOverlapGrid(patch_size=14, merge_size=2, resample=2, side=336, margin=4, max_crops=12)
SIDES = (1, 13, 112, 113, 266, 336, 379, 767, 1000, 1537, 4001)
SIZES = [(width, height) for width in SIDES for height in SIDES if max(width, height) <= 200 * min(width, height)]


def test_images_of_any_shape_have_the_crops_of_the_library():
    for width, height in SIZES:
        layout = PUBLISHED.layout(width, height)
        with np.errstate(divide="ignore"):
            expected = select_tiling(height - 112, width - 112, 224, 12)
        assert layout.tiles == tuple(expected), (width, height)
        assert PUBLISHED.num_tokens(layout) <= PUBLISHED.max_tokens
        assert 3 * layout.num_patches * 14**2 <= PUBLISHED.max_tokens * PUBLISHED.token_bytes
        assert all(0 < inner <= 14 * most for inner, most in zip(layout.inner, layout.unpadded, strict=True))


@pytest.mark.parametrize("size", [(640, 480), (300, 900), (40, 30), (1200, 190)])
def test_pixels_and_tokens_of_the_published_settings_are_those_of_the_library(size: tuple[int, int], tmp_path: Path):
    """The configuration has no part for the tower, as published."""
    settings = {"image_processor_type": "MolmoImageProcessor"}
    config = {"model_type": "molmo", "vocab_size": 512}
    path = write_files(tmp_path, replace(MOLMO, processor=settings, config=config))
    preprocessor, one = ImagePreprocessor(path), image(*size)
    assert preprocessor.grid == PUBLISHED
    made = preprocessor.patches(one)
    crops, tokens, _, _ = library_image(settings, one)
    ours = normalize(made.patches, preprocessor.normalization).reshape(-1, 3, 14, 14)
    assert np.abs(ours - crops.reshape(-1, 14, 14, 3).transpose(0, 3, 1, 2)).max() < 1e-5
    placeholder = ChatTokenizer(path).placeholder(made)
    parts = placeholder.text.split("<im_patch>")
    text = "".join(part + "<im_patch>" * n for part, n in zip(parts, (*placeholder.runs, 0), strict=True))
    spelled = {IDS[token]: name for token, name in MOLMO.names.items()}
    assert text == "".join(spelled[token] for token in tokens.tolist())


def test_limit_of_tokens_keeps_the_padding():
    limited = PUBLISHED.limited(1000)
    assert isinstance(limited, PaddedOverlapGrid) and limited.max_tokens <= 1000 and limited.max_crops > 1
    assert any(limited.layout(640, 480).inner)


def test_images_that_differ_in_their_padding_alone_are_not_taken_for_each_other(tmp_path: Path):
    grid = ImagePreprocessor(write_files(tmp_path, MOLMO)).grid
    assert isinstance(grid, PaddedOverlapGrid)
    one, other = (grid.cut(image(*size).point(lambda value: 0)) for size in ((60, 20), (60, 30)))
    assert np.array_equal(one.patches, other.patches) and one.content_hash != other.content_hash


def encoded(model_dir: Path, messages: list[dict[str, Any]], sizes: list[tuple[int, int]]) -> tuple[str, list[str]]:
    """Return a prompt with images of these sizes, and the tokens of each."""
    preprocessor, tokenizer = ImagePreprocessor(model_dir), ChatTokenizer(model_dir)
    images = [preprocessor.patches(image(*size)) for size in sizes]
    placeholders = tokenizer.placeholders(images)
    ids = tokenizer.encode_chat(messages, template_kwargs={}, placeholders=placeholders)
    prompt = tokenizer.chat_prompt(messages, template_kwargs={}, placeholders=placeholders)
    assert np.array_equal(prompt.token_ids, ids)
    is_image = np.flatnonzero(ids == tokenizer.image_token_id)
    assert all(one.num_tokens <= is_image[0] or one.num_tokens > is_image[-1] for one in prompt.boundaries)
    assert any(one.kind == "turn" for one in prompt.boundaries)
    return tokenizer.decode(ids.tolist()), [placed(one) for one in images]


def test_images_of_all_turns_stand_before_the_text_behind_the_first_token(tmp_path: Path):
    path = write_files(tmp_path, MOLMO)
    settings = path / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "eos_token": "<pad>"}))
    text: Any = {"type": "text", "text": "Is <|image|> it?"}
    first = {"role": "user", "content": [text, {"type": "image"}, {"type": "text", "text": "!"}]}
    turns = [first, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": [{"type": "image"}, text]}]
    prompt, (one, other) = encoded(path, turns, [(64, 40), (90, 200)])
    user, answer, end = "<|im_start|>user\nIs <|image|> it?", "<|im_start|>assistant\n", "<|im_end|>\n"
    assert prompt == f"<pad>{one}{other} {user}!{end}{answer}Yes.{end}{user}{end}{answer}"


def test_text_alone_begins_as_behind_an_image(tmp_path: Path):
    tokenizer = ChatTokenizer(write_files(tmp_path, MOLMO))
    ids = tokenizer.encode_chat([{"role": "user", "content": "Hi"}], template_kwargs={})
    assert tokenizer.decode(ids.tolist()) == " <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("mark", ["<im_start>", "<im_end>", "<im_col>"])
def test_tokenizer_without_a_token_around_rows_is_refused_by_its_name(mark: str, tmp_path: Path):
    names = {name: "<other>" if one == mark else one for name, one in MOLMO.names.items()}
    path = write_files(tmp_path, replace(MOLMO, names=names))
    assert images_unsupported_reason(path, read_config(path)) == f"the tokenizer has no token {mark}"


def test_further_embeddings_are_counted_behind_the_table_of_the_vocabulary():
    assert num_embeddings({"model_type": "molmo", "vocab_size": 500}) == 628
    text = {"vocab_size": 500, "embedding_size": 512, "additional_vocab_size": 8}
    assert num_embeddings({"model_type": "molmo", "text_config": text}) == 520


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_image_input_size": [80, 80]}, r"have \[80, 80, 8\] pixels; the vision tower takes \[64, 64, 8\]"),
        ({"image_patch_size": 16}, r"have \[64, 64, 16\] pixels; the vision tower takes \[64, 64, 8\]"),
        ({"image_token_length_w": 5}, r"has \[4, 5\] tokens along its sides; the vision tower makes \[4, 4\]"),
        ({"overlap_margins": [2, 1]}, r"overlap_margins are \[2, 1\]; supported are two equal even numbers up to 3"),
        ({"overlap_margins": [1, 1]}, r"overlap_margins are \[1, 1\]; supported are"),
        ({"overlap_margins": [4, 4]}, r"overlap_margins are \[4, 4\]; supported are"),
        ({"max_crops": 0}, "max_crops is 0; it must be at least 1"),
        ({"max_crops": 65}, "max_crops is 65; it must be at most 64"),
        ({"do_normalize": False}, "the image processor has do_normalize: False; supported is True"),
        ({"image_padding_mask": False}, "the image processor has image_padding_mask: False; supported is True"),
    ],
)
def test_settings_that_the_tower_does_not_take_are_refused(changes: dict[str, Any], message: str, tmp_path: Path):
    with pytest.raises(EngineFailed, match=message):
        ImagePreprocessor(write_files(tmp_path, replace(MOLMO, processor={**PROCESSOR, **changes})))


def test_tower_that_pads_or_pools_otherwise_is_refused_by_name(tmp_path: Path):
    vision = {**MOLMO.config["vision_config"], "image_padding_embed": "regress"}
    path = write_files(tmp_path, replace(MOLMO, config={**MOLMO.config, "vision_config": vision}))
    assert images_unsupported_reason(path, read_config(path)) == (
        "config.json has vision_config.image_padding_embed: 'regress'; supported is 'pad_and_partial_pad'"
    )
