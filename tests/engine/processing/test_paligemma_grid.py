"""PaliGemma's prompts and images: as transformers' and the library's processors make them."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mlx_vlm.models.paligemma.processing_paligemma import build_string_from_input
from tokenizers import AddedToken, Tokenizer
from transformers.models.paligemma.processing_paligemma import PaliGemmaProcessor

from engine.errors import EngineFailed
from engine.processing.checkpoint import images_unsupported_reason, read_config
from engine.processing.images import ImagePreprocessor
from engine.processing.tokenizer import ChatTokenizer
from engine.processing.vision_families import whole_prompts
from tests.support.paligemma_family import NUM_TOKENS, ONE, PROCESSOR, TWO
from tests.support.sighted_family import IDS
from tests.support.vision_zoo import image, write_files

NAMES = {"<start>": "<bos>", "<row_1_col_1>": "<loc0012>", "<row_1_col_2>": "<seg034>"}
"""Tokens of PaliGemma's tokenizers."""


def plain(folder: Path, **changes: Any) -> Path:
    """Write a checkpoint without a chat template, as they are published."""
    path = write_files(folder, replace(ONE, names=NAMES, **changes))
    (path / "chat_template.jinja").unlink()
    (path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>"})
    )
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(name, normalized=False, special=False) for name in ("<loc0012>", "<seg034>")])
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def prompt_of(path: Path, messages: list[dict[str, Any]], num_images: int = 0, **more: Any) -> str:
    tokenizer = ChatTokenizer(path)
    images = [ImagePreprocessor(path).patches(image(64, 40, seed)) for seed in range(num_images)]
    ids = tokenizer.chat_prompt(
        messages, template_kwargs={}, placeholders=tokenizer.placeholders(images), **more
    ).token_ids
    assert int((ids == IDS["<image>"]).sum()) == num_images * NUM_TOKENS
    return tokenizer.decode(ids.tolist())


def parts(*contents: str | None) -> list[dict[str, Any]]:
    """None: an image."""
    made = [{"type": "image"} if one is None else {"type": "text", "text": one} for one in contents]
    return [{"role": "user", "content": made}]


@pytest.mark.parametrize("text", ["caption en", "", "What is\nthis?", " detect cat"])
@pytest.mark.parametrize("num_images", [1, 2])
def test_prompt_is_that_of_both_processors(text: str, num_images: int, tmp_path: Path):
    ours = prompt_of(plain(tmp_path), parts(*[None] * num_images, text), num_images)
    assert ours == build_string_from_input(text, "<bos>", NUM_TOKENS, "<image>", num_images)
    processor: Any = object.__new__(PaliGemmaProcessor)
    processor.tokenizer = SimpleNamespace(bos_token="<bos>")
    made = [image(64, 40)] * num_images
    _, [laid], *_ = processor.prepare_inputs_layout(images=[made], text=["<image>" * num_images + text])
    assert ours == laid.replace("<image>", "<image>" * NUM_TOKENS)


def test_images_stand_before_the_text_wherever_the_message_has_them(tmp_path: Path):
    path = plain(tmp_path)
    assert prompt_of(path, parts("caption", None, " en"), 1) == prompt_of(path, parts(None, "caption en"), 1)


def test_each_message_is_a_line_and_a_text_needs_no_image(tmp_path: Path):
    path = plain(tmp_path)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "caption en"},
        {"role": "assistant", "content": "a cat"},
        {"role": "user", "content": "caption de"},
    ]
    assert prompt_of(path, messages) == "<bos>Be brief.\ncaption en\na cat\ncaption de\n"
    assert prompt_of(path, messages[:3], continue_final_message=True) == "<bos>Be brief.\ncaption en\na cat"


def test_places_and_masks_may_be_spelled_but_no_token_that_structures_a_prompt(tmp_path: Path):
    path = plain(tmp_path)
    text = "caption <loc0012> <seg034> <bos> <image>"
    tokenizer = ChatTokenizer(path)
    ids = tokenizer.encode_chat([{"role": "user", "content": text}], template_kwargs={})
    assert tokenizer.decode(ids.tolist()) == f"<bos>{text}\n"
    found = [int((ids == IDS[name]).sum()) for name in ("<row_1_col_1>", "<row_1_col_2>", "<start>", "<image>")]
    assert found == [1, 1, 1, 0]
    raw = tokenizer.encode_text("<loc0012><image>")
    assert raw[0] == IDS["<row_1_col_1>"] and IDS["<image>"] not in raw


