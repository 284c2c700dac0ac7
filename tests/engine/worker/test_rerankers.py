"""Checkpoints of rerankers: the library's logits of two tokens after the whole prompt, in any batch."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest

from engine.__main__ import Chat, arguments
from engine.config import EngineConfig
from engine.core.request_check import check_request
from engine.errors import EngineFailed, InvalidRequest
from engine.protocol import EngineRequest, FinishReason, SamplingParams
from engine.worker import loader
from engine.worker.model_report import report
from tests.support.cold_runner import load_cold
from tests.support.driver import Driver
from tests.support.fake_runner import FakeRunner
from tests.support.night import some_at_night
from tests.support.rerankers import NO, YES, describe_reranker, library_log_odds, make_reranker
from tests.support.zoo import prompt

LENGTHS = (1, 17, 40, 70)
TOLERANCE = 1e-5
"""Tolerance of log-odds of about 1 in float32: chunks round differently from the whole."""


def config_of(path: Path, **options: Any) -> EngineConfig:
    return EngineConfig.model_validate({"model": str(path), "device": "cpu", "dtype": "float32", **options})


def scored(name: str, ids: list[int], tokens: tuple[int, int] = (YES, NO)) -> EngineRequest:
    known: dict[str, Any] = {"pooling": "last", "scored_tokens": tokens}
    return EngineRequest(name, np.array(ids, np.int32), SamplingParams(1), (), **known)


def story(num_tokens: int = 40) -> EngineRequest:
    return EngineRequest("story", np.array(prompt(20, seed=9), np.int32), SamplingParams(num_tokens, 0.0), ())


def score(driver: Driver, name: str) -> float:
    [chunk] = driver.chunks[name]
    assert chunk.finish_reason is FinishReason.STOP and not chunk.token_ids and chunk.embedding is not None
    [value] = np.frombuffer(chunk.embedding, "<f4")
    return float(value)


@pytest.mark.parametrize(
    ("family", "changes"),
    some_at_night(
        [
            ("qwen3", {}),
            ("qwen3", {"tie_word_embeddings": True}),
            ("qwen3 4-bit", {}),
            ("qwen3 mxfp4", {}),
            ("phi", {}),
            ("gemma3_text", {}),
            ("qwen3_5_text", {}),
        ],
        [("qwen3", {"tie_word_embeddings": True}), ("qwen3 4-bit", {}), ("gemma3_text", {}), ("qwen3_5_text", {})],
        "the gate has output layers of both kinds, quantized weights, windows and recurrent layers",
        are_sets=True,
    ),
)
def test_scores_are_the_librarys_alone_in_chunks_in_any_order_and_while_a_row_decodes(tmp_path, family, changes):
    path = make_reranker(tmp_path / "model", family, **changes)
    texts = {f"d{n}": prompt(n, seed=n) for n in LENGTHS}
    expected = {name: library_log_odds(path, ids) for name, ids in texts.items()}
    assert len({round(value, 3) for value in expected.values()}) == len(LENGTHS)
    runner = load_cold(config_of(path, expand_quantized_weights="off"))
    requests = [scored(name, ids) for name, ids in texts.items()]
    alone_story = Driver(runner).run({0: [story()]})["story"]
    small = EngineConfig(prefill_chunk_tokens=32, prefill_chunk_tokens_busy=16)
    for config in (EngineConfig(), small):
        for arrivals in ({0: requests}, {0: requests[::-1]}, {0: [story()], 3: requests}, {0: [requests[3]]}):
            driver = Driver(runner, config)
            tokens = driver.run(arrivals)
            for name in {"story", *driver.finish} - {"story"}:
                assert score(driver, name) == pytest.approx(expected[name], abs=TOLERANCE)
            assert tokens.get("story", alone_story) == alone_story
            assert driver.core.prefixes.status().num_entries <= 4  # those of the story alone


def test_scores_of_low_precision_weights_are_finer_than_logits_of_low_precision(tmp_path):
    path = make_reranker(tmp_path / "model", "qwen3")
    runner = load_cold(config_of(path, dtype="bfloat16"))
    driver = Driver(runner)
    driver.run({0: [scored("d", prompt(30))]})
    logits = runner._language_model.logits(mx.zeros((1, 1, runner._language_model.args.hidden_size), mx.bfloat16))
    assert logits.dtype == mx.bfloat16
    value = score(driver, "d")
    assert value != float(mx.array(value).astype(mx.bfloat16))
    assert value == pytest.approx(library_log_odds(path, prompt(30)), abs=0.1)


def test_tokens_that_cannot_be_scored_are_refused_by_field():
    runner = FakeRunner()
    runner.vocab_size = runner.num_embeddings = 512
    with pytest.raises(InvalidRequest, match="scored token id 512 is not between 0 and 511") as error:
        check_request(scored("d", [5], (512, NO)), EngineConfig(), runner)
    assert error.value.field == "scored_tokens"
    with pytest.raises(InvalidRequest, match="scored_tokens needs the pooling last; it is mean"):
        check_request(replace(scored("d", [5]), pooling="mean"), EngineConfig(), runner)


@pytest.mark.parametrize(("family", "changes"), [("cohere", {}), ("gemma2", {}), ("granite", {"logits_scaling": 2.0})])
def test_a_model_that_changes_its_logits_behind_the_output_layer_is_refused_at_the_start(tmp_path, family, changes):
    path = make_reranker(tmp_path / "model", family, **changes)
    with pytest.raises(EngineFailed, match=r"reranker in .* cannot be served: it changes the logits behind"):
        load_cold(config_of(path))


def test_the_report_and_the_terminal_say_that_the_checkpoint_is_for_scores_alone(tmp_path):
    path = make_reranker(tmp_path / "model", "qwen3")
    lines = list(report(config_of(path)))
    assert "scores           yes, and nothing else: it is a reranker" in lines
    assert not any(line.startswith("embeddings") for line in lines)
    with pytest.raises(EngineFailed, match="is a reranker and generates no text"):
        Chat(arguments(["--model", str(path)]))


def test_cross_encoders_of_other_kinds_are_refused_before_their_weights_are_read(tmp_path):
    def refused(match: str) -> None:
        with pytest.raises(EngineFailed, match=match):
            loader.open_config(config_of(path))

    path = make_reranker(tmp_path / "model", "qwen3")
    (path / "model.safetensors").unlink()
    loader.open_config(config_of(path))
    (path / "1_LogitScore" / "config.json").write_text(json.dumps({"true_token_id": 5, "false_token_id": None}))
    refused(r"1_LogitScore/config\.json: true_token_id and false_token_id are 5 and None")
    modules = json.loads((path / "modules.json").read_text())
    (path / "modules.json").write_text(json.dumps(modules[:1]))
    refused("cross-encoders with the modules Transformer cannot be served; those with Transformer, LogitScore")
    (path / "modules.json").unlink()
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3ForSequenceClassification"]}))
    refused("Qwen3ForSequenceClassification has an output layer for classes")
    describe_reranker(path)
    (path / "modules.json").write_text("[{}]")
    refused(r"modules\.json: expected a list of modules")
