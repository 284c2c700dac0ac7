"""The report on a model tells what the engine will allocate, and why a model cannot be served."""

import json
import shutil
from collections import deque
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest

from engine.config import EngineConfig, MemoryConfig
from engine.core.row import Row
from engine.errors import EngineFailed
from engine.processing import checkpoint
from engine.processing.checkpoint import DEMO_MODEL
from engine.protocol import EngineRequest, SamplingParams
from engine.worker import loader, memory
from engine.worker.language_model import LanguageModel
from engine.worker.model_report import RowBytes, check_before_start, check_each, report
from engine.worker.model_runner import load_runner
from tests.support.cold_runner import load_cold
from tests.support.dflash import write_dflash
from tests.support.families import FAMILIES
from tests.support.heads import write_eagle3, write_head
from tests.support.zoo import make

NUM_TOKENS = 300


def lines(model: str, draft: str | None = None) -> dict[str, str]:
    return dict(line.split(maxsplit=1) for line in report(EngineConfig(model=model, device="cpu"), draft))


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen3_5", "nemotron_h", "falcon_h1", "deepseek_v3"])
def test_predicted_row_bytes_are_those_that_a_row_takes(family, tmp_path):
    path = make(tmp_path / "model", FAMILIES[family])
    runner = load_cold(EngineConfig(model=str(path), device="cpu"))
    spec = EngineRequest("row", np.ones(NUM_TOKENS, np.int32), SamplingParams(8), ())
    runner.prefill([Row(spec)], NUM_TOKENS)
    runner.decode()
    predicted = RowBytes.of(LanguageModel(runner._model.module.language_model))
    assert predicted.row(NUM_TOKENS) == runner.memory()["decode_cache_bytes"]
    runner.drop(["row"])


def glm_with_heads(path: Path) -> dict[str, Any]:
    make(path, FAMILIES["glm4_moe"])
    eagle3 = write_eagle3(path, for_sglang=True, draft_vocab_size=300)
    return {"model": str(path), "mtp_head": [str(write_head(path)), str(eagle3)]}


def llama_with_dflash(path: Path) -> dict[str, Any]:
    make(path, FAMILIES["llama"])
    return {"model": str(path), "mtp_head": str(write_dflash(path))}


def gemma_with_assistant(path: Path) -> dict[str, Any]:
    make(path, FAMILIES["gemma4_text"])
    return {"model": str(path), "mtp_head": str(write_head(path))}


def demo_with_draft_model(path: Path) -> dict[str, Any]:
    return {"draft_model": {"model": str(DEMO_MODEL / "draft"), "limits": "auto"}}


@pytest.mark.parametrize(
    "config",
    [
        lambda path: {},
        demo_with_draft_model,
        pytest.param(glm_with_heads, marks=pytest.mark.night("the gate reports on a head and a draft model")),
        pytest.param(llama_with_dflash, marks=pytest.mark.night("the gate reports on a head and a draft model")),
        pytest.param(gemma_with_assistant, marks=pytest.mark.night("the gate reports on a head and a draft model")),
    ],
    ids=["head", "draft model", "heads", "DFlash", "assistant"],
)
def test_weights_and_rows_are_told_with_those_of_models_that_draft(tmp_path, monkeypatch, config):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    given = EngineConfig.model_validate({"device": "cpu", **config(tmp_path / "model")})
    told = [line.split(maxsplit=1) for line in report(given)]
    loaded = loader.load(given, lambda progress: None)
    weights = next(text for label, text in told if label == "weights")
    assert weights == f"{loaded.num_weight_bytes / 2**30:.3f} GiB"
    runner = load_runner(given, lambda progress: None)
    assert runner.drafts
    row = next(text for label, text in told if label == "row")
    length = int(row.split()[-2])
    assert row.startswith(f"{runner.costs.prompt(length) / 2**30:.3f} GiB for ")
    per_token = next(int(text.split()[1]) for label, text in told if label == "kv_cache.bits")
    assert per_token == runner.costs.token_bytes


def test_a_draft_model_of_a_repository_is_not_downloaded_for_the_report(monkeypatch):
    monkeypatch.setattr(
        checkpoint.huggingface_hub, "snapshot_download", lambda *args, **kwargs: pytest.fail("downloads")
    )
    given = {"device": "cpu", "draft_model": {"model": "org/small", "limits": "auto"}}
    told = dict(line.split(maxsplit=1) for line in report(EngineConfig.model_validate(given)))
    assert told["not"] == "counted      org/small, which drafts and is a repository"
    assert told["weights"] == "0.035 GiB", "no head either: the draft model replaces it"


def test_the_longest_context_is_the_longest_row_that_fits():
    row = RowBytes(per_token=10, per_window_slot=3, window_slots=40, fixed=500)
    longest = row.longest(100_000)
    assert row.row(longest) <= 100_000 < row.row(longest + 1)
    assert row.longest(0) == 0 and RowBytes(0, 3, 40, 500).longest(10**6) == 2**31


