"""Several heads at once: each is a proposer of its own, and drafts by turns change no token and no later draft."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest import mock

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest

from engine.config import EngineConfig
from engine.core.row import Row
from engine.core.runner import PLAIN, Drafts, PromptChunk
from engine.errors import EngineFailed
from engine.processing.checkpoint import read_config
from engine.protocol import EngineRequest, SamplingParams
from engine.worker import loader, memory_costs
from engine.worker.decode import DecodeGroup
from engine.worker.drafter import Drafter
from engine.worker.drafting import hidden_bytes, most_pending
from engine.worker.kv_cache import BatchCache
from engine.worker.layer_outputs import class_of
from engine.worker.model_report import report
from engine.worker.model_runner import MLXRunner, load_runner
from engine.worker.snapshot import StateSnapshot
from tests.support.cold_runner import load_cold
from tests.support.dflash import write_dflash
from tests.support.driver import Driver
from tests.support.families import FAMILIES
from tests.support.heads import write_eagle3, write_head
from tests.support.zoo import Turn, conversation, load, make, prompt


def eagle3(path: Path) -> Path:
    return write_eagle3(path, for_sglang=True, draft_vocab_size=300)


KINDS: dict[str, dict[str, Callable[[Path], Path]]] = {
    "qwen3_5": {"mtp": write_head, "eagle3": eagle3, "dflash": write_dflash},
    "glm4_moe": {"mtp": write_head, "eagle3": eagle3},
    "gemma4_text": {"mtp": write_head, "eagle3": eagle3},
    "llama": {"mtp": eagle3, "dflash": write_dflash},
}
"""By family, names of the proposers and what writes their heads: positions given and recurrent layers; keys and values
of heads; a head that shares the target's beside one with its own; two that read outputs of layers."""


@dataclass(frozen=True)
class Several:
    """A model with several heads, and the conversation that it must have."""

    path: Path
    head_dirs: dict[str, Path]
    turns: dict[str, Turn]
    runner: MLXRunner

    @property
    def steps(self) -> list[Drafts]:
        """Ways to draft such that each head drafts behind each other one, and behind plain steps."""
        names = [*self.head_dirs, *reversed(self.head_dirs)]
        return [PLAIN, *(Drafts(3, name) for name in names), PLAIN, PLAIN, *(Drafts(1, name) for name in names)]

    def request(self, turn: str) -> EngineRequest:
        asked = self.turns[turn]
        sampling = SamplingParams(len(asked.answer.tokens), temperature=0.0)
        return EngineRequest(turn, np.array(asked.token_ids, np.int32), sampling, ())


