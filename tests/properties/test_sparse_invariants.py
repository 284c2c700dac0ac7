"""Invariants of sparse prefill on real models: its tokens are the model's own over what is kept, alone as in
any company, with any drafts and whatever is cached; and nothing of it reaches a dense prompt.

ORCHARD_SCHEDULES=5000 runs that many, different ones each time. -s prints what they have covered.
"""

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine.worker  # noqa: F401  # before MLX
from engine.config import EngineConfig, PrefixCacheConfig
from engine.core.prefix_cache.snapshot_boundaries import LEAST_TOKENS
from engine.core.row import Row
from engine.core.spec_prefill.plan import ScoreRequest, find_anchors, make_plan
from engine.protocol import Boundary, EngineRequest, SamplingParams
from engine.worker.drafting_head import DraftingHead
from engine.worker.model_runner import MLXRunner
from tests.properties import test_batch_invariants
from tests.support import conversations
from tests.support.cold_runner import load_cold
from tests.support.conversations import Answer, cache_config, compare_logprobs, plain_tokens, random_traffic
from tests.support.demo_model import DEMO, DRAFT
from tests.support.driver import Driver, fix_prefill_costs
from tests.support.night import some_at_night
from tests.support.schedule_runs import NUM_SCHEDULES, check_many
from tests.support.sparse_prompts import (
    KINDS,
    Oracle,
    SharedSparseSpecimens,
    SparseShelf,
    SparseSpecimens,
    gap,
    num_computed,
    with_plan,
    with_random_plan,
)
from tests.support.tasks import RETRIEVAL, prompts

NUM_SPECIMENS = 40
SMALLER = "the tiny models have the layers of the demo model"
LIKE_OTHERS = "the gate has a model with these layers, one with a head and one without"
GATE = ["recurrent last", "foreign head", "no head"]

GREEDY = SamplingParams(26, 0.0, logprobs=3)
SAMPLED = SamplingParams(26, 1.0, seed=7, logprobs=3)
PENALISED = replace(SAMPLED, repetition_penalty=1.6, presence_penalty=0.5, frequency_penalty=0.3)
DRAFTS = conversations.DRAFTS


class SparseBench(test_batch_invariants.Bench):
    """Each specimen with its plan alone and without drafts is the truth, and a third of those are the oracle's."""

    def __init__(self, runner: MLXRunner, model_dir: Path):
        super().__init__(runner, model_dir)
        self.specimens = SparseSpecimens(model_dir, runner.vocab_size, "image" in runner.capabilities["media"])
        self.oracle = Oracle(runner)

    def _logits(self, row: Row) -> np.ndarray:
        return self.oracle.logits(row.spec, row.output_token_ids)[-1]


class SharedBench(conversations.Bench):
    """Each specimen with its plan alone and without a cache is the truth."""

    def __init__(self, runner: MLXRunner, model_dir: Path):
        super().__init__(runner, model_dir)
        self.specimens = SharedSparseSpecimens(model_dir, runner.vocab_size, "image" in runner.capabilities["media"])

    def _compare(self, driver, traffic, index, choice, cold) -> None:
        super()._compare(driver, traffic, index, choice, cold)
        spec = self.specimens.spec(traffic.arrivals[index][1])
        skipped = {chunk.num_skipped for chunk in driver.chunks[conversations.row_name(index, choice)]}
        assert skipped <= {len(spec.token_ids) - num_computed(spec)}, f"row {index}/{choice}"
        self.figures["skipped tokens"] += len(spec.token_ids) - num_computed(spec)

    def _check_books(self, driver, traffic, order) -> None:
        """Check that tokens served, computed and kept follow the rules."""
        config = PrefixCacheConfig.model_validate(traffic.cache)
        shelf = SparseShelf(self.specimens.image_token_id, config.min_tokens or LEAST_TOKENS, config.boundaries)
        computed = cached = 0
        for index in order:
            _, number, tenant = traffic.arrivals[index]
            spec = replace(self.specimens.spec(number), tenant=tenant)
            served = shelf.serve(spec)
            assert Answer.of(driver, str(index)).num_cached == served <= gap(spec), f"request {index} of {traffic}"
            computed, cached = computed + num_computed(spec) - served, cached + served
            self.figures["served with a plan"] += bool(served and spec.sparse is not None)
        stats, status = driver.core.stats, driver.core.prefixes.status()
        assert (stats.num_cached_tokens, stats.num_prompt_tokens) == (cached, computed)
        kept = sorted((entry.kind, entry.num_tokens) for entry in status.entries)
        assert kept == sorted((one.kind, one.num_tokens) for one in shelf.stored.values())