def test_the_demo_model_has_everything():
    told = lines("demo", draft="demo")
    assert told["family"] == "qwen3_5: can be served"
    assert told["media"] == "text, image, video" and told["context"] == "32768 tokens"
    assert "no" not in told["sparse"] and "same tokenizer" in told["draft"]


def test_bytes_and_longest_context_are_told_for_each_number_of_bits_or_why_it_is_refused(tmp_path):
    def told(path) -> list[str]:
        found = report(EngineConfig(model=str(path), device="cpu"))
        return [line.split(maxsplit=1)[1] for line in found if line.startswith("kv_cache.bits")]

    demo = told("demo")
    longest = [int(line.split()[-5]) for line in demo]
    starts = [line.split(", ")[0] for line in demo]
    assert starts == ["16: 3072 bytes per token", "8: 864 bytes per token", "4: 480 bytes per token"]  # with the head
    assert longest == sorted(longest) and longest[2] > 1.5 * longest[0]
    refused = told(make(tmp_path / "model", FAMILIES["qwen3"]))
    assert refused[1] == "8: no, layer 0 has keys or values of 16 dimensions per head, expected a multiple of 64 or 32"


def test_weights_are_not_read(tmp_path):
    path = make(tmp_path / "model", FAMILIES["qwen3"])
    before = mx.get_active_memory()
    deque(report(EngineConfig.model_validate({"device": "cpu", **demo_with_draft_model(tmp_path)})), maxlen=0)
    lines("demo")
    told = lines(str(path))
    assert mx.get_active_memory() - before < 2**16
    assert told["weights"].endswith("GiB") and told["MTP"].startswith("head")


def test_a_model_that_does_not_fit_is_an_error_with_both_sizes(monkeypatch):
    monkeypatch.setattr(memory, "default_limit_bytes", lambda: 2**20)
    with pytest.raises(EngineFailed, match=r"the weights of demo take 0.039 GiB .* the limit here is 0.001 GiB"):
        lines("demo")


def refusal(tmp_path, config: dict, **settings) -> str:
    """Return why a checkpoint with these entries of config.json is refused before the start."""
    shutil.copytree(DEMO_MODEL / "draft", tmp_path, dirs_exist_ok=True)
    own = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(own | config))
    with pytest.raises(EngineFailed) as error:
        check_before_start(EngineConfig(model=str(tmp_path), device="cpu", **settings))
    return str(error.value)


def test_model_that_cannot_be_served_is_refused_before_the_start_with_value_and_remedy(tmp_path):
    check_before_start(EngineConfig(device="cpu"))
    told = refusal(tmp_path, {"model_type": "nosuch"})
    assert f"family nosuch ({tmp_path}) cannot be served: mlx-vlm " in told and "use a checkpoint of another" in told
    assert "config.json has no model_type" in refusal(tmp_path, {"model_type": None})
    assert "cannot be served: its attention is bidirectional" in refusal(tmp_path, {"is_causal": False})
    assert "could not be loaded: Missing " in refusal(tmp_path, {"num_hidden_layers": 9})


def test_weights_beyond_the_limit_of_memory_are_refused_before_the_start():
    def told(**limits: float) -> str:
        with pytest.raises(EngineFailed) as error:
            check_before_start(EngineConfig(device="cpu", memory=MemoryConfig.model_validate(limits)))
        return str(error.value)

    assert "the weights of demo take 0.039 GiB in float32; the limit here is 0.030 GiB (memory.limit_gb)" in told(
        limit_gb=0.03
    )
    assert "of which 0.080 GiB stay free (memory.headroom_gb). Use a smaller" in told(limit_gb=0.1, headroom_gb=0.08)


def test_family_of_a_repository_is_refused_before_its_weights_are_downloaded(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "nosuch", "vocab_size": 8, "max_position_embeddings": 64}')

    def snapshot(repository: str, revision: str | None, allow_patterns: list[str]) -> str:
        assert "*.safetensors" not in allow_patterns
        return str(tmp_path)

    monkeypatch.setattr(checkpoint.huggingface_hub, "snapshot_download", snapshot)
    for check in (check_before_start, loader.open_model):
        with pytest.raises(EngineFailed, match="does not implement it"):
            check(EngineConfig(model="org/model", device="cpu"))


def test_weights_of_a_repository_are_compared_with_the_memory_before_their_download(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text((DEMO_MODEL / "config.json").read_text())
    monkeypatch.setattr(checkpoint.huggingface_hub, "snapshot_download", lambda *args, **kwargs: str(tmp_path))
    config = EngineConfig(model="org/model", device="cpu")
    check_before_start(config, 2**20)
    with pytest.raises(EngineFailed, match=r"weights of org/model take 1048576.000 GiB in the repository; the limit"):
        check_before_start(config, 2**50)


def test_several_models_are_reported_on_one_after_the_other(tmp_path):
    found = {one["model"]: one for one in check_each(["demo", str(tmp_path)])}
    assert found["demo"]["reason"] is None and found["demo"]["lines"]["family"] == "qwen3_5: can be served"
    assert found["demo"]["lines"]["longest context"].startswith("32768 tokens")
    assert "config.json: the file is missing" in found[str(tmp_path)]["reason"]
