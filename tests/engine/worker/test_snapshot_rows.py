"""Snapshots of decoding rows: what a row has said when it ends is never computed again, and no token tells.

ORCHARD_SCHEDULES=100 runs that many more random schedules of each model.
"""

import asyncio
import gc
import os
import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest

from engine.config import GrammarConfig
from engine.core.row import Matcher, Row
from engine.core.runner import Drafts, RowSnapshot
from engine.processing.grammar import GrammarCompiler
from engine.protocol import EngineRequest, FinishReason, GrammarSpec, SamplingParams, SparsePlan
from engine.worker.model_runner import MLXRunner
from engine.worker.snapshot import StateSnapshot
from tests.support.driver import encode_images
from tests.support.night import some_at_night
from tests.support.schedules import Execution, Schedule, Specimens

NUM_MORE_SCHEDULES = int(os.environ.get("ORCHARD_SCHEDULES", "0"))
VOCAB = 512
NUM_MORE = 9
"""Tokens that a next turn says behind an answer."""
NUM_NEXT = 10
"""Tokens of the next turn's answer that are compared."""
STATE_TOLERANCE = 2e-4
"""Between what steps of a few tokens and what chunks of a prompt compute: the order of sums."""

MODELS: dict[str, dict[str, Any]] = {
    "deep": {"layers": 4, "interval": 4, "agree": 0.3},
    "alternating": {"layers": 4, "interval": 2, "agree": 0.1, "seed": 1},
    "foreign head": {"layers": 2, "interval": 2, "seed": 3},
    "no head": {"layers": 4, "interval": 2, "mtp": False},
    "compiled": {"layers": 2, "interval": 2, "agree": 0.3, "seed": 5},
    "drafter": {"layers": 3, "interval": 2, "seed": 7},
}
LOOKUP = Drafts(4, "prompt_lookup", is_forced=True)
DRAFTS: dict[str, Callable[[int], Drafts]] = {
    **{f"{k} drafts": lambda step, k=k: Drafts(k) for k in range(4)},
    "mixed drafts": lambda step: Drafts((3, 0, 1, 2, 0, 0, 3, 3, 1)[step % 9]),
    "mixed proposers": lambda step: (LOOKUP, Drafts(2), Drafts(), LOOKUP, LOOKUP, Drafts(1), Drafts())[step % 7],
}


def ids(seed: str, count: int) -> np.ndarray:
    return np.random.default_rng(zlib.crc32(seed.encode())).integers(20, VOCAB, count).astype(np.int32)


def spec(name: str, num_prompt: int, max_tokens: int = 40, **sampling: Any) -> EngineRequest:
    params = SamplingParams(max_tokens, **{"temperature": 0.0, "seed": num_prompt} | sampling)
    return EngineRequest(name, ids(name, num_prompt), params, ())


@dataclass
class Batch:
    """Rows that decode until they end, as a scheduler ends them. kept: what they leave before they are dropped.

    keeps: whether they leave anything. parents: by request, the segment that its row goes on from.
    """

    runner: MLXRunner
    drafts: Callable[[int], Drafts] = DRAFTS["0 drafts"]
    keeps: bool = True
    kept: dict[str, RowSnapshot | None] = field(default_factory=dict)
    parents: dict[str, Any] = field(default_factory=dict)
    running: dict[str, Row] = field(default_factory=dict)
    reasons: dict[str, FinishReason] = field(default_factory=dict)
    step: int = 0

    def join(
        self,
        request: EngineRequest,
        snapshot: StateSnapshot | None = None,
        rectangle: int = 0,
        matcher: Matcher | None = None,
    ) -> Row:
        row = Row(request, matcher=matcher, decode_group=rectangle)
        if snapshot is not None:
            self.runner.restore([row], snapshot)
            self.parents[row.id] = snapshot.segment
        encode_images(self.runner, row)
        while (first := self.runner.prefill([row], 64).first) is None:
            pass
        self.running[row.id] = row
        self._take(row, first[row.id].token_ids)
        return row

    def decode(self) -> None:
        outputs = self.runner.decode(self.drafts(self.step))
        self.step += 1
        for row in list(self.running.values()):
            if row.id in outputs:
                self._take(row, outputs[row.id].token_ids)

    def decode_all(self) -> None:
        while self.running:
            self.decode()

    def _take(self, row: Row, token_ids: Sequence[int]) -> None:
        reason = next((reason for token in token_ids if (reason := row.append(token)) is not None), None)
        if reason is None:
            return
        self.reasons[row.spec.request_id] = reason
        del self.running[row.id]
        if self.keeps:
            self.kept[row.spec.request_id] = self.runner.snapshot_row(row.id, self.parents.get(row.id))
        self.runner.drop([row.id])


