"""MTP heads of every family that has one: drafts on = off, alone = batched, from the checkpoint and beside it."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest

from engine.config import EngineConfig
from engine.core.batch import PLAIN, Drafts
from engine.core.request import Request
from engine.protocol import EngineFailed, EngineRequest, Progress, SamplingParams
from engine.worker import loader, mtp_loader
from engine.worker.decode import DecodeGroup
from engine.worker.model_runner import MLXRunner, load_runner
from tests.support.driver import Driver
from tests.support.families import FAMILIES
from tests.support.heads import as_raw_head, put_into_checkpoint, write_head
from tests.support.zoo import Turn, conversation, load, make


@dataclass(frozen=True)
class Served:
    """A family's runner with a random head, the conversation that it must have, and its files."""

    runner: MLXRunner
    turns: dict[str, Turn]
    path: Path

    def request(self, turn: str) -> EngineRequest:
        asked = self.turns[turn]
        sampling = SamplingParams(len(asked.answer.tokens), temperature=0.0)
        return EngineRequest(turn, np.array(asked.token_ids, np.int32), sampling, ())


def open_runner(path: Path) -> MLXRunner:
    return load_runner(EngineConfig(model=str(path)), lambda progress: None)


@pytest.fixture(scope="module", params=mtp_loader.SPLITTERS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    path = make(tmp_path_factory.mktemp("heads") / "model", FAMILIES[request.param])
    turns = conversation(load(path))
    write_head(path)
    return Served(open_runner(path), turns, path)


@pytest.mark.parametrize("num_drafts", [pytest.param(1, marks=pytest.mark.night("three drafts are harder")), 3])
def test_drafts_of_a_head_change_no_token_of_rows_that_join_at_different_steps(served, num_drafts):
    runner, tokens = served.runner, {}
    assert Drafts(num_drafts, "mtp") in runner.drafts
    num_drafted = 0
    for i, turn in enumerate(served.turns):
        row = Request(served.request(turn))
        while not (first := runner.prefill([row], 16).first):
            pass
        tokens[row.id] = list(first[row.id].token_ids)
        for step in range(3 if i < len(served.turns) - 1 else 40):
            for row_id, output in runner.decode(PLAIN if step % 3 == 2 else Drafts(num_drafts, "mtp")).items():
                tokens[row_id] += output.token_ids
                num_drafted += output.num_drafted
    runner.drop(list(tokens))
    assert num_drafted > 0
    for turn, asked in served.turns.items():
        (answer,) = (ids for row_id, ids in tokens.items() if row_id.split("/")[0] == turn)
        assert answer[: len(asked.answer.tokens)] == asked.answer.tokens, turn


def test_second_turn_gets_the_same_tokens_from_the_prefix_cache_with_a_head(served):
    driver = Driver(served.runner, EngineConfig())
    driver.run({0: [served.request("first"), served.request("short")]})
    driver.run({0: [served.request("second")]})
    assert driver.chunks["second"][0].num_cached > 0
    for turn, asked in served.turns.items():
        assert driver.tokens[turn] == asked.answer.tokens, turn


def test_answer_cut_anywhere_goes_on_in_another_engine_with_drafts(served):
    """All cuts of the first turn, three at a time; the other engine has a head, or none."""
    drafts = {"mtp": {"max_draft_tokens": 3, "max_rows": 4}, "prompt_lookup": "off"}
    asked, whole = served.request("first"), tuple(served.turns["first"].answer.tokens)
    for options in (drafts, {"mtp": "off"}):
        num_drafted = 0
        for start in range(1, len(whole), 3):
            driver = Driver(served.runner, EngineConfig.model_validate(options))
            cuts = range(start, min(start + 3, len(whole)))
            begun = [replace(asked, request_id=f"{cut}", progress=(Progress(whole[:cut]),)) for cut in cuts]
            driver.run({0: [*begun[:2], served.request("short")], 2: begun[2:]})
            assert driver.tokens == {
                "short": served.turns["short"].answer.tokens,
                **{f"{cut}": list(whole[cut:]) for cut in cuts},
            }
            num_drafted += driver.core.stats.num_drafted
        assert (num_drafted > 0) == (options is drafts)


def test_head_drafts_what_a_forward_over_the_whole_sequence_predicts(served, monkeypatch):
    """That of the head over all pairs (token p + 1, hidden state p), computed at once and without a cache."""
    drafted: list[mx.array] = []

    def draft(group: DecodeGroup, *args: Any) -> mx.array:
        drafted.append(original(group, *args))
        return drafted[-1]

    original = DecodeGroup._draft
    monkeypatch.setattr(DecodeGroup, "_draft", draft)
    runner, row = served.runner, Request(served.request("short"))
    while not (first := runner.prefill([row], 5).first):
        pass
    tokens = [*served.turns["short"].token_ids, *first[row.id].token_ids]
    runner.decode(Drafts(1, "mtp"))
    runner.drop([row.id])

    language_model, head = runner._language_model, runner._head
    assert head is not None
    positions = np.arange(len(tokens) - 1, dtype=np.int32)[None]
    where = np.broadcast_to(positions, (3, *positions.shape))
    hidden = language_model.states(mx.array([tokens[:-1]], mx.int32), language_model.make_cache(), where)
    states = head(mx.array([tokens[1:]], mx.int32), hidden, head.make_cache(), mx.array(positions))
    expected = np.array(head.logits(states[:, -1:]))[0, 0].argmax()
    assert np.array(drafted[0]).tolist() == [[int(expected)]]


def test_head_in_a_checkpoint_is_the_same_head_as_beside_it(served, tmp_path):
    if served.runner._model.config["model_type"] == "qwen3_next":
        pytest.skip("the library loads converted Qwen3-Next checkpoints without mtp.* tensors only")
    head = served.runner._model.mtp_head
    assert head is not None
    beside = dict(loader.weights_of(head))
    path = Path(shutil.copytree(served.path, tmp_path / "model"))
    shutil.copytree(f"{served.path}-mtp", tmp_path / "model-mtp")
    put_into_checkpoint(path)
    inside = loader.load(EngineConfig(model=str(path)), lambda progress: None)
    assert inside.mtp_head is not None, inside.mtp_status
    found = dict(loader.weights_of(inside.mtp_head))
    assert found.keys() == beside.keys() and all(mx.array_equal(found[name], beside[name]) for name in found)


def test_head_of_a_published_qwen3_next_checkpoint_is_read_with_its_experts_apart_and_norms_less_one(tmp_path):
    """`mtp_head` may be the original checkpoint, of which only the head's tensors are read."""
    path = make(tmp_path / "model", FAMILIES["qwen3_next"])
    head_dir = write_head(path)
    raw = tmp_path / "published"
    raw.mkdir()
    mx.save_safetensors(str(raw / "model.safetensors"), as_raw_head(path), metadata={"format": "pt"})
    shutil.copy(path / "config.json", raw)
    split, published = (
        loader.load(EngineConfig(model=str(path), mtp_head=str(one)), lambda progress: None) for one in (head_dir, raw)
    )
    assert split.mtp_head is not None and published.mtp_head is not None
    expected, found = (dict(loader.weights_of(head)) for head in (split.mtp_head, published.mtp_head))
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        np.testing.assert_allclose(np.array(found[name]), np.array(weight), atol=1e-6, err_msg=name)


def test_exact_verification_is_refused_where_the_library_has_no_exact_verifier(tmp_path):
    path = make(tmp_path / "model", FAMILIES["qwen3_next"])
    write_head(path)
    with pytest.raises(
        EngineFailed, match="mtp_exact is on, but models of the family qwen3_next have no exact verifier"
    ):
        load_runner(EngineConfig(model=str(path), mtp_exact="on"), lambda progress: None)
