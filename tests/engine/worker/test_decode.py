"""The decode batch below the scheduler: groups by length, exact bookkeeping, and both ways to run a forward."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest

from engine.config import EngineConfig, MTPExact
from engine.core.row import Row
from engine.core.runner import Drafts
from engine.errors import EngineFailed
from engine.protocol import EngineRequest, SamplingParams
from engine.worker.decode import DecodeGroup
from engine.worker.drafter import PendingHiddenStates
from engine.worker.language_model import LanguageModel
from engine.worker.model_runner import MLXRunner
from engine.worker.prompt_lookup import TokenHistory
from tests.support.cold_runner import load_cold
from tests.support.demo_model import DRAFT
from tests.support.night import some_at_night

VOCAB = 512


def row(name: str, num_prompt_tokens: int, **params: object) -> Row:
    ids = np.random.default_rng(num_prompt_tokens).integers(20, VOCAB, num_prompt_tokens).astype(np.int32)
    return Row(EngineRequest(name, ids, SamplingParams(1000, **{"temperature": 0.0} | params), ()))  # type: ignore[arg-type]


def join(runner: MLXRunner, request: Row) -> list[int]:
    while (first := runner.prefill([request], 64).first) is None:
        pass
    return list(first[request.id].token_ids)


def tokens(runner: MLXRunner, rows: Sequence[Row], num_drafts: Callable[[int], int], count: int) -> list[list[int]]:
    """At least `count` tokens of each row, one joining every other step; cut to `count`."""
    out: dict[str, list[int]] = {}
    for step in range(100_000):
        if step % 2 == 0 and step // 2 < len(rows):
            out[rows[step // 2].id] = join(runner, rows[step // 2])
        for row_id, output in runner.decode(Drafts(num_drafts(step))).items():
            out[row_id] += output.token_ids
        if len(out) == len(rows) and min(map(len, out.values())) >= count:
            break
    runner.drop([r.id for r in rows])
    return [out[r.id][:count] for r in rows]


@pytest.fixture(scope="module")
def tiny(tiny_model: Callable[..., Path]) -> MLXRunner:
    """Never closed: that would take the main thread's streams from the tests that follow."""
    return load_cold(EngineConfig(model=str(tiny_model(agree=0.3, layers=4, interval=2))))


@pytest.mark.parametrize(
    "rectangles",
    some_at_night([(0, 1, 0, 0), (0, 1, 2, 3), (5, 5, 5, 5)], [(0, 1, 0, 0)], "the gate has groups of one and three"),
)
def test_rows_decode_in_their_decode_groups_with_the_same_tokens_as_alone(tiny: MLXRunner, rectangles: Sequence[int]):
    rows = [row("short", 20), row("long", 400), row("medium", 60), row("other", 30)]
    alone = [tokens(tiny, [r], lambda step: 0, 20)[0] for r in rows]
    for r, rectangle in zip(rows, rectangles, strict=True):
        r.decode_group = rectangle
    seen: list[dict[int, list[Row]]] = []

    def drafts(step: int) -> int:
        seen.append({i: [r.row for r in group.rows] for i, group in tiny._batch._groups.items()})
        return step % 4

    assert tokens(tiny, rows, drafts, 20) == alone
    assert {i: [r for r in rows if r.decode_group == i] for i in rectangles} in seen


def kv_bytes_per_token(runner: MLXRunner) -> int:
    """Two attention layers of two heads of 32 channels, keys and values, in float32."""
    lm = runner._language_model.lm
    layers = [layer for layer in lm.layers if not layer.is_linear]
    return len(layers) * 2 * lm.args.num_key_value_heads * lm.args.head_dim * 4


def test_cache_memory_follows_the_longest_row_and_is_freed_when_rows_end(tiny: MLXRunner):
    rows = [row("a", 300), row("b", 10)]
    for r in rows:
        join(tiny, r)
    with_both = tiny.memory()["decode_cache_bytes"]
    tiny.drop([rows[0].id])
    after = tiny.memory()["decode_cache_bytes"]
    slots = 512 - 256
    assert with_both - after > (slots + 512) * kv_bytes_per_token(tiny), "the short row keeps no room for the long one"
    tiny.drop([rows[1].id])
    assert tiny.memory()["decode_cache_bytes"] == 0


@pytest.mark.parametrize("exact", some_at_night(["auto", "on", "off"], ["on"], "other tests verify without it"))
def test_the_exact_verifier_of_the_library_gives_the_same_tokens(
    tiny: MLXRunner, monkeypatch: pytest.MonkeyPatch, exact: MTPExact
):
    """Metal uses it; here it only has to work with our caches."""
    rows = [row("a", 40), row("b", 7, temperature=1.0, seed=4), row("c", 70)]
    alone = [tokens(tiny, [r], lambda step: 0, 30)[0] for r in rows]
    monkeypatch.setattr(tiny._language_model, "exact", exact)
    for num_drafts in (1, 2, 3):
        assert tokens(tiny, rows, lambda step, k=num_drafts: k, 30) == alone
        assert tokens(tiny, rows[:1], lambda step, k=num_drafts: k, 30) == alone[:1]


