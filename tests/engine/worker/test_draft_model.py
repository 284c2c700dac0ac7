"""A separate draft model: no token changes, its drafts are accepted, and models that cannot draft are refused."""

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
from engine.config import EngineConfig
from engine.errors import EngineFailed
from engine.processing.checkpoint import DEMO_MODEL
from engine.protocol import EngineRequest, SamplingParams
from engine.spec_prefill_config import SpecPrefillConfig
from engine.worker.draft_model import DraftModel
from engine.worker.loader import open_model
from engine.worker.model_runner import MLXRunner
from engine.worker.spec_prefill.draft import draft_engine_config, load_draft
from tests.support.cold_runner import load_cold
from tests.support.driver import Driver, fix_prefill_costs
from tests.support.families import FAMILIES
from tests.support.families.family import VOCAB_SIZE
from tests.support.molmo2_family import MOLMO2
from tests.support.night import some_at_night
from tests.support.zoo import make, new_module

NO_CACHE = {"prefix_cache": {"enabled": False}}
GREEDY: dict[str, Any] = {}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "presence_penalty": 0.5}
OFF = {"mtp": "off", "prompt_lookup": "off", **NO_CACHE}


def with_draft(draft: str, **more: Any) -> dict[str, Any]:
    limits = {"max_draft_tokens": 3, "max_rows": 16}
    return {"prompt_lookup": "off", "draft_model": {"model": draft, "limits": limits}, **more}


def plain_checkpoint(path: Path, family: str, seed: int = 0) -> Path:
    """Make a tiny checkpoint of a family with the demo model's tokenizer."""
    known = FAMILIES[family]
    make(path, replace(known, config={**known.config, "vocab_size": 4096}, seed=seed))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, path / name)
    return path


def state_of(draft: DraftModel, token_id: int) -> mx.array:
    """Return the draft model's hidden states of a prompt of one token."""
    token, no_hidden = mx.array([[token_id]], mx.int32), mx.zeros((1, 1, 1))
    return draft(token, no_hidden, draft.make_cache(), mx.zeros((1, 1), mx.int32))


def requests(**sampling: Any) -> list[EngineRequest]:
    prompts = [np.random.default_rng(n).integers(20, 500, 40 + n).astype(np.int32) for n in (0, 17, 40)]
    return [
        EngineRequest(f"r{i}", prompt, SamplingParams(20 + 9 * i, **{"temperature": 0.0, "seed": i} | sampling), ())
        for i, prompt in enumerate(prompts)
    ]


def alone(runner: MLXRunner, request: EngineRequest) -> list[int]:
    return Driver(runner, EngineConfig.model_validate(OFF)).run({0: [request]})[request.request_id]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("drafts")
    return {name: plain_checkpoint(root / name, "qwen3", seed) for seed, name in enumerate(("target", "other"))}


@pytest.fixture(scope="module")
def runner_of(paths: dict[str, Path]) -> Callable[[str], MLXRunner]:
    """Runners are never closed: that would take the main thread's streams from the tests that follow."""

    @cache
    def of(draft: str) -> MLXRunner:
        config = with_draft(str(paths[draft]), model=str(paths["target"]))
        return load_cold(EngineConfig.model_validate(config))

    return of


@pytest.mark.parametrize(
    ("draft", "sampling"),
    some_at_night(
        product(("target", "other"), (GREEDY, SAMPLED)),
        [("target", SAMPLED), ("other", GREEDY)],
        "the gate has both drafts and both samplings",
        are_sets=True,
    ),
)
def test_answers_with_a_draft_model_are_those_without(runner_of, draft, sampling):
    runner, batch = runner_of(draft), requests(**sampling)
    driver = Driver(runner, EngineConfig.model_validate(with_draft(draft, **NO_CACHE)))
    tokens = driver.run({0: batch[:1], 4: batch[1:]})
    assert tokens == {request.request_id: alone(runner, request) for request in requests(**sampling)}
    status = driver.core.figures.speculation
    drafted, accepted = status["draft_model"]["num_drafted"], status["draft_model"]["num_accepted"]
    assert drafted and (accepted == drafted if draft == "target" else accepted < drafted / 2)
    assert status["mtp"]["reason"] == "the configured draft_model drafts instead"