def answer(
    runner: MLXRunner,
    request: EngineRequest,
    drafts: Callable[[int], Drafts] = DRAFTS["0 drafts"],
    snapshot: StateSnapshot | None = None,
) -> list[int]:
    """Return the tokens of a row that is alone; with a snapshot it continues from there."""
    batch = Batch(runner, drafts, keeps=False)
    row = batch.join(request, snapshot)
    batch.decode_all()
    return row.output_token_ids


def stopping(runner: MLXRunner, request: EngineRequest, least: int) -> EngineRequest:
    """The same with a stop token that it says for the first time behind so many others at least."""
    said = answer(runner, replace(request, stop_token_ids=()))
    end = next(i for i in range(least, len(said)) if said[i] not in said[:i])
    other = next(token for token in range(VOCAB) if token not in said)
    return replace(request, stop_token_ids=(other, said[end]))


def next_turn(request: EngineRequest, kept: RowSnapshot, name: str = "next", **changes: Any) -> EngineRequest:
    """Its prompt is that of the turn before, all that its row has taken in, and a little more."""
    more = ids(name, NUM_MORE)
    token_ids = np.concatenate([request.token_ids, kept.token_ids, more]).astype(np.int32)
    sampling = replace(request.sampling, max_tokens=NUM_NEXT)
    return replace(request, request_id=name, token_ids=token_ids, sampling=sampling, stop_token_ids=(), **changes)


def state_of(runner: MLXRunner, request: EngineRequest, num_tokens: int) -> StateSnapshot:
    """That behind the first tokens of a prompt which is taken in from the start."""
    row = Row(replace(request, request_id="cold"))
    encode_images(runner, row)
    num_prefilled = 0
    while num_prefilled < num_tokens:
        num_prefilled += runner.prefill([row], num_tokens - num_prefilled).num_tokens
    snapshot = runner.snapshot([row])
    runner.drop([row.id])
    assert snapshot is not None
    return snapshot


def contents(snapshot: StateSnapshot) -> list[np.ndarray]:
    """All that it holds, the keys and values of all its segments joined."""
    chain = snapshot.segment.chain()
    slots = [
        mx.concatenate([segment.keys_values[i][j] for segment in chain], axis=2)
        for i in range(len(snapshot.segment.layers))
        for j in range(2)
    ]
    states = [array for state in snapshot.states for array in state]
    return [np.array(array) for array in (*slots, *states, *([] if snapshot.hidden is None else [snapshot.hidden]))]


def state(kept: RowSnapshot | None) -> StateSnapshot:
    assert kept is not None and isinstance(kept.snapshot, StateSnapshot)
    return kept.snapshot


def check(runner: MLXRunner, request: EngineRequest, kept: RowSnapshot | None, name: str = "next") -> None:
    """The state is that of a prompt with these tokens, and a next turn that goes on from it is as one that does not."""
    assert kept is not None
    snapshot, turn = state(kept), next_turn(request, kept, name)
    assert snapshot.num_tokens == len(request.token_ids) + len(kept.token_ids)
    cold = state_of(runner, turn, snapshot.num_tokens)
    assert snapshot.segment.ends == cold.segment.ends
    for mine, theirs in zip(contents(snapshot), contents(cold), strict=True):
        assert mine.shape == theirs.shape and np.allclose(mine, theirs, atol=STATE_TOLERANCE, rtol=1e-3)
    expected = answer(runner, turn)
    assert answer(runner, turn, DRAFTS["3 drafts"], snapshot) == expected


SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.5, "top_p": 0.95, "seed": 8},
    "penalised": {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.3, "presence_penalty": 0.4},
}


STOPPED = [
    (name, drafts, list(SAMPLINGS)[(i + j) % len(SAMPLINGS)])
    for i, name in enumerate(("deep", "alternating", "foreign head", "drafter", "assistant"))
    for j, drafts in enumerate(DRAFTS)
]
"""Every two of model, drafts and sampling meet."""


@pytest.mark.parametrize(
    ("name", "drafts", "sampling"),
    some_at_night(
        STOPPED,
        [
            one
            for one in STOPPED
            if (one[0] == "alternating" and one[1] in ("0 drafts", "mixed proposers"))
            or (one[0] in ("foreign head", "drafter", "assistant") and one[1] == "3 drafts")
        ],
        "the gate has no drafts and changing ones with one model, and the most drafts with each kind of head",
        are_sets=True,
    ),
)
def test_the_snapshot_of_a_stopped_row_is_exactly_behind_its_stop_token(runner_of, name, drafts, sampling):
    runner = runner_of(name)
    least = {"greedy": 7, "sampled": 1, "penalised": 4}[sampling]
    request = stopping(runner, spec(sampling, 37, **SAMPLINGS[sampling]), least)
    batch = Batch(runner, DRAFTS[drafts])
    row = batch.join(request)
    batch.decode_all()
    kept = batch.kept[request.request_id]
    assert batch.reasons == {request.request_id: FinishReason.STOP} and kept is not None
    assert kept.token_ids.tolist() == [*row.output_token_ids, request.stop_token_ids[-1]]
    assert kept.token_ids.dtype == np.int32
    check(runner, request, kept)


@pytest.mark.parametrize(
    "drafts", some_at_night(["0 drafts", "mixed drafts"], ["mixed drafts"], "mixed drafts have steps without any")
)
@pytest.mark.parametrize(
    "name",
    some_at_night(
        ["no head", "text", "demo", "compiled"],
        ["text", "compiled"],
        "the gate's other tests have models with the layers and the head of the demo model, and one without a head",
    ),
)
def test_each_cacheable_model_gives_correct_snapshots_of_its_rows(runner_of, name, drafts):
    runner = runner_of(name)
    request = stopping(runner, spec("row", 50, temperature=2.5), 9)
    batch = Batch(runner, DRAFTS[drafts])
    batch.join(request)
    batch.decode_all()
    check(runner, request, batch.kept["row"])


@pytest.mark.parametrize(
    "drafts", some_at_night(DRAFTS, ["0 drafts", "3 drafts", "mixed proposers"], "the gate has none, most and changing")
)
def test_the_snapshot_of_a_row_ended_by_length_is_exactly_behind_its_last_token(tiny, drafts):
    batch = Batch(tiny, DRAFTS[drafts])
    requests = [spec(f"row {max_tokens}", 20, max_tokens) for max_tokens in range(2, 9)]
    rows = [batch.join(request) for request in requests]
    batch.decode_all()
    for request, row in zip(requests, rows, strict=True):
        kept = batch.kept[request.request_id]
        assert kept is not None and kept.token_ids.tolist() == row.output_token_ids
        assert len(kept.token_ids) == request.sampling.max_tokens
    check(tiny, requests[-1], batch.kept["row 8"])


