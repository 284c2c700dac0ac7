"""Two checkpoints have the same tokenizer, or the first thing that tells them apart is named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import EngineFailed
from engine.processing.checkpoint import DEMO_MODEL
from engine.processing.tokenizer_match import why_different

DRAFT = DEMO_MODEL / "draft"


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., Path]:
    """The demo model's draft without its weights, after `change(tokenizer.json)`; config: changes of config.json."""

    def make(change: Callable[[dict[str, Any]], Any] = lambda tokenizer: None, **config: Any) -> Path:
        ignored = shutil.ignore_patterns("*.safetensors")
        path = Path(shutil.copytree(DRAFT, tmp_path / "draft", ignore=ignored, dirs_exist_ok=True))
        tokenizer = json.loads((path / "tokenizer.json").read_text())
        change(tokenizer)
        (path / "tokenizer.json").write_text(json.dumps(tokenizer))
        old = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(old | config))
        return path

    return make


def added(tokenizer: dict[str, Any], content: str) -> dict[str, Any]:
    return next(token for token in tokenizer["added_tokens"] if token["content"] == content)


def test_the_demo_model_and_its_draft_have_the_same_tokenizer():
    assert why_different(DEMO_MODEL, DRAFT) is None


def test_a_copy_of_a_checkpoint_has_the_same_tokenizer(changed):
    assert why_different(DEMO_MODEL, changed()) is None


def test_a_control_token_that_is_missing_is_named(changed):
    def rename(tokenizer: dict[str, Any]) -> None:
        token = added(tokenizer, "<tool_call>")
        token["content"] = "<call>"
        vocab = tokenizer["model"]["vocab"]
        if "<tool_call>" in vocab:
            vocab["<call>"] = vocab.pop("<tool_call>")

    reason = why_different(DEMO_MODEL, changed(rename))
    assert reason == "'<call>' is no added token in the target's tokenizer, 10 in the draft's"


def test_two_swapped_words_of_the_vocabulary_are_named(changed):
    """Words that no probe holds."""

    def swap(tokenizer: dict[str, Any]) -> None:
        vocab = tokenizer["model"]["vocab"]
        words = sorted((word for word in vocab if len(word) > 6), key=vocab.__getitem__)[-2:]
        vocab[words[0]], vocab[words[1]] = vocab[words[1]], vocab[words[0]]

    reason = why_different(DEMO_MODEL, changed(swap))
    assert reason is not None and "in the target's tokenizer" in reason and "in the draft's" in reason


def test_different_merges_are_detected_by_their_tokens(changed):
    reason = why_different(DEMO_MODEL, changed(lambda tokenizer: tokenizer["model"]["merges"].pop(5)))
    assert reason is not None and reason.startswith('"The quick brown fox')
    assert "in the target's tokenizer and" in reason and "; they differ at token " in reason


def test_a_different_pre_tokenizer_is_detected(changed):
    def without_spaces(tokenizer: dict[str, Any]) -> None:
        split = tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"]
        split["Regex"] = split["Regex"].removeprefix(" ?")

    reason = why_different(DEMO_MODEL, changed(without_spaces))
    assert reason is not None and "fox doesn" in reason


def test_tokenizers_of_different_sizes_are_reported_with_both_sizes(changed):
    def grow(tokenizer: dict[str, Any]) -> None:
        tokenizer["model"]["vocab"]["\u0120neverseen"] = 4096

    reason = why_different(DEMO_MODEL, changed(grow, vocab_size=5000))
    assert reason == "the target's tokenizer has 4096 tokens, the draft's 4097"


def test_an_embedding_too_small_for_the_targets_tokens_is_found(changed):
    reason = why_different(DEMO_MODEL, changed(vocab_size=4000))
    assert reason == "the target's tokenizer goes up to token id 4095, the draft's embedding up to 3999"


def test_further_embeddings_of_molmo2_count(changed):
    """Tokens of a Molmo2 target's tokenizer that have no logit are known to a Molmo2 draft."""
    text = {"text_config": {"vocab_size": 4000, "additional_vocab_size": 96}}
    assert why_different(DEMO_MODEL, changed(model_type="molmo2", **text)) is None
    text["text_config"]["additional_vocab_size"] = 95
    reason = why_different(DEMO_MODEL, changed(model_type="molmo2", **text))
    assert reason == "the target's tokenizer goes up to token id 4095, the draft's embedding up to 4094"


def test_a_tokenizer_that_cannot_be_loaded_is_the_engines_failure(changed):
    path = changed()
    (path / "tokenizer.json").write_text("{")
    with pytest.raises(EngineFailed, match="the tokenizer cannot be loaded"):
        why_different(DEMO_MODEL, path)
