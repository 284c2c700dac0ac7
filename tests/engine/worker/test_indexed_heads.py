"""MTP heads whose layer has an index: their drafts are those of the library's heads, in every state of a row."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from mlx_vlm.speculative.drafters.hy_v4_mtp.split import split_hy_v4_mtp
from mlx_vlm.speculative.drafters.qwen4_exp_mtp.split import split_qwen4_exp_mtp

from engine.config import EngineConfig
from engine.errors import EngineFailed
from engine.protocol import EngineRequest, SamplingParams
from engine.worker import loader
from engine.worker.decode import DecodeGroup
from tests.support.cold_runner import load_cold
from tests.support.driver import Driver, fix_prefill_costs
from tests.support.families import FAMILIES
from tests.support.heads import _drawn, write_head, write_published_hy_v4
from tests.support.indexed_heads import hy_v4_module, qwen4_module
from tests.support.zoo import NUM_TOKENS, conversation, empty_cache, load, make

MODULES: dict[str, Callable[[dict[str, Any]], Any]] = {"qwen4_exp": qwen4_module, "hy_v4": hy_v4_module}
"""The library's head by the model_type of the target."""
DRAFTS = {
    "mtp": {"max_draft_tokens": 3, "max_rows": 4},
    "prompt_lookup": "off",
    "prefix_cache": {"min_tokens": 4},
}
"""Three drafts in a step, and snapshots of short answers."""
PACKED_RTOL, PACKED_ATOL = 2**-3, 2**-5
"""Differences of weights of about 1 that were packed twice, with 3 bits of a mantissa."""


def head_weights(path: Path, **options: Any) -> dict[str, mx.array]:
    found = loader.load(EngineConfig.model_validate({"model": str(path)} | options), lambda progress: None)
    assert found.proposers["mtp"].module is not None, found.proposers["mtp"].status
    return dict(loader.weights_of(found.proposers["mtp"].module))


def read_tensors(directory: Path) -> dict[str, mx.array]:
    tensors: dict[str, mx.array] = dict(mx.load(str(directory / "model.safetensors")))  # type: ignore[arg-type]
    mx.eval(tensors)
    return tensors


def configure(head_dir: Path, change: dict[str, Any]) -> None:
    config = json.loads((head_dir / "config.json").read_text())
    config["text_config"] |= change
    (head_dir / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "family", [pytest.param("hy_v4", marks=pytest.mark.night("Qwen4 has more state")), "qwen4_exp"]
)
def test_drafts_are_those_of_the_librarys_head_through_bursts_joins_rejections_and_snapshots(
    family, tmp_path, monkeypatch
):
    """All drafts of each step against the library's head, which reads the whole sequence anew before each step: of
    prompts computed together and continued from snapshots, of rows that join others and leave before them."""
    path = make(tmp_path / "model", FAMILIES[family])
    target = load(path)
    turns = conversation(target)
    runner = load_cold(EngineConfig(model=str(path), mtp_head=str(write_head(path))))
    head = MODULES[family](FAMILIES[family].config)
    served: Any = runner._model.proposers["mtp"].module
    head.load_weights(list(loader.weights_of(served)))
    drafted: list[tuple[list[str], mx.array, mx.array]] = []

    def draft(group: DecodeGroup, *args: Any) -> mx.array:
        tokens = draft_tokens(group, *args)
        drafted.append(([row.row.id.split("/")[0] for row in group.rows], group._lengths, tokens))
        return tokens

    draft_tokens = DecodeGroup._draft
    monkeypatch.setattr(DecodeGroup, "_draft", draft)
    driver = Driver(runner, EngineConfig.model_validate(DRAFTS))
    fix_prefill_costs(driver.core, forward_s=0.1, token_s=1e-4)  # one forward for both prompts is the fastest
    requests = {
        name: EngineRequest(
            name, np.array(turn.token_ids, np.int32), SamplingParams(NUM_TOKENS[name], temperature=0.0), ()
        )
        for name, turn in turns.items()
    }
    driver.run({0: [requests["first"], requests["short"]]})
    driver.run({0: [replace(requests["short"], request_id="again")], 2: [requests["second"]]})
    assert driver.chunks["second"][0].num_cached > len(turns["first"].token_ids), "it continues an answer"
    assert driver.core.stats.num_drafted > driver.core.stats.num_accepted
    assert any(len(names) > 1 for names, _, _ in drafted)

    sequences = {name: [*turn.token_ids, *turn.answer.tokens] for name, turn in turns.items()}
    sequences["again"] = sequences["short"]
    checked: set[str] = set()
    for names, lengths, tokens in drafted:
        for name, length, found in zip(names, np.array(lengths).tolist(), np.array(tokens).tolist(), strict=True):
            before, newest = sequences[name][:length], sequences[name][length : length + 1]
            if newest:
                assert found == library_drafts(target, head, before, newest[0], len(found)), (name, length)
                checked.add(name)
    assert checked == set(sequences)