@pytest.mark.parametrize("drafts", ["0 drafts", "3 drafts"])
def test_the_snapshot_of_a_row_ended_by_its_first_token_is_behind_its_prompt(tiny, drafts):
    """It has not been decoded."""
    others = spec("others", 30)
    stops = stopping(tiny, spec("stops", 20), 0)
    for request in (spec("one token", 20, max_tokens=1), stops):
        batch = Batch(tiny, DRAFTS[drafts])
        batch.join(others)
        batch.decode()
        batch.join(request)
        kept = batch.kept[request.request_id]
        assert kept is not None and not len(kept.token_ids) and state(kept).num_tokens == 20
        batch.decode_all()
        check(tiny, request, kept)


@pytest.fixture(scope="module")
def arrivals(runner_of) -> list[tuple[int, EngineRequest, list[int]]]:
    """Requests with their step, and what the model `alternating` answers to each alone."""
    tiny = runner_of("alternating")
    places = [(0, "a", 20, 4), (0, "b", 300, 12), (2, "c", 33, 2), (5, "d", 70, 20), (5, "e", 9, 3)]
    requests = [(step, stopping(tiny, spec(name, num, temperature=0.8), least)) for step, name, num, least in places]
    requests.append((7, spec("f", 25, max_tokens=2)))
    return [(step, request, answer(tiny, request)) for step, request in requests]


ONE_GROUP, THREE_GROUPS = (0, 0, 0, 0, 0), (0, 1, 0, 1, 2)


@pytest.mark.parametrize(
    ("rectangles", "drafts"),
    some_at_night(
        [
            (ONE_GROUP, "0 drafts"),
            (ONE_GROUP, "mixed drafts"),
            (THREE_GROUPS, "2 drafts"),
            (THREE_GROUPS, "mixed drafts"),
        ],
        [(THREE_GROUPS, "mixed drafts")],
        "mixed drafts have steps of each number, and one of three groups has several rows",
        are_sets=True,
    ),
)
def test_snapshots_of_rows_in_a_batch_are_those_of_rows_alone_and_change_no_tokens(tiny, arrivals, rectangles, drafts):
    """They come and end at different times, some in one step; each row's tokens are those of a run that keeps none."""

    def run(keeps: bool) -> tuple[dict[str, list[int]], Batch]:
        batch, rows = Batch(tiny, DRAFTS[drafts], keeps), list[Row]()
        while batch.running or len(rows) < len(arrivals):
            for i, (step, request, _) in enumerate(arrivals):
                if step == batch.step and i == len(rows):
                    rows.append(batch.join(request, rectangle=(*rectangles, 0)[i]))
            if batch.running:
                batch.decode()
            else:
                batch.step += 1
        return {row.spec.request_id: row.output_token_ids for row in rows}, batch

    given, batch = run(keeps=True)
    assert given == run(keeps=False)[0]
    for _, request, expected in arrivals:
        assert given[request.request_id] == expected
        check(tiny, request, batch.kept[request.request_id], f"behind {request.request_id}")


def test_the_snapshot_of_a_row_with_images_serves_the_next_turn(runner, make_request, picture):
    red, blue = picture("red"), picture("blue", "square", (160, 96))
    request = make_request("look", "What is in the images?", (red, blue), max_tokens=60)
    for drafts in ("0 drafts", "3 drafts"):
        batch = Batch(runner, DRAFTS[drafts])
        batch.join(request)
        batch.join(make_request("other", "Tell me a story.", max_tokens=30))
        batch.decode_all()
        assert batch.reasons["look"] is FinishReason.STOP
        check(runner, request, batch.kept["look"])


@pytest.mark.parametrize(
    "num_turns", some_at_night([3, 5], [3], "a third turn goes on from a second one as a fifth does")
)
def test_a_conversation_of_many_turns_computes_no_token_twice(tiny, num_turns):
    """Each turn goes on from what the one before has left, and leaves what it has added."""
    request, snapshot = stopping(tiny, spec("turn 0", 30, max_tokens=60), 5), None
    total = 0
    for number in range(num_turns):
        batch = Batch(tiny, DRAFTS["mixed drafts"])
        row = batch.join(request, snapshot)
        batch.decode_all()
        assert row.output_token_ids == answer(tiny, request), f"turn {number}"
        kept = batch.kept[request.request_id]
        assert kept is not None
        assert state(kept).segment.parent is (None if snapshot is None else snapshot.segment)
        total += state(kept).segment_bytes
        snapshot, turn = state(kept), next_turn(request, kept, f"turn {number + 1}")
        request = stopping(tiny, replace(turn, sampling=request.sampling), 4)
    assert snapshot is not None and total == state_of(tiny, request, snapshot.num_tokens).segment_bytes