def test_draft_model_reads_the_prompts_of_a_burst_in_one_forward(runner_of):
    runner = runner_of("target")
    driver = Driver(runner, EngineConfig.model_validate(with_draft("target", **NO_CACHE)))
    fix_prefill_costs(driver.core, 0.02, 1e-5)
    tokens = driver.run({0: requests()})
    assert tokens == {request.request_id: alone(runner, request) for request in requests()}
    status = driver.core.figures.speculation["draft_model"]
    assert driver.core.stats.num_bursts == 1
    assert status["num_accepted"] == status["num_drafted"] > 0, "its state is that of each prompt"


def test_conversation_continues_from_the_prefix_cache_with_the_state_of_the_draft_model(runner_of):
    runner, first = runner_of("target"), requests()[2]
    ids = np.concatenate([first.token_ids, alone(runner, first), [30, 40, 50]]).astype(np.int32)
    second = EngineRequest("second", ids, SamplingParams(12, temperature=0.0), ())
    driver = Driver(runner, EngineConfig.model_validate(with_draft("target")))
    driver.run({0: [first]})
    assert driver.run({0: [second]})["second"] == alone(runner, second)
    assert driver.chunks["second"][0].num_cached > 0
    status = driver.core.figures.speculation["draft_model"]
    assert status["num_accepted"] == status["num_drafted"] > 0, "the restored state is that of the whole prompt"


def test_tokens_without_an_embedding_in_the_draft_model_are_read_as_its_last_one():
    small = DraftModel(new_module(FAMILIES["qwen3"].config), 2 * VOCAB_SIZE, 2 * VOCAB_SIZE)
    states = [state_of(small, token) for token in (VOCAB_SIZE - 1, VOCAB_SIZE, 2 * VOCAB_SIZE - 1)]
    assert mx.array_equal(states[0], states[1]) and mx.array_equal(states[0], states[2])
    assert small.logits(states[0]).shape == (1, 1, 2 * VOCAB_SIZE)


def test_tokens_without_a_logit_in_the_target_may_have_no_embedding_in_the_draft_model():
    """The target has embeddings of as many tokens again, as Molmo2 has some; the draft has as many as it has logits."""
    small = DraftModel(new_module(FAMILIES["qwen3"].config), VOCAB_SIZE, 2 * VOCAB_SIZE)
    states = [state_of(small, token) for token in (VOCAB_SIZE - 1, VOCAB_SIZE, 2 * VOCAB_SIZE - 1)]
    assert mx.array_equal(states[0], states[1]) and mx.array_equal(states[0], states[2])
    assert small.logits(states[0]).shape == (1, 1, VOCAB_SIZE)


def test_draft_model_reads_all_tokens_of_two_tables():
    """Molmo2's second one has eight."""
    module = new_module(copy.deepcopy(MOLMO2.config))
    table = module.language_model.model.wte
    table.new_embedding = mx.random.normal(table.new_embedding.shape)
    draft = DraftModel(module, VOCAB_SIZE, VOCAB_SIZE + 8)
    last, other = (state_of(draft, VOCAB_SIZE + i) for i in (7, 6))
    assert not mx.array_equal(last, other)
    beyond = DraftModel(module, VOCAB_SIZE, VOCAB_SIZE + 9)
    assert mx.array_equal(state_of(beyond, VOCAB_SIZE + 8), last)


def test_draft_model_of_a_hybrid_with_a_head_of_its_own_changes_no_token():
    config = EngineConfig.model_validate(with_draft("demo", dtype="float32", **NO_CACHE))
    runner, (request, *_) = load_cold(config), requests()
    driver = Driver(runner, config)
    assert driver.run({0: [request]})[request.request_id] == alone(runner, request)
    assert driver.core.figures.speculation["draft_model"]["num_accepted"] > 0