@dataclass(frozen=True)
class Models:
    """By name: one of KINDS, demo or text (which takes no explicit positions); each is loaded once."""

    runner: Callable[[str], MLXRunner]
    path: Callable[[str], Path]
    bench: Callable[[str], SparseBench]
    shared: Callable[[str], SharedBench]


@pytest.fixture(scope="session")
def models(tiny_model: Callable[..., Path], runner: MLXRunner, text_runner: MLXRunner) -> Models:
    given = {"demo": (runner, DEMO), "text": (text_runner, DRAFT)}

    def path(name: str) -> Path:
        return given[name][1] if name in given else tiny_model(**KINDS[name])

    @cache
    def load(name: str) -> MLXRunner:
        if name in given:
            return given[name][0]
        return load_cold(EngineConfig(model=str(path(name))))

    bench = cache(lambda name: SparseBench(load(name), path(name)))
    return Models(load, path, bench, cache(lambda name: SharedBench(load(name), path(name))))


def no_cache(mtp: Any = "off", chunk: int = 64) -> EngineConfig:
    return cache_config({"mtp": mtp, "prefill_chunk_tokens": chunk}, enabled=False)


def answer(runner: MLXRunner, spec: EngineRequest, config: EngineConfig) -> Answer:
    """In chunks whose sizes do not depend on how long others have taken: other chunks round otherwise."""
    driver = Driver(runner, config)
    fix_prefill_costs(driver.core, 1e-6, 1e-9)
    driver.run({0: [spec]})
    return Answer.of(driver, spec.request_id)


def assert_same(got: Answer, expected: Answer, name: str) -> None:
    """But for what was cached, and rounding."""
    compare_logprobs(name, got.logprobs, expected.logprobs)
    assert replace(got, logprobs=(), num_cached=0) == replace(expected, logprobs=(), num_cached=0), name


def text_of(name: str, num_tokens: int = 150, sampling: SamplingParams = GREEDY) -> EngineRequest:
    return EngineRequest("r", plain_tokens(name, num_tokens), sampling, ())


def with_pictures(bench: SparseBench, name: str, sampling: SamplingParams = GREEDY) -> EngineRequest:
    """Two pictures between texts."""
    mark, images = bench.specimens.image_token_id, tuple(bench.specimens.image(number) for number in (3, 4))
    parts = [plain_tokens(f"{name} {i}", 40) for i in range(3)]
    places = [np.full(image.num_tokens, mark, np.int32) for image in images]
    before, after = (np.array([token], np.int32) for token in bench.specimens._marks)
    ids = [parts[0], before, places[0], after, parts[1], before, places[1], after, parts[2]]
    return EngineRequest("r", np.concatenate(ids), sampling, (), images)


@pytest.mark.parametrize("name", some_at_night([*KINDS, "demo"], GATE, LIKE_OTHERS))
def test_a_plan_that_keeps_all_tokens_gives_exactly_the_dense_answer(models, name):
    """Logprobs and accepted drafts as well, without any rounding; greedy and sampled, with pictures and without."""
    runner, bench = models.runner(name), models.bench(name)
    for number, (mtp, sampling) in enumerate(product(("off", DRAFTS), (GREEDY, SAMPLED))):
        sampling = replace(sampling, max_tokens=10)
        texts = text_of(name, 100, sampling), with_pictures(bench, name, sampling)
        for spec in texts if NUM_SCHEDULES else (texts[number in (1, 2)],):
            config, num_tokens = no_cache(mtp, (33, 2048)[number % 2]), len(spec.token_ids)
            dense = answer(runner, spec, config)
            assert len(dense.token_ids) == len(dense.logprobs) == 10
            plan = with_plan(spec, range(num_tokens), (0, num_tokens, 50, 1)[number])
            assert answer(runner, plan, config) == dense


