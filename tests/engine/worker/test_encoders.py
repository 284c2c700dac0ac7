"""Encoders: the forward that transformers defines, for each text alone, in any batch and in any order."""

import json
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_vlm.models.modernbert.config import ModelConfig
from mlx_vlm.models.modernbert.modernbert import ModernBertMLP

from engine.__main__ import Chat, arguments
from engine.config import EmbeddingConfig, EngineConfig
from engine.core.cost_model import CostModel
from engine.core.request_check import check_request
from engine.core.row import Row
from engine.core.runner import ChunkTime
from engine.errors import EngineFailed, InvalidRequest, MemoryExceeded
from engine.processing.pooling import choose_pooling
from engine.protocol import EngineRequest, FinishReason, SamplingParams
from engine.worker import encoder_loader, loader
from engine.worker.encoder_runner import EncoderRunner
from engine.worker.model_report import report
from engine.worker.patches import modernbert_gelu
from engine.worker.runner_factory import make_runner
from tests.support.driver import Driver, fix_prefill_costs
from tests.support.encoders import CONFIGS, LAYERS, POSITIONS, Reference, make_cross_encoder, make_encoder

LENGTHS = (1, 9, 40, 90, 12)
DYNAMIC: dict[str, Any] = {
    "max_position_embeddings": 30,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 4.0},
}
"""Two of LENGTHS are beyond the trained ones of a NomicBERT, which has a rope that grows with the text."""
TOLERANCE = 5e-6
"""Tolerance of a vector of length 1 in float32, against float64."""


def config_of(path: Path, **options: Any) -> EngineConfig:
    return EngineConfig.model_validate({"model": str(path), "device": "cpu", "dtype": "float32", **options})


def cold(path: Path, **options: Any) -> EncoderRunner:
    return EncoderRunner(loader.load(config_of(path, **options), lambda progress: None, encoder_loader.open_encoder))


def tokens(num_tokens: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, 300, num_tokens).tolist()


def request(name: str, ids: list[int], **fields: Any) -> EngineRequest:
    return EngineRequest(name, np.array(ids, np.int32), SamplingParams(1), (), **fields)


def result(driver: Driver, name: str) -> np.ndarray:
    [chunk] = driver.chunks[name]
    assert chunk.finish_reason is FinishReason.STOP and not chunk.token_ids and chunk.embedding is not None
    return np.frombuffer(chunk.embedding, "<f4")


