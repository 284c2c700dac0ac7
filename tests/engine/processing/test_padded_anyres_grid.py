"""DeepSeek-VL2's prompts and images: as the library's copy of the published processor makes them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx_vlm.models.deepseek_vl_v2.conversation import get_conv_template
from PIL import Image
from tokenizers import Tokenizer

from engine.errors import EngineFailed
from engine.processing.answer_parser import AnswerRules
from engine.processing.checkpoint import images_unsupported_reason, read_config
from engine.processing.images import ImagePreprocessor
from engine.processing.padded_anyres_grid import PaddedAnyresGrid
from engine.processing.tokenizer import ChatTokenizer
from tests.support.deepseek_vl2_family import DEEPSEEK_VL2, PROCESSOR, RESOLUTIONS, SIDE, placed, prepared
from tests.support.sighted_family import IDS
from tests.support.view_families import DEEPSEEK_OCR
from tests.support.vision_zoo import image, write_files

PUBLISHED = [
    *([384, 384], [384, 768], [768, 384], [384, 1152], [1152, 384], [384, 1536], [1536, 384], [768, 768]),
    *([384, 1920], [1920, 384], [384, 2304], [2304, 384], [768, 1152], [1152, 768], [384, 2688], [2688, 384]),
    *([384, 3072], [3072, 384], [384, 3456], [3456, 384]),
]
GRID = PaddedAnyresGrid(14, 2, 3, 384, tuple((width, height) for width, height in PUBLISHED), (127, 127, 127))
NAMES = {
    "<start>": "<|User|>",
    "<end>": "<|Assistant|>",
    "<break>": "<｜end▁of▁sentence｜>",
    "<pad>": "<｜begin▁of▁sentence｜>",
    "<row_1_col_1>": "<|ref|>",
    "<row_1_col_2>": "<|/ref|>",
    "<row_1_col_3>": "<|grounding|>",
}


@pytest.mark.parametrize(
    "size", [(640, 480), (480, 640), (100, 100), (384, 384), (3000, 500), (90, 2000), (1024, 1024), (1153, 384), (5, 5)]
)
def test_published_resolutions_give_the_tiles_and_tokens_of_the_library(size: tuple[int, int]):
    settings = {**PROCESSOR, "candidate_resolutions": PUBLISHED, "patch_size": 14}
    num_tokens, views, [columns, rows] = prepared(Image.new("RGB", size), settings)
    layout = GRID.layout(*size)
    assert layout.tiles == (rows, columns) and layout.grid_thw == (len(views), 27, 27)
    assert GRID.num_tokens(layout) == num_tokens


def test_smallest_and_largest_images_have_the_published_numbers_of_tokens():
    assert GRID.num_tokens(GRID.layout(300, 300)) == 14 * 15 + 1 + 14 * 15 == 421
    assert GRID.max_tokens == 14 * 15 + 1 + 9 * 14 * 15 == 2101


def test_limits_take_the_largest_resolutions_away_and_leave_the_smallest():
    limited = GRID.limited(900)
    assert limited.max_tokens <= 900 and (768, 384) in limited.resolutions and (768, 768) not in limited.resolutions
    assert GRID.limited(1).resolutions == ((384, 384),) and GRID.for_detail(True).max_tokens == 421


def test_same_pixels_in_another_arrangement_are_another_image():
    wide, tall = (GRID.cut(Image.new("RGB", size, (127, 127, 127))) for size in ((900, 400), (400, 900)))
    assert np.array_equal(wide.patches, tall.patches) and wide.content_hash != tall.content_hash


def plain(folder: Path) -> Path:
    """Write a checkpoint without a chat template and with the settings in processor_config.json, as published."""
    path = write_files(folder, replace(DEEPSEEK_VL2, names=NAMES, processor_config=PROCESSOR))
    (path / "chat_template.jinja").unlink()
    (path / "preprocessor_config.json").unlink()
    more = {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"}
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **more}))
    config = {key: value for key, value in DEEPSEEK_VL2.config.items() if key != "image_token_id"}
    config["language_config"] = config.pop("text_config")
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_conversation_without_a_chat_template_is_the_published_one(tmp_path: Path):
    path = plain(tmp_path)
    tokenizer, shown = ChatTokenizer(path), ImagePreprocessor(path).patches(image(40, 20))
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": "Sure?"},
    ]
    ids = tokenizer.encode_chat(messages, template_kwargs={}, placeholders=[tokenizer.placeholder(shown)])
    conversation = get_conv_template("deepseek")
    texts = ["<image>\nWhat is it?", "A cat.", "Sure?", ""]
    for i, text in enumerate(texts):
        conversation.append_message(conversation.roles[i % 2], text)
    expected = f"<｜begin▁of▁sentence｜>{conversation.get_prompt().strip()}"
    assert tokenizer.decode(ids.tolist()) == expected.replace("<image>", placed(shown))
    assert tokenizer.stop_token_ids and IDS["<break>"] in tokenizer.stop_token_ids
    system = tokenizer.encode_chat([{"role": "system", "content": "Be brief."}, messages[2]], template_kwargs={})
    conversation = get_conv_template("deepseek")
    conversation.system_message = "Be brief."
    conversation.append_message("<|User|>", "Sure?")
    conversation.append_message("<|Assistant|>", "")
    assert tokenizer.decode(system.tolist()) == f"<｜begin▁of▁sentence｜>{conversation.get_prompt().strip()}"


def test_texts_may_spell_the_tokens_around_places_and_no_role(tmp_path: Path):
    text = "<|grounding|><|ref|>the cat<|/ref|> <|User|> <image>"
    for path in (plain(tmp_path / "vl2"), write_files(tmp_path / "ocr", replace(DEEPSEEK_OCR, names=NAMES))):
        tokenizer = ChatTokenizer(path)
        ids = tokenizer.encode_chat([{"role": "user", "content": text}], template_kwargs={})
        assert text in tokenizer.decode(ids.tolist())
        found = [int((ids == IDS[f"<row_1_col_{i}>"]).sum()) for i in (1, 2, 3)]
        assert found == [1, 1, 1]
        roles = int((ids == IDS["<start>"]).sum())
        assert roles == ("vl2" in path.parts) and not (ids == IDS["<image>"]).any()


def test_answers_keep_the_tokens_around_places_and_no_role(tmp_path: Path):
    """They are special tokens of the tokenizers, as the library's processor adds them."""
    said = "<|ref|>the <|grounding|>cät<|/ref|> is there"
    for path in (plain(tmp_path / "vl2"), write_files(tmp_path / "ocr", replace(DEEPSEEK_OCR, names=NAMES))):
        marked = Tokenizer.from_file(str(path / "tokenizer.json"))
        assert marked.get_added_tokens_decoder()[IDS["<row_1_col_1>"]].special
        ids = marked.encode(f"<|Assistant|>{said}", add_special_tokens=False).ids
        assert ids[0] == IDS["<end>"] and ids[1] == IDS["<row_1_col_1>"]
        tokenizer = ChatTokenizer(path)
        whole, stopped = tokenizer.detokenizer(()), tokenizer.detokenizer(("t<|/ref|>",))
        assert "".join(whole.push([id_]) for id_ in ids) + whole.finish() == said
        assert "".join(stopped.push([id_]) for id_ in ids) == said[: said.index("t<|/ref|>")] and stopped.stopped
        for rules in (AnswerRules(), AnswerRules(is_raw=True)):
            parser = tokenizer.answer_parser(rules)
            assert parser.push(ids).content + parser.finish().content == said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"candidate_resolutions": [[32, 32]]}, r"are \(32, 8, 2\); those of config.json are \(28, 8, 2\)"),
        ({"patch_size": 4}, r"are \(28, 4, 2\); those of config.json are \(28, 8, 2\)"),
        ({"downsample_ratio": 1}, r"are \(28, 8, 1\); those of config.json are \(28, 8, 2\)"),
        ({"candidate_resolutions": RESOLUTIONS[:2]}, "candidate_resolutions differ from those of config.json"),
    ],
)
def test_sizes_that_the_model_does_not_take_are_refused(changes: dict[str, Any], message: str, tmp_path: Path):
    with pytest.raises(EngineFailed, match=message):
        ImagePreprocessor(write_files(tmp_path, replace(DEEPSEEK_VL2, processor={**PROCESSOR, **changes})))


