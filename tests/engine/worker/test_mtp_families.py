"""MTP heads of every family that has one: drafts on = off, alone = batched, from the checkpoint and beside it."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from mlx_vlm.speculative.drafters.deepseek_v4_mtp.split import split_deepseek_v4_mtp
from mlx_vlm.speculative.drafters.glm4_moe_lite_mtp.split import split_glm4_moe_lite_mtp
from mlx_vlm.speculative.drafters.glm5_next_mtp.split import split_glm5_next_mtp
from mlx_vlm.speculative.drafters.glm_moe_dsa_mtp.split import split_glm_moe_dsa_mtp

from engine.config import EngineConfig
from engine.core.row import Row
from engine.core.runner import PLAIN, Drafts
from engine.errors import EngineFailed
from engine.protocol import EngineRequest, Progress, SamplingParams
from engine.worker import head_loader, loader
from engine.worker.decode import DecodeGroup
from engine.worker.drafter import DraftingModel
from engine.worker.heads.qwen import QWEN_FORMATS
from engine.worker.model_runner import MLXRunner, load_runner
from tests.support.cold_runner import load_cold
from tests.support.dflash import LibraryDrafter, write_dflash
from tests.support.driver import Driver
from tests.support.families import FAMILIES
from tests.support.gemma4_assistant import LibraryAssistant
from tests.support.heads import as_raw_head, put_into_checkpoint, write_eagle3, write_head
from tests.support.zoo import Turn, conversation, load, make


@dataclass(frozen=True)
class Served:
    """A family's runner with a random head, the conversation that it must have, and its files."""

    runner: MLXRunner
    turns: dict[str, Turn]
    path: Path
    head_dir: Path

    def request(self, turn: str) -> EngineRequest:
        asked = self.turns[turn]
        sampling = SamplingParams(len(asked.answer.tokens), temperature=0.0)
        return EngineRequest(turn, np.array(asked.token_ids, np.int32), sampling, ())


def open_runner(path: Path, head_dir: Path) -> MLXRunner:
    return load_cold(EngineConfig(model=str(path), mtp_head=str(head_dir)))


HEADS: dict[str, tuple[str, Callable[[Path], Path]]] = {
    **{family: (family, write_head) for family in head_loader.FORMATS},
    "eagle3 llama": ("llama", lambda path: write_eagle3(path, for_sglang=True, draft_vocab_size=300)),
    "eagle3 gpt_oss": ("gpt_oss", lambda path: write_eagle3(path, for_sglang=False, draft_vocab_size=300)),
    "eagle3 qwen3_5": ("qwen3_5", lambda path: write_eagle3(path, for_sglang=False)),
    "eagle3 glm_moe_dsa": ("glm_moe_dsa", lambda path: write_eagle3(path, for_sglang=True)),
    **{f"dflash {family}": (family, write_dflash) for family in ("qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe")},
    **{f"dflash {family}": (family, write_dflash) for family in ("qwen3_next", "llama", "gpt_oss")},
}
"""The model's family, and what writes a head for it."""
GATE = (
    *("qwen3_5", "glm4_moe", "glm_moe_dsa", "qwen4_exp", "deepseek_v4", "nemotron_h"),
    *("eagle3 llama", "eagle3 qwen3_5", "dflash qwen3_5", "gemma4"),
)
"""Positions given and not, keys and values of heads, latent ones with those of an indexer, an index with positions and
streams of hidden states, a window, a target of Mamba-2 layers; parts of a vocabulary; a block in one forward; keys and
values of the target alone."""