@pytest.mark.parametrize("name", some_at_night([*KINDS, "demo"], GATE, LIKE_OTHERS))
def test_a_sparse_prompt_gets_the_models_own_answer_to_the_kept_tokens_at_their_positions(models, name):
    """Greedy, sampled and penalised (for all of the prompt), with pictures as well; drafts change nothing."""
    runner, bench, rng = models.runner(name), models.bench(name), random.Random(zlib.crc32(name.encode()))
    for number, sampling in enumerate((GREEDY, SAMPLED, PENALISED) * (1 + NUM_SCHEDULES // 500)):
        texts = text_of(f"{name} {number}", rng.choice([90, 150, 200]), sampling), with_pictures(bench, name, sampling)
        for spec, mtp in zip(texts, rng.sample(["off", DRAFTS], 2), strict=True):
            spec = with_random_plan(rng, spec, runner.image_token_id)
            got = answer(runner, spec, no_cache(mtp, rng.choice([16, 33, 2048])))
            assert len(got.token_ids) == 26
            bench.oracle.agrees(spec, got)


@pytest.mark.parametrize("name", some_at_night(["deep", "foreign head", "demo"], KINDS, SMALLER))
def test_skipped_tokens_affect_only_the_positions_of_the_kept_ones(models, name):
    runner, spec = models.runner(name), text_of(name, 120)
    kept = [*range(20), *range(50, 70), *range(90, 120)]
    other = spec.token_ids.copy()
    left = np.setdiff1d(np.arange(120), kept)
    other[left] = (other[left] + 17) % 400 + 20
    config = no_cache(chunk=32)
    sparse = answer(runner, with_plan(spec, kept), config)
    assert answer(runner, with_plan(replace(spec, token_ids=other), kept), config) == sparse
    contiguous = answer(runner, replace(spec, token_ids=spec.token_ids[kept]), config)
    for unlike in (contiguous, answer(runner, spec, config)):
        pairs = zip(sparse.logprobs, unlike.logprobs, strict=True)
        assert max(abs(a.logprob - b.logprob) for a, b in pairs) > 1e-3, "the test shows nothing"


@pytest.fixture
def read(monkeypatch) -> list[tuple[list[int], np.ndarray, np.ndarray]]:
    """Record the inputs and outputs of heads, in order: token ids, hidden states that they are paired with, hidden
    states."""
    heard, call = [], DraftingHead.__call__

    def listen(head, token_ids, hidden, *args):
        said = call(head, token_ids, hidden, *args)
        heard.append((np.array(token_ids)[0].tolist(), np.array(hidden)[0], np.array(said)[0]))
        return said

    monkeypatch.setattr(DraftingHead, "__call__", listen)
    return heard


@pytest.mark.parametrize("chunk", some_at_night([16, 33, 2048], [33, 2048], "the gate has longer chunks"))
@pytest.mark.parametrize("name", some_at_night(["deep", "foreign head", "demo"], KINDS, SMALLER))
def test_the_head_reads_each_kept_token_with_its_successor_in_the_prompt(models, read, name, chunk):
    """Kept or not; also behind a snapshot that ends at the gap, of a prompt that goes on otherwise there."""
    runner = models.runner(name)
    spec = replace(text_of(name, 150, replace(GREEDY, max_tokens=6)), boundaries=(Boundary("system", 60),))
    kept = np.array([*range(60), *range(61, 64), 70, *range(80, 100), *range(104, 150, 3)])
    driver = Driver(runner, cache_config({"prefill_chunk_tokens": chunk}, boundaries=("system",)))
    other = np.concatenate([spec.token_ids[:60], plain_tokens("other", 30)])
    driver.run({0: [replace(spec, request_id="other", token_ids=other)]})
    expected = spec.token_ids[kept[:-1] + 1].tolist()
    runs = {}
    for name, config in (("miss", no_cache(DRAFTS, chunk)), ("hit", None)):
        run = driver if config is None else Driver(runner, config)
        read.clear()
        run.run({0: [with_plan(replace(spec, request_id=name), kept, 30)]})
        assert Answer.of(run, name).num_cached == (60 if name == "hit" else 0)
        ids, hidden, said = (list(part) for part in zip(*read, strict=True))
        tokens = [token for part in ids for token in part]
        begin = 59 if name == "hit" else 0
        assert tokens[: len(expected) - begin] == expected[begin:], name
        assert tokens[len(expected) - begin] == run.tokens[name][0], "then what was sampled behind the last"
        runs[name] = [np.concatenate(part)[59 - begin :][: len(expected) + 2 - 59] for part in (hidden, said)]
    for miss, hit in zip(runs["miss"], runs["hit"], strict=True):
        assert np.allclose(miss, hit, atol=1e-4), "hidden states behind a hit are those behind a miss"


@pytest.mark.parametrize(
    "name",
    some_at_night(
        [*KINDS, "demo"] if NUM_SCHEDULES else ["deep", "foreign head", "no head"],
        {"foreign head", "no head"},
        LIKE_OTHERS,
    ),
)
def test_sparse_and_dense_rows_get_the_same_tokens_alone_and_in_any_batch(models, name):
    bench: SparseBench = models.bench(name)
    check_many(bench, name, max(2, int((NUM_SCHEDULES or 35) * (0.2 if name != "demo" else 0.06))), 5)
    for what in ("tokens of the reference", "rows"):
        assert bench.figures[what], f"the schedules have nothing {what}"
    assert name == "demo" or bench.figures["accepted"] or not any(one.proposer == "mtp" for one in bench.runner.drafts)


@pytest.mark.parametrize(
    "name",
    some_at_night(
        [*KINDS, "demo"] if NUM_SCHEDULES else ["alternating", "recurrent last"], {"recurrent last"}, LIKE_OTHERS
    ),
)
def test_a_plan_behind_any_cached_prefix_gives_the_same_answer_as_without_cache(models, name):
    """Dense prompts cross it in the same prefixes: nothing that a plan leaves behind changes them."""
    bench: SharedBench = models.shared(name)
    num_schedules = max(2, int((NUM_SCHEDULES or 35) * (0.2 if name != "demo" else 0.06)))
    start = random.randrange(2**32) if NUM_SCHEDULES else zlib.crc32(name.encode())
    # What is evicted depends on measured times, so that a plan may meet no cached prefix in a few schedules.
    for number in range(start, start + 5 * num_schedules):
        if number >= start + num_schedules and bench.figures["served with a plan"] and bench.figures["orderly"]:
            break
        traffic = random_traffic(random.Random(number), NUM_SPECIMENS, bench.snapshot_gb)
        try:
            bench.check(traffic)
        except AssertionError as error:
            error.add_note(f"{name}, schedule {number}: {traffic}")
            raise
    print(f"\n{name}: {', '.join(f'{what} {count}' for what, count in sorted(bench.figures.items()))}")  # noqa: T201
    assert name == "demo" or (bench.figures["served with a plan"] and bench.figures["orderly"])


def test_drafts_are_accepted_as_often_after_a_sparse_prompt_as_after_a_dense_one(runner, tokenizer):
    """Needles, with what the answer is made of among the kept: the answers are the same ones, for the most part."""
    control, num_prompts = [tokenizer.image_token_id, *tokenizer.stop_token_ids], 4 + NUM_SCHEDULES // 100
    figures = {"dense": np.zeros(3, int), "sparse": np.zeros(3, int)}
    skipped = total = 0
    for prompt in prompts(RETRIEVAL, num_prompts, tokenizer, "sparse", 8):
        ids = prompt.token_ids
        spec = EngineRequest("r", ids, replace(GREEDY, max_tokens=24), tokenizer.stop_token_ids)
        dense = answer(runner, spec, no_cache(DRAFTS))
        importance = np.isin(ids, dense.token_ids) / np.bincount(ids, minlength=runner.vocab_size)[ids]
        anchors = find_anchors(ids, control, (), np.empty(0, np.int32))
        plan = make_plan(ScoreRequest("", ids, 0, anchors, 0.3), importance.astype(np.float32))
        skipped, total = skipped + len(ids) - len(plan.positions), total + len(ids)
        sparse = answer(runner, replace(spec, sparse=plan), no_cache(DRAFTS))
        for way, got in (("dense", dense), ("sparse", sparse)):
            figures[way] += (got.num_drafted, got.num_accepted, got.token_ids == dense.token_ids)
    rates = {way: float(accepted / drafted) for way, (drafted, accepted, _) in figures.items()}
    print(f"\ndrafts accepted: {rates}, equal answers: {figures['sparse'][2]}, {skipped / total:.0%} left out")  # noqa: T201
    assert figures["sparse"][2] >= 0.5 * num_prompts and skipped > 0.3 * total
    assert rates["sparse"] > rates["dense"] - 0.1 and rates["dense"] > 0.6