def test_auto_verifies_exactly_only_on_metal_and_only_with_a_single_row(monkeypatch: pytest.MonkeyPatch):
    model = SimpleNamespace(get_rope_index=None, model=lambda *arguments, **named: None, layers=[])
    library = SimpleNamespace(**vars(model), speculative_logits_from_hidden=None)
    ways = {exact: LanguageModel(library, exact) for exact in get_args(MTPExact)}
    assert {exact: [view.verifies_exactly(n) for n in (1, 2)] for exact, view in ways.items()} == {
        "auto": [False, False],
        "on": [True, True],
        "off": [False, False],
    }
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.DeviceType.gpu))
    assert [ways["auto"].verifies_exactly(n) for n in (1, 2)] == [True, False]
    assert not LanguageModel(model, "on").verifies_exactly(1), "without a verifier"


def test_configured_exactness_is_reported_and_refused_without_drafts(tiny: MLXRunner):
    assert MLXRunner(tiny._model, EngineConfig(mtp_exact="on")).capabilities["mtp_exact"] == "on: always"
    assert tiny.capabilities["mtp_exact"] == "auto: never"
    with pytest.raises(ValueError, match="mtp and prompt_lookup are off: mtp_exact 'on' would have no effect"):
        EngineConfig(mtp="off", prompt_lookup="off", mtp_exact="on")


def test_a_compiled_forward_gives_the_same_tokens(tiny: MLXRunner):
    rows = [row("a", 40), row("b", 7, temperature=1.0, seed=4)]
    expected = tokens(tiny, rows, lambda step: 2 * (step % 2), 24)
    compiled = MLXRunner(tiny._model, tiny_config := EngineConfig(compile="on"))
    assert tiny_config.compile == "on" and compiled.capabilities["compiled"]
    assert tokens(compiled, rows, lambda step: 2 * (step % 2), 24) == expected
    forward = compiled._batch._compiled
    assert forward is not None and len(forward._graphs) == 4, "one and two rows, one and three tokens"


def test_a_model_that_cannot_be_compiled_is_refused_where_compiling_is_configured():
    with pytest.raises(EngineFailed, match="compile is on, but"):
        load_cold(EngineConfig(model=str(DRAFT), compile="on"))


def test_the_head_catches_up_after_any_number_of_plain_steps(tiny: MLXRunner, monkeypatch: pytest.MonkeyPatch):
    """The first draft behind a plain phase is the one that a head would make that was asked at every step."""
    monkeypatch.setattr("engine.worker.drafter.MAX_PENDING", 16)
    monkeypatch.setattr("engine.worker.drafter.CATCH_UP_TOKENS", 5)
    drafts: dict[int, list[list[int]]] = {}
    for every in (1, 7, 40):
        request = row("a", 30)
        join(tiny, request)
        drafters = tiny._batch._groups[0]._drafters
        assert drafters is not None
        drafter = drafters.by_name["mtp"]
        original, seen = drafter.draft, []

        def spy(num_drafts, lengths, *args, original=original, seen=seen):
            result = original(num_drafts, lengths, *args)
            seen.append([int(np.array(lengths)[0]), int(np.array(result)[0, 0])])
            return result

        monkeypatch.setattr(drafter, "draft", spy)
        for step in range(80):
            tiny.decode(Drafts(1 if step % every == every - 1 else 0))
        tiny.drop([request.id])
        drafts[every] = seen
    everything = {at: draft for at, draft in drafts[1]}
    for every in (7, 40):
        common = [(at, draft) for at, draft in drafts[every] if at in everything]
        assert common and all(everything[at] == draft for at, draft in common)


def test_pending_hidden_states_of_rows_join_whatever_their_widths():
    narrow = PendingHiddenStates.of(7, mx.ones((1, 1, 4)))
    wide = narrow
    for token_id, value in ((8, 2), (9, 3)):
        wide = wide.extended(PendingHiddenStates.of(token_id, value * mx.ones((1, 1, 4))))
    for both in (narrow.joined(wide), wide.joined(narrow)):
        assert sorted(np.array(both.count).tolist()) == [1, 3] and both.bound == 3
        for i, count in enumerate(np.array(both.count).tolist()):
            assert np.array(both.token_ids)[i, :count].tolist() == [7, 8, 9][:count]
            assert np.array(both.hidden)[i, :count, 0].tolist() == [1, 2, 3][:count]


def test_lookups_draft_only_tokens_that_have_a_logit():
    """A prompt may have others, as those around Molmo2's images are: token 0 is drafted in their place."""
    history = TokenHistory(np.array([VOCAB, 7, VOCAB - 1, VOCAB + 5, 8, VOCAB, 7, VOCAB - 1], np.int32))
    assert history.drafts(5) == [VOCAB + 5, 8, VOCAB, 7, VOCAB - 1]
    group: Any = SimpleNamespace(rows=[SimpleNamespace(drafts={"prompt_lookup": history}), SimpleNamespace(drafts={})])
    group._vocab_size = VOCAB
    assert DecodeGroup._row_drafts(group, Drafts(5, "prompt_lookup")).tolist() == [[0, 8, 0, 7, VOCAB - 1], [0] * 5]