def test_a_snapshot_serves_any_number_of_rows_and_is_never_changed(tiny):
    request = stopping(tiny, spec("row", 40), 6)
    batch = Batch(tiny, DRAFTS["3 drafts"])
    batch.join(request)
    batch.decode_all()
    kept = batch.kept["row"]
    assert kept is not None
    before = contents(state(kept))
    turns = [next_turn(request, kept, f"turn {i}") for i in range(3)]
    turns.append(replace(turns[0], request_id="turn 0 again"))
    together = Batch(tiny, DRAFTS["mixed drafts"])
    rows = [together.join(turn, state(kept)) for turn in turns]
    together.decode_all()
    assert [row.output_token_ids for row in rows] == [answer(tiny, turn) for turn in turns]
    assert all(np.array_equal(one, other) for one, other in zip(before, contents(state(kept)), strict=True))


@pytest.mark.parametrize("start", [1, 10, 30])
@pytest.mark.parametrize(
    "name",
    some_at_night(["alternating", "no head", "text"], ["alternating"], "the gate has one with each kind of layer"),
)
def test_a_snapshot_continues_the_segment_of_one_of_its_first_tokens(runner_of, name, start):
    runner = runner_of(name)
    request = spec("row", 40, max_tokens=8)
    batch = Batch(runner, keeps=False)
    row = batch.join(request)
    for _ in range(6):
        batch.decode()
    parent = state_of(runner, request, start).segment
    whole, continued = runner.snapshot_row(row.id), runner.snapshot_row(row.id, parent)
    assert whole is not None and continued is not None
    assert continued.snapshot.segment.chain()[0] is parent
    for one, other in zip(contents(state(whole)), contents(state(continued)), strict=True):
        assert np.allclose(one, other, atol=1e-4)  # the chunks of both prompts differ
    batch.decode_all()
    check(runner, request, continued)


@pytest.mark.parametrize("where", ["keys", "values", "state"])
def test_a_row_whose_state_is_not_finite_gives_no_snapshot_and_other_rows_do(tiny, where):
    batch = Batch(tiny, keeps=False)
    sick, sound = batch.join(spec("sick", 20)), batch.join(spec("sound", 30))
    for _ in range(3):
        batch.decode()
    group = tiny._batch._groups[0]
    layers = group._cache.layers
    poison = mx.array([float("nan"), 1.0])[:, None, None, None]
    if where == "state":
        layer = next(layer for layer in layers if hasattr(layer, "slots"))
        layer.slots[1] = layer.slots[1] * poison
    else:
        layer = next(layer for layer in layers if hasattr(layer, "keys"))
        setattr(layer, where, getattr(layer, where) * poison)
    assert tiny.snapshot_row(sick.id) is None
    assert tiny.snapshot_row(sound.id) is not None
    tiny.reset()


def test_unknown_prefilling_and_sparse_rows_give_no_snapshot(tiny):
    assert tiny.snapshot_row("unknown/0") is None
    prompt = Row(spec("prompt", 30))
    tiny.prefill([prompt], 10)
    assert tiny.snapshot_row(prompt.id) is None, "it is not decoding"
    tiny.drop([prompt.id])
    positions = np.setdiff1d(np.arange(30), [4, 5, 6]).astype(np.int32)
    batch = Batch(tiny)
    batch.join(replace(spec("sparse", 30, max_tokens=4), sparse=SparsePlan(positions, 4, "")))
    batch.decode_all()
    assert batch.kept == {"sparse": None}