@pytest.mark.parametrize("is_special", [False, True])
def test_answers_keep_places_and_masks_however_the_tokenizer_marks_them(is_special: bool, tmp_path: Path):
    path = plain(tmp_path)
    file = json.loads((path / "tokenizer.json").read_text())
    for token in file["added_tokens"]:
        token["special"] = is_special if token["content"] in ("<loc0012>", "<seg034>") else token["special"]
    (path / "tokenizer.json").write_text(json.dumps(file))
    said = "<loc0012><loc0012> cät <seg034>; dög<loc0012>"
    ids = Tokenizer.from_str(json.dumps(file)).encode(f"{said}<bos>", add_special_tokens=False).ids
    assert ids.count(IDS["<row_1_col_1>"]) == 3 and ids[-1] == IDS["<start>"]
    detokenizer = ChatTokenizer(path).detokenizer(())
    assert "".join(detokenizer.push([id_]) for id_ in ids) + detokenizer.finish() == said


@pytest.mark.parametrize(("side", "num_tokens"), [(224, 256), (448, 1024), (896, 4096)])
def test_published_sizes_have_the_published_numbers_of_tokens(side: int, num_tokens: int, tmp_path: Path):
    vision = {"model_type": "siglip_vision_model", "patch_size": 14, "hidden_size": 1152}
    vision |= {} if side == 224 else {"image_size": side}  # google/paligemma-3b-pt-224 has no image_size
    processor = {**PROCESSOR, "size": {"height": side, "width": side}, "image_seq_length": num_tokens}
    path = plain(tmp_path, config={**ONE.config, "vision_config": vision}, processor=processor)
    made = ImagePreprocessor(path).patches(image(640, 480))
    assert made.num_tokens == num_tokens == len(made.patches)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": {"height": 64, "width": 64}}, r"images of \[64, 64\] pixels along height and width; .* takes 32"),
        ({"size": {"height": 32, "width": 64}}, r"images of \[32, 64\] pixels"),
        ({"image_seq_length": 256}, "image_seq_length is 256; the vision tower makes 16 tokens"),
    ],
)
def test_sizes_that_the_tower_does_not_take_are_refused(changes: dict[str, Any], message: str, tmp_path: Path):
    with pytest.raises(EngineFailed, match=message):
        ImagePreprocessor(write_files(tmp_path, replace(ONE, processor={**PROCESSOR, **changes})))


def test_other_towers_and_settings_are_refused_by_name(tmp_path: Path):
    def reason(processor: dict[str, Any], **vision: Any) -> str | None:
        config = {**ONE.config, "vision_config": {**ONE.config["vision_config"], **vision}}
        changed = replace(ONE, config=config, processor={**PROCESSOR, **processor})
        path = write_files(tmp_path, changed)
        return images_unsupported_reason(path, read_config(path))

    assert reason({}) is None
    assert reason({"do_resize": False}) == "the image processor has do_resize: False; supported is True"
    assert reason({}, model_type="clip_vision_model") == (
        "the vision tower is clip_vision_model; supported are siglip_vision_model"
    )
    assert reason({}, hidden_act="relu") == (
        "config.json has vision_config.hidden_act: 'relu'; supported is 'gelu_pytorch_tanh'"
    )


def test_prompts_are_whole_unless_the_configuration_says_otherwise():
    text = {**TWO.config["text_config"], "use_bidirectional_attention": False}
    assert whole_prompts(ONE.config) == whole_prompts(TWO.config) == "the tokens of its prompts see each other"
    assert whole_prompts({**TWO.config, "text_config": text}) is None
    assert whole_prompts({"model_type": "gemma3"}) is None


def test_images_are_those_of_the_processor(tmp_path: Path):
    preprocessor = ImagePreprocessor(write_files(tmp_path, ONE))
    for size in ((64, 40), (300, 20), (32, 32)):
        made = preprocessor.patches(image(*size))
        expected = ONE.pixels([image(*size)])["pixel_values"][0]
        mean, std = (np.array(PROCESSOR[name], np.float32)[:, None, None] for name in ("image_mean", "image_std"))
        whole = made.patches.reshape(4, 4, 3, 8, 8).transpose(2, 0, 3, 1, 4).reshape(3, 32, 32)
        np.testing.assert_allclose((whole / np.float32(255) - mean) / std, expected, atol=1e-5)
