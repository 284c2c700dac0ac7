"""MTP heads with a window, pools or streams: every draft is that of the library's own head without a cache."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from mlx.utils import tree_flatten

from engine.config import EngineConfig
from engine.core.row import Row
from engine.core.runner import PLAIN, Drafts, PromptChunk
from engine.errors import EngineFailed
from engine.protocol import EngineRequest, SamplingParams
from engine.worker import head_loader, loader
from engine.worker.decode import DecodeGroup
from engine.worker.model_runner import MLXRunner
from engine.worker.snapshot import StateSnapshot, export, import_arrays
from engine.worker.window_layer import RING_MARGIN
from tests.support.cold_runner import load_cold
from tests.support.families import FAMILIES
from tests.support.heads import write_head
from tests.support.zoo import empty_cache, load, make, prompt

PROMPTS = {"long": prompt(45), "short": prompt(13, seed=2), "late": prompt(30, seed=3)}
NUM_TOKENS = 140


class LibraryHead:
    """The library's target and head, which compute whole sequences."""

    def __init__(self, family: str, path: Path, head_dir: Path):
        self._lm = load(path)
        config, weights = head_loader.LIBRARY_FORMATS[family].splitter().prepare(head_dir)
        module: Any = import_module(f"mlx_vlm.speculative.drafters.{family}_mtp")
        self._head = module.Model(module.ModelConfig.from_dict(config))
        flat: Any = tree_flatten(self._head.parameters())
        self._head.load_weights([(name, weights[name]) for name, _ in flat])
        self._head.bind(self._lm)

    def hidden(self, tokens: Sequence[int]) -> mx.array:
        """Return what the head reads at each of the tokens."""
        return self._lm(mx.array([tokens]), cache=empty_cache(self._lm), return_hidden=True).hidden_states[-1]

    def drafts(self, tokens: Sequence[int], hidden: mx.array, num_drafts: int) -> list[int]:
        """Return the head's drafts behind tokens, each from a forward over all pairs."""
        behind, hidden, found = mx.array([tokens[1:]]), hidden[:, : len(tokens) - 1], []
        for _ in range(num_drafts):
            self._head._cache, self._head._next_position = None, 0
            readout, states = self._head._forward_tokens(behind, hidden, mx.int32)
            newest = self._lm.lm_head(readout[:, -1:]).argmax(axis=-1)
            found.append(int(newest.item()))
            behind, hidden = (
                mx.concatenate([one, new], axis=1) for one, new in ((behind, newest), (hidden, states[:, -1:]))
            )
        return found


@dataclass(frozen=True)
class Served:
    runner: MLXRunner
    library: LibraryHead

    def join(self, name: str, token_ids: Sequence[int], snapshot: StateSnapshot | None = None) -> tuple[str, list[int]]:
        """Let a row decode; return its id, and its prompt with the first token."""
        row = Row(request(name, token_ids))
        if snapshot is not None:
            self.runner.restore([row], snapshot)
        while not (first := self.runner.prefill([row], 7).first):
            pass
        return row.id, [*token_ids, *first[row.id].token_ids]


def request(name: str, token_ids: Sequence[int], num_tokens: int = NUM_TOKENS) -> EngineRequest:
    return EngineRequest(name, np.array(token_ids, np.int32), SamplingParams(num_tokens, temperature=0.0), ())


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("deepseek_v4", marks=pytest.mark.night("the gate has it in test_mtp_families.py, and rings here")),
        "glm5_next",
    ],
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    path = make(tmp_path_factory.mktemp("heads") / "model", FAMILIES[request.param])
    head_dir = write_head(path)
    config = EngineConfig(model=str(path), mtp_head=str(head_dir))
    return Served(load_cold(config), LibraryHead(request.param, path, head_dir))


class Recorded:
    """The drafts that decode groups make."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self._drafts: list[tuple[list[str], mx.array, mx.array]] = []
        draft = DecodeGroup._draft

        def record(group: DecodeGroup, *args: Any) -> mx.array:
            drafts = draft(group, *args)
            self._drafts.append(([row.row.id for row in group.rows], group._lengths, drafts))
            return drafts

        monkeypatch.setattr(DecodeGroup, "_draft", record)

    def check(self, library: LibraryHead, tokens: dict[str, list[int]]) -> int:
        """Compare those behind tokens that are known by now with the library's; return how many, and forget them."""
        num_checked, hidden = 0, {row_id: library.hidden(ids) for row_id, ids in tokens.items()}
        for row_ids, lengths, drafts in self._drafts:
            for row_id, length, drafted in zip(row_ids, np.array(lengths), np.array(drafts).tolist(), strict=True):
                if (num := int(length) + 1) <= len(tokens[row_id]):
                    expected = library.drafts(tokens[row_id][:num], hidden[row_id], len(drafted))
                    assert drafted == expected, (row_id, num)
                    num_checked += 1
        self._drafts.clear()
        return num_checked