@pytest.mark.parametrize("drafts", ["0 drafts", "3 drafts"])
def test_a_row_with_a_completed_grammar_gives_a_snapshot_of_its_answer(tiny, tiny_model, drafts):
    stop = 2
    compiler = GrammarCompiler(tiny_model(**MODELS["alternating"]), VOCAB, (stop,), GrammarConfig())
    matcher = asyncio.run(compiler.compile(GrammarSpec("regex", "[a-z]{12,16}")))
    compiler.close()
    request = replace(spec("row", 20), stop_token_ids=(stop,))
    batch = Batch(tiny, DRAFTS[drafts])
    row = batch.join(request, matcher=matcher)
    batch.decode_all()
    kept = batch.kept["row"]
    assert kept is not None and kept.token_ids.tolist() == [*row.output_token_ids, stop]
    check(tiny, request, kept)


@pytest.mark.parametrize(("limit", "chunk"), [(128, 128), (16, 5)])
def test_the_head_is_caught_up_after_any_number_of_plain_steps(tiny, monkeypatch, limit, chunk):
    monkeypatch.setattr("engine.worker.drafter.MAX_PENDING", limit)
    monkeypatch.setattr("engine.worker.drafter.CATCH_UP_TOKENS", chunk)
    for max_tokens in (17, 18, 60):
        request = spec("row", 30, max_tokens)
        batch = Batch(tiny)
        batch.join(request)
        batch.join(spec("other", 80, max_tokens + 5))
        batch.decode_all()
        check(tiny, request, batch.kept["row"])


@pytest.mark.parametrize(
    "drafts",
    some_at_night(
        ["1 drafts", "3 drafts", "mixed drafts"], ["3 drafts", "mixed drafts"], "mixed drafts have steps with one"
    ),
)
def test_a_stop_token_changes_neither_the_tokens_nor_the_draft_counts_in_front_of_it(tiny, drafts):
    """Nor what is told of its drafts: only what stands behind its last token is gone."""
    plain = spec("row", 24, max_tokens=200)
    said = answer(tiny, replace(plain, sampling=replace(plain.sampling, max_tokens=12)))
    whole_run = steps(tiny, plain, DRAFTS[drafts], 12)
    for end in (2, 3, 4, 5, 10, 11):
        if said[end] in said[:end]:
            continue
        stops, short = replace(plain, stop_token_ids=(said[end],)), spec("row", 24, max_tokens=end + 1)
        for request in (stops, short):
            ended = steps(tiny, request, DRAFTS[drafts], end + 1)
            begun = whole_run[: len(ended)]
            assert [o.num_drafted for o in ended] == [o.num_drafted for o in begun]
            assert [o.num_accepted for o in ended] == [o.num_accepted for o in begun]
            assert [o.token_ids for o in ended[:-1]] == [o.token_ids for o in begun[:-1]]
            last, whole = ended[-1].token_ids, begun[-1].token_ids
            assert last == whole[: len(last)] and last[-1] == said[end], "the last token is the newest"


def steps(runner: MLXRunner, request: EngineRequest, drafts: Callable[[int], Drafts], count: int) -> list[Any]:
    """Return a row's outputs until it has `count` tokens; stop tokens are for the device alone."""
    row, outputs, num_tokens = Row(request), [], 1
    runner.prefill([row], 1000)
    while num_tokens < count:
        outputs.append(runner.decode(drafts(len(outputs)))[row.id])
        num_tokens += len(outputs[-1].token_ids)
    runner.drop([row.id])
    return outputs


def test_a_row_snapshot_takes_the_memory_that_it_counts_and_no_more(tiny):
    def settled() -> int:
        gc.collect()
        mx.clear_cache()
        mx.synchronize()
        return mx.get_active_memory()

    def run(keeps: bool) -> RowSnapshot | None:
        batch = Batch(tiny, DRAFTS["2 drafts"], keeps)
        batch.join(spec("other", 500, max_tokens=30))
        batch.join(spec("row", 200, max_tokens=20))
        while "row/0" in batch.running:
            batch.decode()
        batch.kept.pop("other", None)
        batch.keeps = False
        batch.decode_all()
        return batch.kept.get("row")

    run(keeps=True)
    before = settled()
    kept = run(keeps=True)
    assert kept is not None
    counted = kept.snapshot.segment_bytes + kept.snapshot.state_bytes
    assert counted <= settled() - before < counted + 2**17


