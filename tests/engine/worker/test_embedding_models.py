"""Checkpoints of embedding models: the library's forward with the pooling of sentence-transformers, in any batch."""

import json
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from mlx_vlm.utils import load_model

from engine.__main__ import Chat, arguments
from engine.config import EmbeddingConfig, EngineConfig
from engine.errors import EngineFailed
from engine.processing.pooling import choose_pooling
from engine.protocol import EngineRequest, SamplingParams
from engine.worker import loader
from engine.worker.model_report import report
from engine.worker.patches.bare_names import bare_names
from tests.support.cold_runner import load_cold
from tests.support.driver import Driver
from tests.support.embedding_models import make_embedding_model
from tests.support.families import FAMILIES
from tests.support.zoo import make, prompt

LENGTHS = (1, 17, 40, 70)
TOLERANCE = 3e-6
"""Tolerance of a vector of length 1 in float32: chunks round differently from the whole."""


def config_of(path: Path, **options: Any) -> EngineConfig:
    return EngineConfig.model_validate({"model": str(path), "device": "cpu", "dtype": "float32", **options})


def pooled(hidden: np.ndarray, mode: str) -> np.ndarray:
    """Pooling and normalization as sentence-transformers defines them, of one unpadded text [n, hidden]."""
    vector = hidden[-1] if mode == "lasttoken" else hidden.sum(axis=0) / len(hidden)
    return vector / max(float(np.linalg.norm(vector)), 1e-12)


def library_states(path: Path, ids: list[int]) -> np.ndarray:
    """The last hidden states [n, hidden] of mlx_vlm's own embedding model, which takes no cache."""
    config = json.loads((path / "config.json").read_text())
    own = path.parent / "library"
    own.mkdir(exist_ok=True)
    (own / "config.json").write_text(json.dumps({**config, "model_type": "qwen3_embedding"}))
    if not (own / "model.safetensors").exists():
        (own / "model.safetensors").symlink_to(path / "model.safetensors")
    return np.array(load_model(own)(mx.array([ids])).last_hidden_state[0], np.float64)


@pytest.mark.parametrize("mode", ["lasttoken", "mean_tokens"])
def test_embeddings_are_the_librarys_states_pooled_as_sentence_transformers_does_alone_and_in_a_batch(tmp_path, mode):
    path = make_embedding_model(tmp_path / "model", "qwen3", mode, tie_word_embeddings=True)
    pooling = choose_pooling(EmbeddingConfig(), path)
    texts = {f"e{n}": prompt(n, seed=n) for n in LENGTHS}
    expected = {name: pooled(library_states(path, ids), mode) for name, ids in texts.items()}
    runner = load_cold(config_of(path))
    requests = [
        EngineRequest(name, np.array(ids, np.int32), SamplingParams(1), (), pooling=pooling)
        for name, ids in texts.items()
    ]
    whole, chunked = EngineConfig(), EngineConfig(prefill_chunk_tokens=32, prefill_chunk_tokens_busy=16)
    for arrivals in ([{0: requests}], [{0: [request]} for request in requests]):
        for config in (whole, chunked):
            driver = Driver(runner, config)
            for arriving in arrivals:
                driver.run(arriving)
            for name, known in expected.items():
                [chunk] = driver.chunks[name]
                assert chunk.embedding is not None
                np.testing.assert_allclose(np.frombuffer(chunk.embedding, "<f4"), known, atol=TOLERANCE)


@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_a_decoder_without_output_layer_is_loaded_as_the_whole_model(tmp_path, family):
    whole = load_model(make(tmp_path / "whole", FAMILIES[family]))
    opened = loader.open_model(config_of(make_embedding_model(tmp_path / "bare", family, "lasttoken")))
    ids = mx.array([prompt(20)])
    models: list[Any] = [opened.module, whole]
    found, known = (np.array(one.language_model.model(ids)) for one in models)
    assert np.array_equal(found, known)


def test_the_report_says_that_the_checkpoint_is_for_embeddings_alone(tmp_path):
    path = make_embedding_model(tmp_path / "bare", "qwen3", "lasttoken")
    assert "embeddings       yes, and nothing else: it is an embedding model" in list(report(config_of(path)))


def test_a_chat_in_the_terminal_refuses_an_embedding_model(tmp_path):
    path = make_embedding_model(tmp_path / "bare", "qwen3", "lasttoken")
    with pytest.raises(EngineFailed, match="is an embedding model and generates no text"):
        Chat(arguments(["--model", str(path)]))


def test_names_in_full_are_left_as_they_are_and_the_library_still_needs_the_others(tmp_path):
    path = make_embedding_model(tmp_path / "bare", "qwen3", "lasttoken", tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"layers\.0"):
        load_model(path)  # without the patch, which can go when this no longer fails
    config = json.loads((path / "config.json").read_text())
    with bare_names(config):
        load_model(path)
        load_model(make(tmp_path / "whole", FAMILIES["qwen3"]))
    with pytest.raises(ValueError, match=r"layers\.0"):
        load_model(path)


def test_a_generative_checkpoint_without_its_output_layer_is_still_refused(tmp_path):
    path = make_embedding_model(tmp_path / "bare", "mistral", "lasttoken")
    (path / "modules.json").unlink()
    with pytest.raises(EngineFailed, match=r"could not be loaded: Missing 1 parameters: \s*language_model\.lm_head"):
        loader.open_model(config_of(path))


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("qwen2", {"is_causal": False}, "is_causal is False"),
    ],
)
def test_a_bidirectional_model_is_refused_before_its_weights_are_read(tmp_path, family, changes, reason):
    path = make_embedding_model(tmp_path / "model", family, "mean_tokens")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    (path / "model.safetensors").unlink()
    with pytest.raises(EngineFailed, match=rf"family {family} .*bidirectional \({reason}.*Qwen3-Embedding, are served"):
        loader.open_model(config_of(path))