def test_drafts_are_those_of_the_library_while_rows_keep_different_numbers_of_tokens(served, monkeypatch):
    """Rows for which prompt lookup is always right, and others for which it never is, let the head lag unlike far."""
    runner, answers = served.runner, {}
    for name, ids in PROMPTS.items():
        row_id, tokens = served.join(name, ids)
        while len(tokens) < len(ids) + NUM_TOKENS:
            tokens += runner.decode()[row_id].token_ids
        runner.drop([row_id])
        answers[row_id] = tokens

    def row_drafts(group: DecodeGroup, drafts: Drafts) -> mx.array:
        num_drafts = drafts.num_tokens
        behind = [answers[row.row.id][row.row.num_tokens + len(row.output_ids) :] for row in group.rows]
        right = [[*ids[:num_drafts], *[0] * num_drafts][:num_drafts] for ids in behind]
        return mx.array([ids if i % 2 else [0] * num_drafts for i, ids in enumerate(right)], mx.int32)

    monkeypatch.setattr(DecodeGroup, "_row_drafts", row_drafts)
    recorded, tokens, kept = Recorded(monkeypatch), {}, []
    three, forced = Drafts(3, "mtp"), Drafts(2, "prompt_lookup", is_forced=True)
    for joins, leaves, steps in (
        (["long", "short"], [], [three, three, *[forced] * 9, three, *[forced] * 13, three]),
        (["late"], [], [three, *[PLAIN] * (RING_MARGIN + 3), three, three]),
        ([], ["long"], [Drafts(1, "mtp"), *[forced] * 3, three, three]),
    ):
        for name in joins:
            row_id, begun = served.join(name, PROMPTS[name])
            tokens[row_id] = begun
        for row_id in [row_id for row_id in tokens if row_id.split("/")[0] in leaves]:
            runner.drop([row_id])
        for drafts in steps:
            for row_id, output in runner.decode(drafts).items():
                tokens[row_id] += output.token_ids
                kept.append(len(output.token_ids))
        assert recorded.check(served.library, tokens) >= 3
    runner.drop(list(tokens))
    assert min(kept.count(1), kept.count(3)) > 20
    assert all(ids == answers[row_id][: len(ids)] for row_id, ids in tokens.items())


def test_drafts_are_those_of_the_library_behind_snapshots_of_prompts_and_rows(served, monkeypatch):
    """Snapshots as another node sends them, of other lengths than the one that gives the shapes."""
    runner, ids, recorded = served.runner, PROMPTS["long"], Recorded(monkeypatch)
    sent, boundaries, parent, of_row = [], (2, 8, 13, 16, 17, 44), None, None
    row = Row(request("sent", ids))
    for done, end in zip((0, *boundaries), boundaries, strict=False):
        runner.prefill([row], end - done)
        sent.append(runner.snapshot([row], parent))
        parent = sent[-1].segment
    runner.drop([row.id])
    like, parent = sent[0], None
    for snapshot in sent:
        *_, received = import_arrays(export(snapshot), like, snapshot.num_tokens, parent)
        assert received is not None
        parent = received.segment
        for each in (snapshot, received):
            row_id, tokens = served.join("continued", ids, each)
            for drafts in (Drafts(2, "mtp"), PLAIN, Drafts(2, "mtp"), PLAIN, PLAIN):
                tokens += runner.decode(drafts)[row_id].token_ids
            assert recorded.check(served.library, {row_id: tokens}) >= 2
            of_row = runner.snapshot_row(row_id)
            runner.drop([row_id])
    assert of_row is not None
    said = [*ids, *of_row.token_ids.tolist()]
    assert of_row.snapshot.num_tokens == len(said)
    row_id, tokens = served.join("next", [*said, *PROMPTS["short"]], of_row.snapshot)
    for drafts in (Drafts(2, "mtp"), Drafts(3, "mtp"), PLAIN):
        tokens += runner.decode(drafts)[row_id].token_ids
    runner.drop([row_id])
    assert recorded.check(served.library, {row_id: tokens}) >= 2