@pytest.fixture(
    scope="module",
    params=[
        head
        if head in GATE
        else pytest.param(head, marks=pytest.mark.night("the gate has a head of each form, with and without positions"))
        for head in HEADS
    ],
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    family, write = HEADS[request.param]
    path = make(tmp_path_factory.mktemp("heads") / "model", FAMILIES[family])
    turns = conversation(load(path))
    head_dir = write(path)
    return Served(open_runner(path, head_dir), turns, path, head_dir)


@pytest.mark.parametrize("num_drafts", [pytest.param(1, marks=pytest.mark.night("three drafts are harder")), 3])
def test_drafts_of_a_head_change_no_token_of_rows_that_join_at_different_steps(served, num_drafts):
    runner, tokens = served.runner, {}
    assert Drafts(num_drafts, "mtp") in runner.drafts
    num_drafted = 0
    for i, turn in enumerate(served.turns):
        row = Row(served.request(turn))
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


def test_sampled_rows_get_the_same_tokens_with_drafts_as_without(served):
    answers = []
    for options in ({"mtp": {"max_draft_tokens": 2, "max_rows": 4}}, {"mtp": "off"}):
        driver = Driver(served.runner, EngineConfig.model_validate({"prompt_lookup": "off", **options}))
        sampled = [
            replace(served.request(turn), sampling=SamplingParams(12, temperature=1.0, top_p=0.9, seed=seed))
            for seed, turn in enumerate(served.turns)
        ]
        driver.run({0: sampled[:2], 3: sampled[2:]})
        assert (driver.core.stats.num_drafted > 0) == (options["mtp"] != "off")
        answers.append(driver.tokens)
    assert answers[0] == answers[1]


def test_answer_cut_anywhere_goes_on_in_another_engine_with_drafts(served, request):
    """Cuts of the first turn, three at a time, at night all of them, and in an engine without a head, too."""
    is_night = request.config.option.night
    drafts = {"mtp": {"max_draft_tokens": 3, "max_rows": 4}, "prompt_lookup": "off"}
    asked, whole = served.request("first"), tuple(served.turns["first"].answer.tokens)
    for options in (drafts, {"mtp": "off", "prompt_lookup": "off"}) if is_night else (drafts,):
        num_drafted = 0
        for start in range(1, len(whole), 3 if is_night else 7):
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


def chained(head: DraftingModel, behind: mx.array, read: mx.array, num_drafts: int) -> list[int]:
    """Return a head's drafts behind all pairs, each computed of the head's own state and the draft before it."""
    cache, positions, found = head.make_cache(), mx.arange(read.shape[1])[None], list[int]()
    for _ in range(num_drafts):
        read = head(behind, read, cache, positions)[:, -1:]
        found.append(int(np.array(head.logits(read))[0, 0].argmax()))
        behind, positions = mx.array([found[-1:]], mx.int32), positions[:, -1:] + 1
    return found


def test_head_drafts_what_a_forward_over_the_whole_sequence_predicts(served, monkeypatch):
    """That over all pairs (token p + 1, what the head reads at p), computed at once; of a block and of an assistant the
    library's."""
    drafted: list[mx.array | None] = []  # by each step that was launched

    def launch(group: DecodeGroup, drafts: Drafts) -> Any:
        drafted.append(None)
        return launch_step(group, drafts)

    def draft(group: DecodeGroup, *args: Any) -> mx.array:
        drafted[-1] = draft_tokens(group, *args)
        return drafted[-1]

    launch_step, draft_tokens = DecodeGroup._launch, DecodeGroup._draft
    monkeypatch.setattr(DecodeGroup, "_launch", launch)
    monkeypatch.setattr(DecodeGroup, "_draft", draft)
    runner, row = served.runner, Row(served.request("short"))
    language_model, heads = runner._language_model, runner._heads
    assert heads is not None
    head = heads.by_name["mtp"]
    while not (first := runner.prefill([row], 5).first):
        pass
    tokens, num_before = [*served.turns["short"].token_ids, *first[row.id].token_ids], []
    for drafts in (Drafts(1, "mtp"), Drafts(3, "mtp"), PLAIN, PLAIN, Drafts(2, "mtp"), Drafts(1, "mtp")):
        num_before.append(len(tokens))
        tokens += runner.decode(drafts)[row.id].token_ids
    runner.drop([row.id])

    num_checked = 0
    for num, drafts in zip(num_before, drafted, strict=False):
        if drafts is None:
            continue
        where = np.broadcast_to(np.arange(num - 1, dtype=np.int32), (3, 1, num - 1))
        before, behind = mx.array([tokens[: num - 1]], mx.int32), mx.array([tokens[1:num]], mx.int32)
        _, read = language_model.extend_with_logits(before, language_model.make_cache(), where)
        assert read is not None
        found = np.array(drafts)[0].tolist()
        if head.sharing is not None:
            library = LibraryAssistant(served.head_dir, language_model.lm)
            assert found == library.drafts(tokens[: num - 1], tokens[num - 1], len(found))
        elif head.block is None:
            assert found == chained(head, behind, read, len(found))
        else:
            assert found == LibraryDrafter(served.head_dir, language_model.lm).drafts(tokens[num - 1], read, len(found))
        num_checked += len(found)
    assert num_checked >= 6


@pytest.mark.parametrize("family", [family for family in QWEN_FORMATS if family != "qwen3_next"])
def test_head_in_a_checkpoint_is_the_same_head_as_beside_it(family, tmp_path):
    """The library loads converted checkpoints of the other families without a head's tensors only."""
    path = make(tmp_path / "model", FAMILIES[family])
    write_head(path)
    beside = loader.load(EngineConfig(model=str(path)), lambda progress: None).proposers["mtp"].module
    put_into_checkpoint(path)
    inside = loader.load(EngineConfig(model=str(path)), lambda progress: None)
    assert beside is not None and inside.proposers["mtp"].module is not None, inside.proposers["mtp"].status
    expected, found = dict(loader.weights_of(beside)), dict(loader.weights_of(inside.proposers["mtp"].module))
    assert found.keys() == expected.keys() and all(mx.array_equal(found[name], expected[name]) for name in found)


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
    heads: list[Any] = [one.proposers["mtp"].module for one in (split, published)]
    assert None not in heads
    expected, found = (dict(loader.weights_of(head)) for head in heads)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        np.testing.assert_allclose(np.array(found[name]), np.array(weight), atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("family", "split"),
    [
        ("glm4_moe_lite", split_glm4_moe_lite_mtp),
        ("glm_moe_dsa", split_glm_moe_dsa_mtp),
        ("deepseek_v4", split_deepseek_v4_mtp),
        ("glm5_next", split_glm5_next_mtp),
    ],
)
def test_head_that_the_library_split_off_a_published_checkpoint_is_the_same_head(family, split, tmp_path):
    path = make(tmp_path / "model", FAMILIES[family])
    published = write_head(path).rename(tmp_path / "published")
    split(str(published), str(tmp_path / "model-mtp"))
    one, other = (
        loader.load(EngineConfig.model_validate({"model": str(path)} | options), lambda progress: None).proposers["mtp"]
        for options in ({"mtp_head": str(published)}, {})
    )
    assert one.module is not None and other.module is not None
    expected, found = dict(loader.weights_of(one.module)), dict(loader.weights_of(other.module))
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        exact = weight if "e_score_correction_bias" in name or family != "glm4_moe_lite" else weight.astype(mx.bfloat16)
        assert mx.array_equal(found[name], exact.astype(mx.float32)), name


def test_head_of_another_family_is_refused(tmp_path):
    path = make(tmp_path / "model", FAMILIES["glm4_moe"])
    other = write_head(make(tmp_path / "other", FAMILIES["deepseek_v3"]))
    expected = r"model_type is 'deepseek_v3', expected one of glm4_moe_lite_mtp, glm_moe_dsa_mtp, glm4_moe"
    with pytest.raises(EngineFailed, match=expected):
        load_runner(EngineConfig(model=str(path), mtp_head=str(other)), lambda progress: None)


def test_head_of_another_rope_base_is_refused_with_both_values(tmp_path):
    path = make(tmp_path / "model", FAMILIES["glm4_moe"])
    head_dir = write_head(path)
    config = json.loads((head_dir / "config.json").read_text()) | {"rope_theta": 5000.0}
    (head_dir / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineFailed, match=r"does not fit the model: rope_theta is 5000.0, expected 10000.0"):
        load_runner(EngineConfig(model=str(path), mtp_head=str(head_dir)), lambda progress: None)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        (
            "llama",
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}},
            r"reads the layers before \[1, 2, 9\]",
        ),
        ("llama", {"vocab_size": 100}, "does not fit the model: vocab_size is 100, expected 512"),
        ("llama", {"hidden_size": 32, "target_hidden_size": 64}, "has no embedding, and cannot share the model's"),
        ("kimi_linear", {}, "this family overwrites its recurrent states"),
    ],
)
def test_eagle3_head_that_cannot_draft_for_the_model_is_refused_with_the_reason(family, changes, reason, tmp_path):
    path = make(tmp_path / "model", FAMILIES[family])
    head_dir = write_eagle3(path, for_sglang=True)
    config = json.loads((head_dir / "config.json").read_text()) | changes
    (head_dir / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineFailed, match=reason):
        loader.load(EngineConfig(model=str(path), mtp_head=str(head_dir)), lambda progress: None)


def test_exact_verification_is_refused_where_the_library_has_no_exact_verifier(tmp_path):
    path = make(tmp_path / "model", FAMILIES["qwen3_next"])
    write_head(path)
    with pytest.raises(
        EngineFailed, match="mtp_exact is on, but models of the family qwen3_next have no exact verifier"
    ):
        load_runner(EngineConfig(model=str(path), mtp_exact="on"), lambda progress: None)