def library_drafts(target: Any, head: Any, token_ids: list[int], newest: int, num_drafts: int) -> list[int]:
    """Return the library's greedy drafts after `newest`, the token after `token_ids`."""
    ids = mx.array([token_ids], mx.int32)
    hidden = target(ids, cache=empty_cache(target), return_hidden=True).hidden_states[-1]
    head.reset(target)
    head.prefill_from_target_hidden(ids, hidden, newest, None, greedy=True)
    drafts = head.draft_block(newest, hidden[:, -1:], None, num_drafts + 1, None, greedy=True)
    return np.array(drafts)[0].tolist()


def test_heads_of_qwen4_published_split_and_in_a_checkpoint_have_the_tensors_of_the_librarys_module(tmp_path):
    path = make(tmp_path / "model", FAMILIES["qwen4_exp"])
    published = write_head(path).rename(tmp_path / "published")
    expected = _drawn(qwen4_module(FAMILIES["qwen4_exp"].config), seed=0)
    split_qwen4_exp_mtp(str(published), str(tmp_path / "model-mtp"))
    whole = tmp_path / "whole"
    shutil.copytree(path, whole)
    tensors = read_tensors(path) | read_tensors(published)
    mx.save_safetensors(str(whole / "model.safetensors"), tensors, metadata={"format": "mlx"})
    for found in (head_weights(path, mtp_head=str(published)), head_weights(path), head_weights(whole)):
        assert found.keys() == expected.keys()
        assert all(mx.array_equal(found[name], weight) for name, weight in expected.items())


def test_published_and_split_heads_of_hy_v4_have_the_tensors_of_the_librarys_module(tmp_path):
    """Published with 8 bits, for which the dimensions of a head must be multiples of 32."""
    config = FAMILIES["hy_v4"].config | {"qk_nope_head_dim": 32}
    path = make(tmp_path / "model", replace(FAMILIES["hy_v4"], config=config))
    expected = write_published_hy_v4(tmp_path / "published", config)
    split_hy_v4_mtp(str(tmp_path / "published"), str(tmp_path / "model-mtp"))
    published, split = head_weights(path, mtp_head=str(tmp_path / "published")), head_weights(path)
    assert published.keys() == split.keys() == expected.keys()
    for name, weight in expected.items():
        assert mx.array_equal(published[name], split[name]), name
        np.testing.assert_allclose(np.array(published[name]), np.array(weight), PACKED_RTOL, PACKED_ATOL, err_msg=name)


@pytest.mark.parametrize(
    ("family", "change", "reason"),
    [
        ("qwen4_exp", {"hc_count": 4}, "does not fit the model: hc_count is 4, expected 2"),
        ("qwen4_exp", {"hidden_size": 32}, "does not fit the model: hidden_size is 32, expected 64"),
        ("qwen4_exp", {"indexer_budget": 16}, "does not fit the model: indexer_budget is 16, expected 8"),
        ("hy_v4", {"hidden_size": 32}, "does not fit the model: hidden_size is 32, expected 64"),
        ("hy_v4", {"index_topk": 16}, "does not fit the model: index_topk is 16, expected 8"),
        ("hy_v4", {"kv_lora_rank": 64}, "could not be loaded: Expected shape"),
    ],
)
def test_head_that_does_not_fit_is_refused_with_both_values(family, change, reason, tmp_path):
    path = make(tmp_path / "model", FAMILIES[family])
    head_dir = write_head(path)
    configure(head_dir, change)
    with pytest.raises(EngineFailed, match=reason):
        loader.load(EngineConfig(model=str(path), mtp_head=str(head_dir)), lambda progress: None)


@pytest.mark.parametrize(
    ("family", "missing"),
    [("qwen4_exp", "mtp.hyper_connection_mixer.hc_norm.weight"), ("hy_v4", "decoder.self_attn.indexer.wk.weight")],
)
def test_head_without_one_of_its_tensors_is_refused_with_its_name(family, missing, tmp_path):
    path = make(tmp_path / "model", FAMILIES[family])
    head_dir = write_head(path)
    weights = read_tensors(head_dir)
    del weights[missing]
    mx.save_safetensors(str(head_dir / "model.safetensors"), weights, metadata={"format": "pt"})
    with pytest.raises(EngineFailed, match=rf"Missing 1 parameters: {missing.removeprefix('mtp.')}"):
        loader.load(EngineConfig(model=str(path), mtp_head=str(head_dir)), lambda progress: None)


@pytest.mark.parametrize("family", list(MODULES))
def test_exact_verification_is_refused_as_the_families_have_no_verifier_that_the_engine_can_use(family, tmp_path):
    path = make(tmp_path / "model", FAMILIES[family])
    head_dir = write_head(path)
    with pytest.raises(EngineFailed, match=f"models of the family {family} have no exact verifier"):
        load_cold(EngineConfig(model=str(path), mtp_head=str(head_dir), mtp_exact="on"))