def test_resolutions_that_are_no_whole_tiles_are_refused(tmp_path: Path):
    odd = [[SIDE, SIDE], [SIDE, 42]]
    config = {**DEEPSEEK_VL2.config, "candidate_resolutions": odd}
    family = replace(DEEPSEEK_VL2, config=config, processor={**PROCESSOR, "candidate_resolutions": odd})
    with pytest.raises(EngineFailed, match=r"candidate_resolutions has \[28, 42\]; both must be multiples of 28"):
        ImagePreprocessor(write_files(tmp_path, family))


@pytest.mark.parametrize(
    ("config", "processor", "reason"),
    [
        ({"tile_tag": "1D"}, {}, "config.json has tile_tag: '1D'; supported is '2D'"),
        ({"global_view_pos": "tail"}, {}, "config.json has global_view_pos: 'tail'; supported is 'head'"),
        (
            {"projector_config": {**DEEPSEEK_VL2.config["projector_config"], "projector_type": "mlp_gelu"}},
            {},
            "config.json has projector_config.projector_type: 'mlp_gelu'; supported is 'downsample_mlp_gelu'",
        ),
        ({}, {"normalize": False}, "the image processor has normalize: False; supported is True"),
        ({}, {"sft_format": "plain"}, "the image processor has sft_format: 'plain'; supported is 'deepseek'"),
    ],
)
def test_other_towers_and_formats_are_refused_by_name(
    config: dict[str, Any], processor: dict[str, Any], reason: str, tmp_path: Path
):
    family = replace(DEEPSEEK_VL2, config={**DEEPSEEK_VL2.config, **config}, processor={**PROCESSOR, **processor})
    path = write_files(tmp_path, family)
    assert images_unsupported_reason(path, read_config(path)) == reason