def test_drafts_are_those_of_the_library_for_prompts_that_are_computed_together(served, monkeypatch):
    runner, recorded, tokens = served.runner, Recorded(monkeypatch), {}
    prompts = {**PROMPTS, "single": [17]}
    rows = {name: Row(request(name, ids)) for name, ids in prompts.items()}
    for sizes in (
        {"long": 5, "short": 2, "late": 9},
        {"long": 7, "short": 11, "late": 1},
        {"long": 33, "late": 20, "single": 1},
    ):
        for output in runner.prefill_burst([PromptChunk(rows[name], size) for name, size in sizes.items()]):
            for row_id, first in (output.first or {}).items():
                tokens[row_id] = [*prompts[row_id.split("/")[0]], *first.token_ids]
    for _ in range(3):
        for row_id, output in runner.decode(Drafts(2, "mtp")).items():
            tokens[row_id] += output.token_ids
    runner.drop(list(tokens))
    assert len(tokens) == 4 and recorded.check(served.library, tokens) >= 12


@pytest.mark.parametrize(
    ("family", "changes", "without", "reason"),
    [
        ("deepseek_v4", {"hidden_size": 32}, None, "hidden_size is 32, expected 64"),
        ("deepseek_v4", {"sliding_window": 16, "hc_mult": 4}, None, "hc_mult is 4, expected 2; sliding_window is 16"),
        ("deepseek_v4", {}, "mtp.0.h_proj.weight", "Missing 1 parameters: *h_proj.weight"),
        ("deepseek_v4", {"dspark_target_layer_ids": [1]}, None, r"no mtp.\* \(DSpark's are not supported\) tensors in"),
        (
            "deepseek_v4",
            {"model_type": "deepseek_v3"},
            None,
            "'deepseek_v3', expected one of deepseek_v4_mtp, deepseek_v4",
        ),
        ("glm5_next", {"vocab_size": 100}, None, "vocab_size is 100, expected 512"),
        ("glm5_next", {"index_topk": 16}, None, "index_topk is 16, expected 8"),
        ("glm5_next", {}, "model.language_model.layers.4.hnorm.weight", "Missing 1 parameters: *hnorm.weight"),
        ("glm5_next", {"num_hidden_layers": 5}, None, "no layers.<num_hidden_layers>.* tensors in"),
    ],
)
def test_head_that_does_not_fit_is_refused_with_the_reason(family, changes, without, reason, tmp_path):
    path = make(tmp_path / "model", FAMILIES[family])
    head_dir = write_head(path)
    config = json.loads((head_dir / "config.json").read_text())
    (config if "model_type" in changes else config.get("text_config", config)).update(changes)
    (head_dir / "config.json").write_text(json.dumps(config))
    if without is not None:
        weights: dict[str, mx.array] = dict(mx.load(str(head_dir / "model.safetensors")))  # type: ignore[arg-type]
        mx.eval(weights)
        del weights[without]
        mx.save_safetensors(str(head_dir / "model.safetensors"), weights)
    with pytest.raises(EngineFailed, match=reason):
        loader.load(EngineConfig(model=str(path), mtp_head=str(head_dir)), lambda progress: None)


def test_two_layers_of_an_mtp_head_are_refused(tmp_path):
    path = make(tmp_path / "model", FAMILIES["deepseek_v4"])
    head_dir = write_head(path)
    weights: dict[str, mx.array] = dict(mx.load(str(head_dir / "model.safetensors")))  # type: ignore[arg-type]
    both = weights | {name.replace("mtp.0.", "mtp.1."): weight for name, weight in weights.items()}
    mx.save_safetensors(str(head_dir / "two.safetensors"), both)
    (head_dir / "model.safetensors").unlink()
    with pytest.raises(EngineFailed, match=r"has the layers 0, 1 of mtp.\*; expected one"):
        loader.load(EngineConfig(model=str(path), mtp_head=str(head_dir)), lambda progress: None)


@pytest.mark.parametrize(
    ("family", "kept"),
    [
        ("deepseek_v4", ("attn_sink", "e_score_correction_bias", "attn_hc.", "ffn_hc.", "hc_head.")),
        ("glm5_next", ("e_score_correction_bias", "index_kpool_compress")),
    ],
)
def test_weights_that_the_target_computes_in_float32_stay_so_in_the_head(family, kept, tmp_path):
    path = make(tmp_path / "model", FAMILIES[family])
    config = EngineConfig(model=str(path), mtp_head=str(write_head(path)), dtype="bfloat16")
    head: Any = loader.load(config, lambda progress: None).proposers["mtp"].module
    for name, weight in loader.weights_of(head):
        assert weight.dtype == (mx.float32 if any(part in name for part in kept) else mx.bfloat16), name
