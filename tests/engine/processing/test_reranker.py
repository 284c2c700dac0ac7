"""A reranker is recognized by its files of sentence-transformers."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import EngineFailed
from engine.processing.pooling import EmbeddingModel
from engine.processing.reranker import Reranker
from engine.processing.tokenizer import ChatTokenizer
from tests.support.embedding_models import describe_embeddings
from tests.support.rerankers import INSTRUCTION, NO, TEMPLATE, YES, describe_reranker, tiny_reranker


def read(path: Path) -> Reranker:
    found = Reranker.read(path)
    assert found is not None
    return found


def write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))


def test_tokens_instruction_and_length_are_those_of_the_files(tmp_path):
    reranker = read(describe_reranker(tmp_path))
    assert (reranker.true_token_id, reranker.false_token_id) == (YES, NO)
    assert (reranker.instruction, reranker.max_tokens, reranker.adds_generation_prompt) == (INSTRUCTION, None, False)
    assert reranker.messages("q", "d", None)[0] == {"role": "system", "content": INSTRUCTION}
    assert reranker.messages("q", "d", "Sort")[0] == {"role": "system", "content": "Sort"}
    chat_template = {"add_generation_prompt": True, "style": "short"}
    write(
        tmp_path / "sentence_bert_config.json",
        {"max_seq_length": 9, "processing_kwargs": {"chat_template": chat_template}},
    )
    describe_reranker(tmp_path, prompts={}, default_prompt_name=None)
    reranker = read(tmp_path)
    assert (reranker.instruction, reranker.max_tokens, reranker.adds_generation_prompt) == (None, 9, True)
    assert reranker.template_kwargs == {"style": "short"}
    assert [message["role"] for message in reranker.messages("q", "d", None)] == ["query", "document"]


def test_a_reranker_is_no_embedding_model_and_neither_is_a_plain_checkpoint(tmp_path):
    assert Reranker.read(tmp_path) is None and EmbeddingModel.read(tmp_path) is None
    describe_embeddings(tmp_path)
    assert Reranker.read(tmp_path) is None and EmbeddingModel.read(tmp_path) is not None
    describe_reranker(tmp_path)
    assert EmbeddingModel.read(tmp_path) is None


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("config_sentence_transformers.json", {"prompts": {}, "default_prompt_name": "query"}, "default_prompt_name"),
        ("sentence_bert_config.json", {"processing_kwargs": {"chat_template": 5}}, "must be an object"),
        ("1_LogitScore/config.json", {}, "true_token_id and false_token_id are None and None"),
        ("modules.json", [{"type": "a.Transformer"}, {"type": "a.Pooling"}, {"type": "a.LogitScore"}], "Pooling"),
    ],
)
def test_files_with_other_contents_are_refused_with_the_reason(tmp_path, file, content, reason):
    describe_reranker(tmp_path)
    write(tmp_path / file, content)
    with pytest.raises(EngineFailed, match=reason):
        Reranker.read(tmp_path)


def test_the_template_begins_an_answer_only_where_the_files_say_so(tmp_path):
    path = tiny_reranker(tmp_path / "model")
    (path / "chat_template.jinja").write_text(TEMPLATE + "{% if add_generation_prompt %}<think>{% endif %}")
    tokenizer, messages = ChatTokenizer(path), read(path).messages("q", "d", None)
    without, with_it = (
        tokenizer.encode_chat(messages, template_kwargs={}, add_generation_prompt=adds).tolist()
        for adds in (False, True)
    )
    assert with_it[:-1] == without and with_it[-1:] == tokenizer.encode_text("<think>").tolist()
