"""Settings in the files of encoders: pooling, pairs of texts, and the tokens that their tokenizers add."""

import json

import pytest

from engine.config import EmbeddingConfig
from engine.errors import ContextLengthExceeded, EngineFailed
from engine.processing.context import context_limit
from engine.processing.cross_encoder import CrossEncoder, read_reranker
from engine.processing.encoders import encoder_refusal
from engine.processing.pooling import EmbeddingModel, choose_pooling
from engine.processing.prompt_length import PromptLimit
from engine.processing.text_pair import PairForm
from engine.processing.tokenizer import ChatTokenizer
from tests.support.embedding_models import demo_embedding_model
from tests.support.encoders import CONFIGS, POSITIONS, config_of, make_cross_encoder, make_encoder, tokenizer

QUERY, DOCUMENT = "red apples", "the story of a garden, and of the sea"


@pytest.mark.parametrize("family", CONFIGS)
def test_texts_and_pairs_have_the_tokens_that_the_tokenizer_itself_gives_them(tmp_path, family):
    ours, own = ChatTokenizer(make_cross_encoder(tmp_path / "model", family)), tokenizer(family)
    assert ours.encode_text(DOCUMENT).tolist() == own.encode(DOCUMENT).ids
    for first, second in ((QUERY, DOCUMENT), ("", DOCUMENT), (QUERY, "")):
        pair, known = ours.encode_pair(first, second), own.encode(first, second)
        assert pair.token_ids.tolist() == known.ids
        assert pair.start == (known.type_ids.index(1) if 1 in known.type_ids else len(known.ids))
    num_tokens = len(own.encode(QUERY, DOCUMENT).ids)
    assert len(ours.encode_pair(QUERY, DOCUMENT, PromptLimit(num_tokens, num_output_tokens=0)).token_ids) == num_tokens
    with pytest.raises(ContextLengthExceeded, match=rf"{num_tokens - 1} tokens.* {num_tokens} in the prompt"):
        ours.encode_pair(QUERY, DOCUMENT, PromptLimit(num_tokens - 1, num_output_tokens=0))


@pytest.mark.parametrize(
    ("family", "separator"),
    [(family, "[SEP]" if "</s>" not in tokenizer(family).get_vocab() else "</s>") for family in CONFIGS],
)
def test_a_document_cannot_spell_the_token_that_separates_it_from_the_query(tmp_path, family, separator):
    ours = ChatTokenizer(make_cross_encoder(tmp_path / "model", family))
    separator_id = tokenizer(family).token_to_id(separator)
    plain = ours.encode_pair(QUERY, DOCUMENT).token_ids.tolist()
    spelled = ours.encode_pair(QUERY, f"{DOCUMENT} {separator} {DOCUMENT}").token_ids.tolist()
    assert spelled.count(separator_id) == plain.count(separator_id)
    assert len(spelled) > len(plain)


def test_a_tokenizer_that_joins_two_texts_in_another_way_is_refused():
    from tokenizers import Tokenizer, models, processors

    made = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[X]": 2}, unk_token="[X]"))
    for pair, reason in (("$B:0 $A:0", "in another order"), ("$A:1 $B:0", "the types"), ("$A:0 $B:0", None)):
        made.post_processor = processors.TemplateProcessing("$A", pair, [("[X]", 2)])
        if reason is None:
            assert PairForm.of(made) == PairForm((), (), (), None)
        else:
            with pytest.raises(EngineFailed, match=reason):
                PairForm.of(made)


def test_the_pooling_of_an_encoder_is_the_checkpoints_or_must_be_set(tmp_path):
    path = make_encoder(tmp_path / "model", "bert", "cls_token")
    auto, decoder = EmbeddingConfig(), demo_embedding_model(tmp_path / "decoder", mode="cls_token")
    assert choose_pooling(auto, path) == "cls"
    assert choose_pooling(EmbeddingConfig(pooling="mean"), path) == "mean"
    (path / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(EngineFailed, match=r"the pooling max_tokens; .* set embedding\.pooling to cls or last or mean"):
        choose_pooling(auto, path)
    (path / "1_Pooling" / "config.json").unlink()
    with pytest.raises(EngineFailed, match="an encoder without 1_Pooling"):
        choose_pooling(auto, path)
    (path / "modules.json").unlink()
    assert EmbeddingModel.read(path) is not None
    assert choose_pooling(EmbeddingConfig(pooling="cls"), path) == "cls"
    with pytest.raises(EngineFailed, match="selects the pooling cls_token"):
        choose_pooling(auto, decoder)
    with pytest.raises(EngineFailed, match="pooling is cls, which needs an encoder"):
        choose_pooling(EmbeddingConfig(pooling="cls"), decoder)


def test_an_encoder_with_classes_is_a_reranker_and_no_embedding_model(tmp_path):
    path = make_cross_encoder(tmp_path / "model", "bert")
    assert EmbeddingModel.read(path) is None and read_reranker(path) == CrossEncoder()
    (path / "sentence_bert_config.json").write_text('{"max_seq_length": 64}')
    settings, modules = path / "config_sentence_transformers.json", path / "modules.json"
    settings.write_text('{"model_type": "CrossEncoder"}')
    modules.write_text(json.dumps([{"path": "", "type": "sentence_transformers.cross_encoder.Transformer"}]))
    assert EmbeddingModel.read(path) is None and read_reranker(path) == CrossEncoder(64)
    modules.write_text(json.dumps([{"path": "", "type": "Transformer"}, {"path": "1_Dense", "type": "Dense"}]))
    with pytest.raises(EngineFailed, match="the modules Transformer, Dense cannot be served"):
        read_reranker(path)
    (path / "config.json").write_text(json.dumps(config_of("bert")))
    with pytest.raises(EngineFailed, match="no architecture with an output layer for classes"):
        read_reranker(path)


def test_an_embedding_model_that_lowercases_says_so(tmp_path):
    path = make_encoder(tmp_path / "model", "modernbert")
    (path / "sentence_bert_config.json").write_text('{"max_seq_length": 64, "do_lower_case": true}')
    model = EmbeddingModel.read(path)
    assert model is not None and (model.max_tokens, model.lowercases) == (64, True)


def test_robertas_have_fewer_positions_than_their_tables():
    for family in CONFIGS:
        assert encoder_refusal(config_of(family)) is None
        assert context_limit(config_of(family)) == POSITIONS
    for family in ("camembert", "roberta", "xlm-roberta"):
        assert context_limit(config_of(family, pad_token_id=4)) == POSITIONS - 3