@pytest.mark.parametrize("sampling", some_at_night([GREEDY, SAMPLED], [SAMPLED], "sampled tokens are harder to keep"))
def test_draft_model_changes_no_token_of_a_target_of_mamba2_layers(paths, sampling, tmp_path):
    target = plain_checkpoint(tmp_path / "target", "mamba2")
    config = EngineConfig.model_validate(with_draft(str(paths["target"]), model=str(target), **NO_CACHE))
    runner = load_cold(config)
    driver, (first, *others) = Driver(runner, config), requests(**sampling)
    tokens = driver.run({0: [first], 4: others})
    assert tokens == {request.request_id: alone(runner, request) for request in requests(**sampling)}
    status = driver.core.figures.speculation["draft_model"]
    assert status["num_accepted"] < status["num_drafted"]


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("mamba2", "layer 0 keeps its state in a ArraysCache"),
        ("olmo3", "keeps its state in a RotatingKVCache"),
        ("internlm2", "InternLM2Model has no embedding by a name that is known"),
    ],
)
def test_family_that_cannot_draft_is_refused_with_the_reason(tmp_path, family, reason):
    path = plain_checkpoint(tmp_path / "draft", family)
    with pytest.raises(EngineFailed, match=reason):
        load_cold(EngineConfig.model_validate(with_draft(str(path), model=str(DEMO_MODEL))))


def test_draft_model_for_a_family_that_cannot_take_drafts_back_is_refused_before_weights_are_read(tmp_path):
    path = plain_checkpoint(tmp_path / "target", "mamba")
    draft = plain_checkpoint(tmp_path / "draft", "qwen3")
    reason = "cannot draft for models of the family mamba: this family overwrites its recurrent states"
    with pytest.raises(EngineFailed, match=f"draft_model {reason}"):
        open_model(EngineConfig.model_validate(with_draft(str(draft), model=str(path))))
    with pytest.raises(EngineFailed, match=f"prompt_lookup with limits {reason}"):
        open_model(EngineConfig.model_validate({"model": str(path), "prompt_lookup": {"max_draft_tokens": 2}}))


def test_draft_model_with_another_tokenizer_is_refused(tmp_path):
    path = plain_checkpoint(tmp_path / "draft", "qwen3")
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = list(vocab)[300:302]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(EngineFailed, match="has another tokenizer than the model"):
        load_cold(EngineConfig.model_validate(with_draft(str(path))))


def test_draft_model_is_opened_as_a_model_is(tmp_path, paths, caplog):
    """Here with the rope as transformers 5 writes it, and a shorter context than the model's, which is said."""
    draft = Path(shutil.copytree(paths["target"], tmp_path / "draft"))
    config = json.loads((draft / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
    (draft / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    settings = EngineConfig.model_validate(with_draft(str(draft), model=str(paths["target"])))
    runner, batch = load_cold(settings), requests()
    driver = Driver(runner, EngineConfig.model_validate(with_draft(str(draft), **NO_CACHE)))
    driver.run({0: batch})
    status = driver.core.figures.speculation["draft_model"]
    assert status["num_accepted"] == status["num_drafted"] > 0
    assert "was trained for 2048 tokens, the model takes 4096" in caplog.text


def test_draft_model_beside_fixed_limits_of_the_head_is_refused():
    config = with_draft("demo", mtp={"max_draft_tokens": 2})
    with pytest.raises(EngineFailed, match="only one of them can draft"):
        load_cold(EngineConfig.model_validate(config))


def test_fields_of_a_draft_models_config_are_checked_as_those_of_a_model(tmp_path, paths):
    draft = plain_checkpoint(tmp_path / "draft", "llama")
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
    reason = r"config.json has hidden_act 'gelu', but the library's module of the family llama does not read it"
    with pytest.raises(EngineFailed, match=rf"draft_model .*{reason}"):
        load_cold(EngineConfig.model_validate(with_draft(str(draft))))
    scoring = draft_engine_config(SpecPrefillConfig(draft_model=str(draft)), "cpu")
    with pytest.raises(EngineFailed, match=reason):
        load_draft(scoring)