@pytest.fixture(scope="module", params=KINDS)
def several(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Several:
    path = make(tmp_path_factory.mktemp("several") / "model", FAMILIES[request.param])
    turns = conversation(load(path))
    head_dirs = {name: write(path) for name, write in KINDS[request.param].items()}
    runner = load_cold(EngineConfig(model=str(path), mtp_head=tuple(map(str, head_dirs.values()))))
    return Several(path, head_dirs, turns, runner)


def begun(runner: MLXRunner, row: Row, chunk: int = 16) -> list[int]:
    """Compute a prompt; return the first token."""
    while not (first := runner.prefill([row], chunk).first):
        pass
    return list(first[row.id].token_ids)


def answers(
    runner: MLXRunner, requests: Sequence[EngineRequest], steps: Sequence[Drafts], apart: int = 3
) -> tuple[dict[str, list[int]], int]:
    """Decode rows that join `apart` steps after each other; return their tokens and how many were drafted."""
    tokens, num_drafted, left = dict[str, list[int]](), 0, {one.request_id: one.sampling.max_tokens for one in requests}
    waiting, ways, step = [Row(one) for one in requests], cycle(steps), 0
    while waiting or tokens.keys() & left.keys():
        if waiting and step % apart == 0:
            row = waiting.pop(0)
            tokens[row.spec.request_id] = begun(runner, row)
        step += 1
        for row_id, output in runner.decode(next(ways)).items():
            name = row_id.rpartition("/")[0]
            tokens[name] += output.token_ids
            num_drafted += output.num_drafted
            if len(tokens[name]) >= left[name]:
                del left[name]
                runner.drop([row_id])
    return {one.request_id: tokens[one.request_id][: one.sampling.max_tokens] for one in requests}, num_drafted


def test_each_head_is_offered_under_a_name_of_its_own(several):
    assert list(dict.fromkeys(one.proposer for one in several.runner.drafts if not one.is_selective)) == [
        *several.head_dirs
    ]
    assert not several.runner.no_drafts.keys() & several.head_dirs.keys()
    named = several.runner.capabilities["heads"]
    assert {name: text.split(": ")[1] for name, text in named.items()} == {
        name: str(path) for name, path in several.head_dirs.items()
    }


def test_drafts_of_all_heads_by_turns_change_no_token_of_rows_that_join_and_leave(several):
    requests = [several.request(turn) for turn in several.turns]
    expected = {turn: asked.answer.tokens for turn, asked in several.turns.items()}
    found, num_drafted = answers(several.runner, requests, several.steps)
    assert found == expected and num_drafted > 0
    for name in several.head_dirs:
        found, num_drafted = answers(several.runner, requests, [Drafts(2, name), Drafts(3, name), PLAIN])
        assert found == expected and num_drafted > 0, name
    assert answers(several.runner, requests, [PLAIN]) == (expected, 0)


def test_sampled_rows_get_the_tokens_that_they_get_alone_without_drafts(several):
    sampling = SamplingParams(14, temperature=1.0, top_p=0.9)
    requests = [
        replace(several.request(turn), sampling=replace(sampling, seed=seed)) for seed, turn in enumerate(several.turns)
    ]
    expected: dict[str, list[int]] = {}
    for one in requests:
        expected |= answers(several.runner, [one], [PLAIN])[0]
    found, num_drafted = answers(several.runner, requests, several.steps)
    assert found == expected and num_drafted > 0


class DraftSpy:
    """Records the drafts of each step by the way to draft and the tokens in the cache of the first row.

    Drafts of a block depend on its length.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.seen: dict[tuple[Drafts, int], list[int]] = {}
        original = DecodeGroup._draft

        def draft(group: DecodeGroup, drafts: Drafts, *args: Any) -> mx.array:
            found = original(group, drafts, *args)
            self.seen[drafts, int(np.array(group._lengths)[0])] = np.array(found)[0].tolist()
            return found

        monkeypatch.setattr(DecodeGroup, "_draft", draft)

    def taken(self) -> dict[tuple[Drafts, int], list[int]]:
        seen, self.seen = self.seen, {}
        return seen


def agree(found: dict[tuple[Drafts, int], list[int]], alone: dict[tuple[Drafts, int], list[int]]) -> int:
    """Compare drafts at the same places, where both have some; return how many places there are."""
    common = found.keys() & alone.keys()
    assert {place: found[place] for place in common} == {place: alone[place] for place in common}
    return len(common)


def test_each_head_drafts_what_it_drafts_when_it_is_the_only_one(several, monkeypatch):
    """By turns with others, with rows that come and go beside it, and from snapshots of prompt and answer."""
    spy, alone = DraftSpy(monkeypatch), dict[tuple[Drafts, int], list[int]]()
    asked = replace(several.request("first"), sampling=SamplingParams(40, temperature=0.0))
    for name, head_dir in several.head_dirs.items():
        only = load_cold(EngineConfig(model=str(several.path), mtp_head=str(head_dir)))
        answers(only, [asked], [Drafts(3, "mtp")])
        answers(only, [asked], [Drafts(1, "mtp")])
        alone |= {(Drafts(one.num_tokens, name), at): drafts for (one, at), drafts in spy.taken().items()}
    runner, expected = several.runner, answers(several.runner, [asked], [PLAIN])[0]["first"]
    for requests in ([asked], [asked, several.request("short")]):
        assert answers(runner, requests, several.steps)[0]["first"] == expected
        assert agree(spy.taken(), alone) >= 6 * len(several.head_dirs)

    for decodes in (False, True):
        row = Row(asked)
        if decodes:
            said = begun(runner, row)
            for drafts in several.steps[:6]:
                said += runner.decode(drafts)[row.id].token_ids
            kept = runner.snapshot_row(row.id)
            assert kept is not None
            snapshot, ids = kept.snapshot, [*asked.token_ids.tolist(), *kept.token_ids.tolist()]
        else:
            runner.prefill([row], 21)
            snapshot, ids = runner.snapshot([row]), asked.token_ids.tolist()
        runner.drop([row.id])
        spy.taken()
        assert isinstance(snapshot, StateSnapshot)
        *_, imported = runner.import_snapshot(runner.export_snapshot(snapshot), snapshot.num_tokens)
        told = len(ids) - len(asked.token_ids)
        ids = [*ids, *expected[told : told + 1]]
        for restored in (snapshot, imported):
            for name in several.head_dirs:
                again = Row(replace(asked, request_id="again", token_ids=np.array(ids, np.int32)))
                assert restored is not None
                runner.restore([again], restored)
                said = begun(runner, again)
                while len(said) < 8:
                    said += runner.decode(Drafts(3, name))[again.id].token_ids
                runner.drop([again.id])
                assert said == expected[told + 1 : told + 1 + len(said)], (decodes, name)
                assert agree(spy.taken(), alone) >= 3, (decodes, name)


def test_second_turn_gets_the_same_tokens_from_the_prefix_cache(several):
    driver = Driver(several.runner, EngineConfig())
    driver.run({0: [several.request("first"), several.request("short")]})
    driver.run({0: [several.request("second")]})
    assert driver.chunks["second"][0].num_cached > 0
    for turn, asked in several.turns.items():
        assert driver.tokens[turn] == asked.answer.tokens, turn
    assert several.head_dirs.keys() <= driver.core.figures.speculation.keys()
    off = Driver(several.runner, EngineConfig(mtp="off", prompt_lookup="off"))
    off.run({0: [several.request("short")]})
    assert {off.core.figures.speculation[name]["mode"] for name in several.head_dirs} == {"off"}
    assert off.core.stats.num_drafted == 0 and off.tokens["short"] == several.turns["short"].answer.tokens


def test_prompts_in_one_forward_leave_each_head_what_it_has_alone(several):
    assert several.runner.no_bursts is None
    chunks = {"long": (40, (17, 4)), "short": (23, (9, 12))}  # tokens of a prompt, and of the first two chunks
    runner = several.runner

    def row_of(name: str) -> Row:
        ids = np.array(prompt(chunks[name][0], seed=chunks[name][0]), np.int32)
        return Row(EngineRequest(name, ids, SamplingParams(4, temperature=0.0), ()))

    def left_by(rows: list[Row]) -> list[np.ndarray]:
        prompts = [runner._prompts[row.id] for row in rows]
        found = [
            np.array(array[..., :20, :])
            for one in prompts
            for cache in one.head_caches
            for layer in cache
            for array in layer.state
        ]
        found += [np.array(one.hidden) for one in prompts]
        runner.drop([row.id for row in rows])
        return found

    alone = []
    for name, (_, sizes) in chunks.items():
        row = row_of(name)
        for size in sizes:
            runner.prefill([row], size)
        alone.append(left_by([row]))
    rows = [row_of(name) for name in chunks]
    for i in range(2):
        runner.prefill_burst([PromptChunk(row, chunks[row.spec.request_id][1][i]) for row in rows])
    together = left_by(rows)
    expected = [*alone[0][:-1], *alone[1][:-1], alone[0][-1], alone[1][-1]]
    assert len(together) == len(expected) > 2
    for one, other in zip(together, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.parametrize("is_undone", [True, False])
def test_a_join_that_fails_at_the_last_head_leaves_the_rows_of_all_as_they_were(several, monkeypatch, is_undone):
    """Rows whose heads could not be set back are decoded without them."""
    runner, old = several.runner, Row(several.request("first"))
    said = begun(runner, old)
    for drafts in several.steps[:4]:
        said += runner.decode(drafts)[old.id].token_ids
    drafters = runner._batch._groups[old.decode_group]._drafters
    assert drafters is not None
    *_, last = (one for one in drafters.by_name.values() if one.layers)

    def fails(cache: BatchCache, *args: Any) -> None:
        if cache is last._cache:
            raise RuntimeError("no memory for the last head")
        original(cache, *args)

    original = BatchCache.join
    with monkeypatch.context() as patch:
        patch.setattr(BatchCache, "join", fails)
        if not is_undone:
            patch.setattr(Drafter, "keep_first", mock.Mock(side_effect=RuntimeError("no memory either")))
        with pytest.raises(RuntimeError, match="last head"):
            begun(runner, Row(several.request("short")))
    is_alone = len(several.head_dirs) == 1 or next(iter(drafters.by_name.values())) is last
    assert (runner._batch._groups[old.decode_group]._drafters is drafters) is (is_undone or is_alone)
    ways, expected = cycle(several.steps), several.turns["first"].answer.tokens
    while len(said) < len(expected):
        said += runner.decode(next(ways))[old.id].token_ids
    runner.drop([old.id])
    assert said[: len(expected)] == expected


def test_a_layer_of_a_head_records_nothing_for_the_head_before_it(tmp_path):
    """EAGLE-3 reads the output of the layer whose class the model's own head has."""
    path = make(tmp_path / "model", FAMILIES["glm4_moe"])
    head = eagle3(path)
    config = json.loads((head / "config.json").read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"][-1] = read_config(path)["num_hidden_layers"]
    (head / "config.json").write_text(json.dumps(config))
    heads = (str(head), str(write_head(path)))
    model = loader.load(EngineConfig(model=str(path), mtp_head=heads), lambda progress: None)
    own, layer = model.proposers["mtp-2"].module, model.module.language_model.model.layers[-1]
    assert own is not None and type(own.layer) is class_of(layer) is not type(layer)


def test_memory_counts_the_caches_and_hidden_states_of_all_heads(several):
    singles = [
        load_cold(EngineConfig(model=str(several.path), mtp_head=str(head_dir)))
        for head_dir in several.head_dirs.values()
    ]
    plain = load_cold(EngineConfig(model=str(several.path), mtp="off"))

    def slots(runner: MLXRunner) -> int:
        """Bytes per slot of all layers."""
        assert runner._a_snapshot is not None
        layers = runner._a_snapshot.segment.keys_values
        return sum(array.nbytes // array.shape[2] for layer in layers for array in layer)

    heads = sum(slots(one) - slots(plain) for one in singles)
    assert slots(several.runner) == slots(plain) + heads and heads > 0
    widths = sum(hidden_bytes(one._heads, one._language_model) for one in singles)
    assert hidden_bytes(several.runner._heads, several.runner._language_model) == widths
    most = max(most_pending(one._heads, one.drafts) for one in singles)
    assert most_pending(several.runner._heads, several.runner.drafts) == most
    weights = sum(one._model.num_weight_bytes - plain._model.num_weight_bytes for one in singles)
    assert several.runner._model.num_weight_bytes == plain._model.num_weight_bytes + weights


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A model, an EAGLE-3 head and a DFlash drafter."""
    path = make(tmp_path_factory.mktemp("heads") / "model", FAMILIES["llama"])
    return path, eagle3(path), write_dflash(path)


def found(path: Path, *heads: Path | str) -> loader.OpenedModel:
    return loader.open_model(EngineConfig(model=str(path), mtp_head=tuple(map(str, heads))))


def test_warm_up_times_the_drafts_of_each_head_and_measures_the_memory_of_all(llama):
    path, *heads = llama
    options = {"model": str(path), "prompt_lookup": "off", "mtp_head": tuple(map(str, heads))}
    runner = load_runner(EngineConfig.model_validate(options), lambda progress: None)
    assert {one.drafts for one in runner.step_times} == {PLAIN, *runner.drafts}
    assert {one.proposer for one in runner.drafts} == {"mtp", "dflash"}
    plain = load_runner(EngineConfig.model_validate(options | {"mtp_head": None, "mtp": "off"}), lambda progress: None)
    per_head = [
        load_runner(EngineConfig.model_validate(options | {"mtp_head": str(one)}), lambda progress: None).costs
        for one in heads
    ]
    assert runner.costs.token_bytes == sum(one.token_bytes for one in per_head) - plain.costs.token_bytes
    assert runner.costs.pending_bytes == sum(one.pending_bytes for one in per_head)


def test_memory_is_measured_with_the_most_drafts_of_each_head(monkeypatch):
    """A head of few drafts may take more than one of many, which computes them at once."""
    steps = list[Drafts]()
    monkeypatch.setattr(memory_costs, "_steps", lambda runner, drafts: steps.append(drafts))
    lookup = [Drafts(k, "prompt_lookup", is_selective=True) for k in (2, 3)]
    heads = [Drafts(1), Drafts(3), Drafts(3, "dflash"), Drafts(7, "dflash")]
    memory_costs._decoding(mock.Mock(), [*heads, *lookup])
    assert steps == [PLAIN, Drafts(3), Drafts(7, "dflash")]
    memory_costs._decoding(mock.Mock(), [*heads[:2], Drafts(4, "prompt_lookup", is_selective=True)])
    assert steps[3:] == [PLAIN, Drafts(3), Drafts(4, "prompt_lookup")]


def test_order_of_the_heads_distinguishes_snapshots(llama):
    """Their layers follow each other in a snapshot, so that one of another order would be read wrongly."""
    path, first, second = map(str, llama)
    prints = [
        loader.load(EngineConfig(model=path, mtp_head=heads), lambda progress: None).fingerprint
        for heads in (None, first, second, (first, second), (second, first), (first,))
    ]
    assert len(set(prints)) == 5 and prints[1] == prints[5]


def test_two_heads_of_one_form_have_names_with_numbers_and_each_its_drafts(llama, tmp_path):
    path, head_dir, _ = llama
    dirs = [head_dir]
    for seed in (1, 2):
        head_dir.rename(tmp_path / "kept")
        dirs.append(write_eagle3(path, for_sglang=True, draft_vocab_size=300, seed=seed).rename(tmp_path / f"{seed}"))
        (tmp_path / "kept").rename(head_dir)
    assert [*found(path, *dirs).proposers] == ["mtp", "draft_model", "eagle3", "eagle3-2"]
    runner = load_cold(EngineConfig(model=str(path), mtp_head=tuple(map(str, dirs))))
    request = EngineRequest("a", np.array(prompt(30), np.int32), SamplingParams(20, temperature=0.0), ())
    plain, _ = answers(runner, [request], [PLAIN])
    drafted = [Drafts(2, name) for name in ("mtp", "eagle3", "eagle3-2")]
    assert answers(runner, [request], drafted)[0] == plain


def test_own_names_the_head_that_is_found_without_the_option(tmp_path):
    path = make(tmp_path / "model", FAMILIES["qwen3_5"])
    own, other = write_head(path), eagle3(path)
    opened = found(path, "own", other)
    assert {name: one.path for name, one in opened.proposers.items() if one.path} == {"mtp": own, "eagle3": other}
    assert [one.text for one in opened.proposers.values() if one.text] == ["mtp: own", f"eagle3: {other}"]
    config = EngineConfig(model=str(path), mtp_head=("own", str(other)))
    line = next(line for line in report(config) if line.startswith("MTP head"))
    assert line.split(maxsplit=2)[2] == f"{own} (mtp), {other} (eagle3)"
    with pytest.raises(EngineFailed, match=f"mtp_head names the head in .* twice, as 'own' and '{own}'"):
        found(path, "own", own)
    own.rename(tmp_path / "elsewhere")
    with pytest.raises(EngineFailed, match=r"mtp_head is configured, which names 'own', but .* no mtp\.\* tensors"):
        found(path, other, "own")


def test_a_head_of_the_list_that_does_not_fit_is_refused_with_its_place_and_the_reason(llama, tmp_path):
    path, head_dir, _ = llama
    other = make(tmp_path / "other", replace(FAMILIES["llama"], config=FAMILIES["llama"].config | {"hidden_size": 96}))
    strange = eagle3(other)
    with pytest.raises(EngineFailed, match=f"{strange} does not fit the model: hidden_size is 96, expected"):
        loader.load(EngineConfig(model=str(path), mtp_head=(str(head_dir), str(strange))), lambda progress: None)
    with pytest.raises(EngineFailed, match=r"mtp_head: .*/missing"):
        found(path, head_dir, tmp_path / "missing")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mtp_head": ["a", "b", "a"]}, "mtp_head names 'a' twice"),
        ({"mtp_head": []}, "at least 1 item"),
        ({"mtp_head": ["a", "b"], "mtp": "off"}, "mtp is off: mtp_head .'a', 'b'. would have no effect"),
        ({"mtp_head": ["a", "b"], "mtp": {"max_draft_tokens": 2}}, "one head drafts, and mtp_head names 2"),
    ],
)
def test_lists_that_can_have_no_effect_are_refused(options, reason):
    with pytest.raises(ValueError, match=reason):
        EngineConfig.model_validate(options)


def test_a_list_of_one_head_is_that_head_and_the_draft_model_excludes_all(llama):
    path, head_dir, drafter = llama
    assert EngineConfig(mtp_head=("own", "org/head")).draft_checkpoints == [("org/head", None)]
    assert found(path, head_dir).proposers["mtp"].path == head_dir
    config = {"model": str(path), "mtp_head": [str(head_dir), str(drafter)], "draft_model": {"model": str(path)}}
    with pytest.raises(EngineFailed, match="draft_model is configured beside mtp_head; only one of them can draft"):
        loader.open_model(EngineConfig.model_validate(config))