def pooled(states: np.ndarray, mode: str) -> np.ndarray:
    vector = {"cls_token": states[0], "lasttoken": states[-1], "mean_tokens": states.mean(axis=0)}[mode]
    return vector / np.linalg.norm(vector)


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predict the same time for one text and for several in a forward, so that they share it whenever they can."""
    monkeypatch.setattr(CostModel, "chunk_s", lambda self, num_tokens, start, num_rows=1: 1e-3 if num_tokens else 0.0)


@pytest.mark.usefixtures("together")
@pytest.mark.parametrize(
    ("family", "mode", "changes"),
    [
        ("bert", "cls_token", {}),
        ("bert", "lasttoken", {"layer_norm_eps": 1e-3}),
        ("xlm-roberta", "mean_tokens", {}),
        ("roberta", "mean_tokens", {}),
        ("roberta", "cls_token", {"pad_token_id": 0, "max_position_embeddings": POSITIONS + 1, "type_vocab_size": 2}),
        ("camembert", "cls_token", {"layer_norm_eps": 1e-3}),
        ("nomic_bert", "mean_tokens", {}),
        ("nomic_bert", "cls_token", {"type_vocab_size": 0, "rope_parameters": {"rope_theta": 50.0}}),
        ("nomic_bert", "mean_tokens", {"layer_norm_eps": 1e-3, **DYNAMIC}),
        ("modernbert", "mean_tokens", {}),
        ("modernbert", "cls_token", {"local_attention": 200}),
    ],
)
def test_embeddings_are_those_of_transformers_alone_together_and_in_another_order(tmp_path, family, mode, changes):
    path = make_encoder(tmp_path / "model", family, mode, **changes)
    texts = {f"e{n}": tokens(n, seed=n) for n in LENGTHS}
    texts["e9"][4] = 1  # the padding of RoBERTas, which has no position of its own
    reference = Reference(path)
    expected = {name: pooled(reference.states(ids), mode) for name, ids in texts.items()}
    runner, pooling = cold(path), choose_pooling(EmbeddingConfig(), path)
    requests = [request(name, ids, pooling=pooling) for name, ids in texts.items()]
    alone = [{0: [one]} for one in requests]
    for arrivals, num_bursts in (([{0: requests}], 1), ([{0: requests[::-1]}], 1), (alone, 0)):
        driver = Driver(runner, EngineConfig(prefill_chunk_tokens=256))
        for arriving in arrivals:
            driver.run(arriving)
        assert (driver.core.stats.num_bursts > 0) == (num_bursts > 0)
        for name, known in expected.items():
            np.testing.assert_allclose(result(driver, name), known, atol=TOLERANCE)
        assert driver.core.prefixes.status().num_entries == 0


@pytest.mark.usefixtures("together")
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *(("bert", {}), ("xlm-roberta", {}), ("modernbert", {}), ("modernbert", {"classifier_pooling": "mean"})),
        *(("roberta", {}), ("camembert", {}), ("nomic_bert", {}), ("nomic_bert", DYNAMIC)),
    ],
)
def test_scores_are_those_of_transformers_alone_together_and_in_another_order(tmp_path, family, changes):
    path = make_cross_encoder(tmp_path / "model", family, **changes)
    pairs = {f"p{n}": (tokens(n, seed=n), max(1, n // 3)) for n in LENGTHS}
    reference = Reference(path)
    expected = {name: reference.score(*pair) for name, pair in pairs.items()}
    assert len({round(value, 3) for value in expected.values()}) == len(LENGTHS)
    runner = cold(path)
    requests = [request(name, ids, pooling="cls", pair_start=start) for name, (ids, start) in pairs.items()]
    for arriving in (requests, requests[::-1], requests[2:3]):
        driver = Driver(runner)
        driver.run({0: arriving})
        for name in driver.finish:
            assert float(result(driver, name)[0]) == pytest.approx(expected[name], abs=2e-5)


def test_only_bert_tells_the_two_texts_of_a_pair_apart_by_the_types_of_their_tokens(tmp_path):
    for family, differs in (("bert", True), ("xlm-roberta", False)):
        driver = Driver(cold(make_cross_encoder(tmp_path / family, family)))
        ids = tokens(20, seed=3)
        driver.run({0: [request(f"p{at}", ids, pooling="cls", pair_start=at) for at in (5, 20)]})
        assert (abs(float((result(driver, "p5") - result(driver, "p20"))[0])) > 1e-3) is differs


def test_no_step_divides_a_text_and_a_step_begins_no_text_that_it_has_no_tokens_left_for(tmp_path):
    runner, sizes = cold(make_encoder(tmp_path / "model", "bert")), []
    forward = runner._forward
    runner._forward = lambda rows: sizes.append([row.num_tokens for row in rows]) or forward(rows)  # type: ignore[method-assign,func-returns-value]
    driver = Driver(runner, EngineConfig(prefill_chunk_tokens=64, prefill_chunk_tokens_busy=16))
    fix_prefill_costs(driver.core, forward_s=0.0, token_s=1e-4)  # a part of a text would be worth its forward
    for n in (90, 40, 30):
        driver.core.add_request(request(f"e{n}", tokens(n, n), pooling="mean"))
    steps = []
    while driver.core.has_work:
        driver.core.step()
        steps.append([n for each in sizes for n in each])
        sizes.clear()
    assert sorted(n for step in steps for n in step) == [30, 40, 90]
    assert all(len(step) <= 1 for step in steps)  # no two of them fit into 64 tokens together


@pytest.mark.parametrize("family", ["modernbert", "nomic_bert"])
def test_a_warm_encoder_knows_what_texts_take_and_refuses_one_that_never_fits(tmp_path, family):
    runner = make_runner(config_of(make_encoder(tmp_path / "model", family)), lambda progress: None)
    assert isinstance(runner, EncoderRunner)
    costs, times = runner.costs, runner.chunk_times
    assert costs.base_bytes > 0 and costs.token_step_bytes > 0 and costs.pair_bytes > 0
    assert [type(one) for one in times] == [ChunkTime] and runner.step_times == ()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    runner.prefill([Row(request("r", tokens(POSITIONS, 1), pooling="mean"))], POSITIONS)
    assert mx.get_peak_memory() - before <= costs.chunk(POSITIONS, POSITIONS)
    budget = Driver(runner, EngineConfig()).core.budget
    assert budget.needs.max_row_tokens() > POSITIONS
    least = (costs.base_bytes + costs.chunk(40, 41)) / 2**30
    tight = EngineConfig.model_validate({"memory": {"limit_gb": least, "headroom_gb": 0}})
    needs = Driver(runner, tight).core.budget.needs
    assert needs.max_row_tokens() == pytest.approx(40, abs=1)
    with pytest.raises(MemoryExceeded):
        needs.clamp_max_tokens(request("long", tokens(60, 1), pooling="mean"), 0)


def test_requests_that_an_encoder_cannot_answer_are_refused_by_field(tmp_path):
    embedding, scoring = (
        cold(make(tmp_path / name, "bert"))
        for name, make in (("embedding", make_encoder), ("scoring", make_cross_encoder))
    )
    ids = tokens(8, 1)

    def refused(runner: EncoderRunner, match: str, num_tokens: int = 8, **fields: Any) -> None:
        with pytest.raises(InvalidRequest, match=match):
            check_request(request("r", tokens(num_tokens, 1), **fields), EngineConfig(), runner)

    check_request(request("r", ids, pooling="last"), EngineConfig(), embedding)
    check_request(request("r", ids, pooling="cls", pair_start=8), EngineConfig(), scoring)
    refused(embedding, "this model is an encoder: it gives embeddings and generates no text")
    refused(scoring, "it gives scores and generates no text")
    refused(embedding, "must have no pair_start; it has the pooling cls and pair_start 3", pooling="cls", pair_start=3)
    refused(scoring, "must have pair_start and the pooling cls", pooling="mean")
    refused(scoring, "pair_start is 9; it must be between 1 and 8", pooling="cls", pair_start=9)
    refused(embedding, "has no logits of tokens", pooling="last", scored_tokens=(5, 6))


def test_a_text_beyond_the_positions_is_refused_with_both_numbers(tmp_path):
    for family in CONFIGS:
        runner = cold(make_encoder(tmp_path / family, family))
        assert runner.max_context_tokens == POSITIONS
        driver = Driver(runner)
        driver.run({0: [request("e", tokens(POSITIONS, 1), pooling="mean")]})
        assert np.isfinite(result(driver, "e")).all()
        with pytest.raises(InvalidRequest, match=rf"{POSITIONS} tokens.*{POSITIONS + 1}"):
            check_request(request("e", tokens(POSITIONS + 1, 1), pooling="mean"), EngineConfig(), runner)


@pytest.mark.parametrize("family", ["modernbert", "nomic_bert"])
def test_low_precision_changes_embeddings_and_scores_by_rounding_alone(tmp_path, family):
    for make, fields in ((make_encoder, {}), (make_cross_encoder, {"pair_start": 4})):
        path = make(tmp_path / make.__name__, family)
        found = []
        for dtype in ("float32", "bfloat16"):
            driver = Driver(cold(path, dtype=dtype))
            driver.run({0: [request(f"r{n}", tokens(n, n), pooling="cls", **fields) for n in (9, 40)]})
            found.append(np.concatenate([result(driver, "r9"), result(driver, "r40")]))
        assert not np.array_equal(*found)
        np.testing.assert_allclose(*found, atol=0.3)


def test_the_report_and_the_terminal_say_what_an_encoder_gives(tmp_path):
    lines = list(report(config_of(make_encoder(tmp_path / "model", "xlm-roberta", "cls_token")), draft="demo"))
    assert "embeddings       yes, and nothing else: it is an embedding model, with the pooling cls" in lines
    assert f"context          {POSITIONS} tokens, each text in one forward" in lines
    assert "draft model      demo: no, an encoder generates no text" in lines
    with pytest.raises(EngineFailed, match="is an embedding model and generates no text"):
        Chat(arguments(["--model", str(tmp_path / "model")]))
    path = make_cross_encoder(tmp_path / "reranker", "bert")
    assert "scores           yes, and nothing else: it is a reranker" in list(report(config_of(path)))
    with pytest.raises(EngineFailed, match="is a reranker and generates no text"):
        Chat(arguments(["--model", str(path)]))


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("bert", {"hidden_act": "relu"}, "hidden_act 'relu'; supported is gelu"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
        ("bert", {"is_decoder": True}, "is_decoder True"),
        ("bert", {"architectures": ["BertForTokenClassification"]}, "BertForTokenClassification gives neither"),
        ("xlm-roberta", {"max_position_embeddings": 2}, "max_position_embeddings 2"),
        ("roberta", {"hidden_act": "gelu_new"}, "hidden_act 'gelu_new'; supported is gelu"),
        ("roberta", {"pad_token_id": None}, "pad_token_id None, from which positions are counted"),
        ("camembert", {"position_embedding_type": "relative_key_query"}, "position_embedding_type"),
        ("camembert", {"pad_token_id": -1}, "pad_token_id -1"),
        ("roberta", {"add_cross_attention": True}, "add_cross_attention True"),
        ("roberta", {"architectures": ["RobertaForCausalLM"]}, "RobertaForCausalLM gives neither"),
        ("modernbert", {"hidden_activation": "silu"}, "hidden_activation 'silu'"),
        ("modernbert", {"classifier_activation": "relu"}, "classifier_activation 'relu'"),
    ],
)
def test_encoders_with_another_arithmetic_are_refused_by_name_before_their_weights_are_read(
    tmp_path, family, changes, reason
):
    path = make_encoder(tmp_path / "model", family, **changes)
    (path / "model.safetensors").unlink()
    with pytest.raises(EngineFailed, match=reason):
        encoder_loader.open_encoder(config_of(path))


def test_constants_that_config_json_leaves_out_are_those_of_transformers(tmp_path):
    for family, expected in {"roberta": (1e-12, 2), "camembert": (1e-12, 2), "nomic_bert": (1e-12, 2)}.items():
        path = make_encoder(tmp_path / family, family, type_vocab_size=2)
        config = json.loads((path / "config.json").read_text())
        for name in ("layer_norm_eps", "type_vocab_size", "pad_token_id"):
            config.pop(name, None)
        (path / "config.json").write_text(json.dumps(config))
        opened = encoder_loader.open_encoder(config_of(path))
        found = opened.module.config
        assert (found.layer_norm_eps, found.type_vocab_size) == expected
        assert opened.max_context_tokens == POSITIONS


@pytest.mark.parametrize(("labels", "number"), [({"0": "no", "1": "maybe", "2": "yes"}, 3), (None, 2)])
def test_a_reranker_with_several_classes_is_refused_by_name_before_its_weights_are_read(tmp_path, labels, number):
    path = make_cross_encoder(tmp_path / "model", "modernbert", id2label=labels)
    (path / "model.safetensors").unlink()
    with pytest.raises(EngineFailed, match=rf"has {number} classes \(id2label\), and a score needs exactly 1"):
        encoder_loader.open_encoder(config_of(path))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layer_types": ["full_attention"] * LAYERS}, "layer_types .* multiple of 3"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope of the type 'linear'"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "another quantization"),
    ],
)
def test_modernbert_with_another_pattern_or_rope_is_refused_by_name(tmp_path, changes, reason):
    with pytest.raises(EngineFailed, match=reason):
        encoder_loader.open_encoder(config_of(make_encoder(tmp_path / "model", "modernbert", **changes)))


@pytest.mark.parametrize("family", ["bert", "xlm-roberta"])
def test_an_encoder_is_refused_where_a_model_must_generate_text(tmp_path, family):
    path = make_encoder(tmp_path / "model", family)
    with pytest.raises(EngineFailed, match="model is an encoder, which generates and drafts no text"):
        loader.open_model(config_of(path))


def test_options_that_an_encoder_could_only_ignore_are_refused_by_name(tmp_path):
    path = make_encoder(tmp_path / "model", "bert")
    options = {"compile": "on", "kv_cache": {"bits": 8}, "rope_scaling": {"type": "yarn", "factor": 2}}
    with pytest.raises(EngineFailed, match=r"rope_scaling and compile and kv_cache\.bits cannot be used"):
        encoder_loader.open_encoder(config_of(path, **options))


def test_the_names_and_ropes_of_newer_and_older_checkpoints_are_read(tmp_path):
    path = make_encoder(tmp_path / "modern", "modernbert")
    known = cold(path)._model.hidden([np.array(tokens(50, 1), np.int32)], [None])
    config = json.loads((path / "config.json").read_text())
    bases = {"full_attention": config.pop("global_rope_theta"), "sliding_attention": config.pop("local_rope_theta")}
    ropes = {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()}
    (path / "config.json").write_text(json.dumps({**config, "rope_parameters": ropes}))
    assert mx.array_equal(cold(path)._model.hidden([np.array(tokens(50, 1), np.int32)], [None]), known)
    path = make_encoder(tmp_path / "bert", "bert")
    known = cold(path)._model.hidden([np.array(tokens(50, 1), np.int32)], [None])
    weights: Any = mx.load(str(path / "model.safetensors"))
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for new, name in old.items():
        weights = {key.replace(new, name): weight for key, weight in weights.items()}
    weights["embeddings.position_ids"] = mx.arange(POSITIONS)[None]
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "pt"})
    assert mx.array_equal(cold(path)._model.hidden([np.array(tokens(50, 1), np.int32)], [None]), known)


@pytest.mark.parametrize("family", ["bert", "nomic_bert"])
def test_quantized_weights_give_the_embeddings_of_the_expanded_ones(tmp_path, family):
    path = make_encoder(tmp_path / "model", family)
    module = encoder_loader.open_encoder(config_of(path)).module
    nn.quantize(module, group_size=32, bits=8)
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(module.parameters())))
    quantization = {"quantization": {"group_size": 32, "bits": 8}}
    (path / "config.json").write_text(json.dumps(json.loads((path / "config.json").read_text()) | quantization))
    found = []
    for choice in ("on", "off"):
        runner = cold(path, expand_quantized_weights=choice)
        assert ("stay quantized" in runner.capabilities["quantized_weights"]) is (choice == "off")
        driver = Driver(runner)
        driver.run({0: [request("e", tokens(30, 1), pooling="cls")]})
        found.append(result(driver, "e"))
    np.testing.assert_allclose(*found, atol=1e-4)


def test_the_library_still_computes_modernberts_activation_by_a_hyperbolic_tangent():
    config = ModelConfig("modernbert", 10, 8, 1, 8, 2)
    x = mx.linspace(-4, 4, 101)
    part = ModernBertMLP(config)
    before = part.act(x)
    modernbert_gelu.correct(part)
    assert 1e-4 < float(mx.abs(before - part.act(x)).max()) < 1e-3  # the patch can go when they are the same
