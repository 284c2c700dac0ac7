"""Prompts begin as the processors of their families begin them; a family that reads plain text needs no template."""

import json
from pathlib import Path

import pytest

from engine.errors import EngineFailed
from engine.processing.chat_template import ChatTemplate
from engine.processing.message import text_part
from engine.processing.tokenizer import ChatTokenizer
from tests.support.sighted_family import IDS
from tests.support.vision_families import SIGHTED
from tests.support.vision_zoo import write_files

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [text_part("Hello <pad>")]}]
WITHOUT = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello <pad><|im_end|>\n<|im_start|>assistant\n"
BEGUN = ("deepseekocr", "deepseekocr_2", "molmo2", "phi3_v")


def checkpoint(folder: Path, name: str, **settings: str) -> Path:
    write_files(folder, SIGHTED[name])
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return folder


@pytest.mark.parametrize("name", BEGUN)
@pytest.mark.parametrize(
    ("settings", "beginning"),
    [
        ({"bos_token": "<pad>", "eos_token": "<|im_end|>"}, "<pad>"),
        ({"eos_token": "<|im_end|>"}, "<|im_end|>"),
        ({}, ""),
        ({"bos_token": "<|im_start|>"}, ""),  # as the template begins
    ],
)
def test_a_prompt_begins_with_the_token_that_the_processor_adds(
    tmp_path: Path, name: str, settings: dict[str, str], beginning: str
):
    tokenizer = ChatTokenizer(checkpoint(tmp_path, name, **settings))
    prompt = tokenizer.chat_prompt(CHAT, template_kwargs={})
    assert tokenizer.decode(prompt.token_ids.tolist()) == beginning + WITHOUT
    if beginning:
        assert prompt.token_ids[0] == IDS[beginning]
        assert IDS["<pad>"] not in prompt.token_ids[1:], "the client's text"
    ends = [tokenizer.decode(prompt.token_ids[: one.num_tokens].tolist()) for one in prompt.boundaries]
    head = WITHOUT.partition("user\n")[0]
    assert ends == [beginning + head, beginning + WITHOUT.removesuffix("<|im_start|>assistant\n")]
    unfinished = [*CHAT, {"role": "assistant", "content": "Hi"}]
    ids = tokenizer.encode_chat(unfinished, template_kwargs={}, continue_final_message=True)
    assert tokenizer.decode(ids.tolist()) == f"{beginning}{WITHOUT}Hi"


def test_another_family_s_prompt_begins_as_its_template_does(tmp_path: Path):
    tokenizer = ChatTokenizer(checkpoint(tmp_path, "lfm2_vl", bos_token="<pad>"))
    assert tokenizer.decode(tokenizer.encode_chat(CHAT, template_kwargs={}).tolist()) == WITHOUT


def test_deepseek_ocr_without_a_template_reads_the_text_of_the_messages(tmp_path: Path):
    model_dir = checkpoint(tmp_path, "deepseekocr", bos_token="<pad>")
    (model_dir / "chat_template.jinja").unlink()
    tokenizer = ChatTokenizer(model_dir)
    ids = tokenizer.encode_chat([{"role": "user", "content": "Free OCR."}], template_kwargs={})
    assert tokenizer.decode(ids.tolist()) == "<pad>Free OCR."
    with pytest.raises(EngineFailed, match="no chat template in tokenizer_config"):
        ChatTemplate(model_dir)