class Keeping:
    """A runner that takes a snapshot of each row before it is dropped, whatever the reason. kept: with the row."""

    def __init__(self, runner: MLXRunner):
        self._runner = runner
        self.kept: list[tuple[Row, RowSnapshot]] = []
        self._rows: dict[str, Row] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def prefill(self, rows: Sequence[Row], max_tokens: int) -> Any:
        self._rows |= {row.id: row for row in rows}
        return self._runner.prefill(rows, max_tokens)

    def drop(self, row_ids: Sequence[str], lent: Any = None) -> None:
        for row_id in row_ids:
            kept = self._runner.snapshot_row(row_id)
            if kept is not None:
                self.kept.append((self._rows[row_id], kept))
        self._runner.drop(row_ids, lent)


@pytest.mark.parametrize(
    ("name", "seed"),
    some_at_night(
        [
            *(("deep", seed) for seed in range(6 + NUM_MORE_SCHEDULES)),
            *(("compiled", 6 + seed) for seed in range(3 + NUM_MORE_SCHEDULES)),
            *(("drafter", 9 + seed) for seed in range(3 + NUM_MORE_SCHEDULES)),
        ],
        [("deep", 0), ("deep", 1), ("deep", 2), ("compiled", 6), ("drafter", 9)],
        "more of the same random schedules",
        are_sets=True,
    ),
)
def test_row_snapshots_under_random_schedules_have_the_state_of_their_tokens(runner_of, tiny_model, name, seed):
    """Rows with grammars, pictures, choices, penalties; aborted, preempted, and ended: their tokens are those of a run
    that keeps nothing."""
    runner: MLXRunner = runner_of(name)
    specimens = Specimens(tiny_model(**MODELS[name]), runner.vocab_size, True)
    schedule = random_schedule(random.Random(seed))
    runner.free_caches()
    expected = Execution(runner, schedule, specimens.rows).run()
    keeping = Keeping(runner)
    runner.free_caches()  # a kept image takes no step, and then aborts come at other tokens
    endings = Execution(keeping, schedule, specimens.rows).run()  # type: ignore[arg-type]
    assert tokens_of(endings) == tokens_of(expected)
    for row, kept in keeping.kept:
        given, taken_in = row.output_token_ids, kept.token_ids.tolist()
        if not endings[row.id].num_resumed:
            assert taken_in[: len(given)] == given[: len(taken_in)]
        if runner.image_token_id in taken_in or not len(taken_in):
            continue
        snapshot = state(kept)
        cold = state_of(runner, next_turn(row.spec, kept), snapshot.num_tokens)
        for mine, theirs in zip(contents(snapshot), contents(cold), strict=True):
            assert np.allclose(mine, theirs, atol=STATE_TOLERANCE, rtol=1e-3)
    assert keeping.kept


def tokens_of(endings: Mapping[str, Any]) -> dict[str, list[int]]:
    return {name: ending.token_ids for name, ending in endings.items() if ending.finish != "abort"}


def random_schedule(rng: random.Random) -> Schedule:
    return Schedule(
        arrivals=tuple((rng.randint(0, 12), rng.randrange(40)) for _ in range(4)),
        aborts=tuple((rng.randint(5, 30), rng.randrange(4)) for _ in range(rng.randint(0, 1))),
        preemptions=tuple((rng.randint(3, 30), rng.randrange(4)) for _ in range(rng.randint(0, 3))),
        drafts=tuple(rng.randint(0, 3) for _ in range(rng.randint(1, 6))),
        chunks=(256, 33),
    )
