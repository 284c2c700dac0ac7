"""Invariants of the prefix cache on real models: a hit gives what a miss gives, and memory stays bounded.

ORCHARD_SCHEDULES=5000 runs that many, different ones each time. -s prints what they have covered.
"""

import gc
import logging
import os
import random
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest

from engine.config import EngineConfig
from engine.protocol import Boundary, EngineRequest, FinishReason, SamplingParams
from engine.worker.drafting_head import DraftingHead
from engine.worker.model_runner import MLXRunner
from tests.support.cold_runner import load_cold
from tests.support.conversations import (
    LENGTHS,
    Answer,
    Bench,
    cache_config,
    compare_logprobs,
    plain_request,
    plain_tokens,
    random_traffic,
)
from tests.support.demo_model import DEMO, DRAFT
from tests.support.driver import Driver
from tests.support.families import FAMILIES
from tests.support.night import some_at_night
from tests.support.schedules import Unruly
from tests.support.tasks import RETRIEVAL, prompts
from tests.support.zoo import make as make_family

NUM_SCHEDULES = int(os.environ.get("ORCHARD_SCHEDULES", "0"))
MIN_FIXED, MAX_FIXED = 2, 40
"""Schedules of a model without ORCHARD_SCHEDULES."""
NUM_SPECIMENS = 40
NUM_STORM_REQUESTS = 45
MEMORY_TOLERANCE = 2**20


@dataclass(frozen=True)
class Kind:
    """A random model and its share of the schedules."""

    tiny: dict[str, Any]
    share: float
    config: dict[str, Any] = field(default_factory=dict)


KINDS = {
    "deep": Kind({"layers": 4, "interval": 4, "agree": 0.3}, 0.25),
    "alternating": Kind({"layers": 4, "interval": 2, "agree": 0.1, "seed": 1}, 0.25),
    "recurrent last": Kind({"layers": 3, "interval": 2, "agree": 0.3, "seed": 6}, 0.15),
    "foreign head": Kind({"layers": 2, "interval": 2, "seed": 3}, 0.15),
    "no head": Kind({"layers": 2, "interval": 2, "tie": True, "mtp": False, "seed": 7}, 0.1),
    "compiled": Kind({"layers": 2, "interval": 2, "agree": 0.3, "seed": 5}, 0.05, {"compile": "on"}),
}


@pytest.fixture(scope="session")
def bench_of(
    tiny_model: Callable[..., Path],
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Bench]:
    """bench_of(name of one of KINDS, llama, demo or text), built once."""

    @cache
    def make(name: str) -> Bench:
        if name in ("demo", "text"):
            loaded: MLXRunner = request.getfixturevalue("runner" if name == "demo" else "text_runner")
            return Bench(loaded, DEMO if name == "demo" else DRAFT)
        if name == "llama":  # attention alone: its chunks run on past boundaries
            path = tmp_path_factory.mktemp("zoo") / "model"
            weights = shutil.ignore_patterns("*.safetensors", "config.json")
            shutil.copytree(tiny_model(**KINDS["no head"].tiny), path, ignore=weights)
            make_family(path, FAMILIES["llama"])
            return Bench(load_cold(EngineConfig(model=str(path))), path)
        path = tiny_model(**KINDS[name].tiny)
        return Bench(load_cold(EngineConfig(model=str(path), **KINDS[name].config)), path)

    return make


LIKE_OTHERS = "the gate has a model with these layers and one with this head"


@pytest.mark.parametrize(
    "name",
    some_at_night(
        [*KINDS, "llama", "text", "demo"],
        ["recurrent last", "foreign head", "no head", "compiled", "llama"],
        LIKE_OTHERS,
    ),
)
def test_a_hit_gives_the_same_answer_as_a_miss_under_random_traffic(bench_of, name):
    """In CI always the same schedules, and different ones for each model: MIN_FIXED, and more until they show all."""
    bench: Bench = bench_of(name)
    num_schedules = max(MAX_FIXED, int(NUM_SCHEDULES * (KINDS[name].share if name in KINDS else 0.05)))
    start = random.randrange(2**32) if NUM_SCHEDULES else zlib.crc32(name.encode())
    for number in range(start, start + num_schedules):
        if not NUM_SCHEDULES and number >= start + MIN_FIXED and _shows_all(bench):
            break
        traffic = random_traffic(random.Random(number), NUM_SPECIMENS, bench.snapshot_gb)
        try:
            bench.check(traffic)
        except AssertionError as error:
            error.add_note(f"{name}, schedule {number}: {traffic}")
            raise
    figures = ", ".join(f"{what} {count}" for what, count in sorted(bench.figures.items()))
    print(f"\n{name}: {figures}")  # noqa: T201
    assert _shows_all(bench)


def _shows_all(bench: Bench) -> bool:
    """Return whether there were hits, orderly and disturbed schedules, and accepted drafts if the model has a head."""
    is_drafted = any(one.proposer == "mtp" for one in bench.runner.drafts)
    return all(bench.figures[what] for what in ("hits", "orderly", "disturbed", *(["accepted"] if is_drafted else [])))


def cold_answers(runner: MLXRunner, requests: list[EngineRequest]) -> dict[str, Answer]:
    """Return the answer of each request, alone and without a cache."""
    driver = Driver(runner, cache_config(enabled=False))
    for request in requests:
        driver.run({0: [request]})
    return {request.request_id: Answer.of(driver, request.request_id) for request in requests}


def assert_same(got: Answer, cold: Answer, name: str, num_cached: int) -> None:
    """But for what was cached."""
    compare_logprobs(name, got.logprobs, cold.logprobs)
    assert replace(got, logprobs=()) == replace(cold, logprobs=(), num_cached=num_cached), name


@pytest.fixture
def taken(monkeypatch) -> Callable[[MLXRunner], Callable[[], list[dict[str, np.ndarray]]]]:
    """taken(runner) begins to listen; the result tells what all snapshots since then hold, in their order."""

    def listen(runner: MLXRunner) -> Callable[[], list[dict[str, np.ndarray]]]:
        snapshots, take = [], runner.snapshot

        def snapshot(rows, parent=None, lend=False, num_tokens=None):
            snapshots.append(take(rows, parent, num_tokens=num_tokens))
            return snapshots[-1]

        monkeypatch.setattr(runner, "snapshot", snapshot)
        return lambda: [
            {name: np.array(value) for name, value in runner.export_snapshot(one).items()} for one in snapshots
        ]

    return listen


@pytest.fixture
def exactly(bench_of, monkeypatch) -> Iterator[Callable[[str], Bench]]:
    """As bench_of, but active bytes are those that are held.

    MLX's reuse of freed buffers gives out larger ones than are asked for. And pytest keeps logged exceptions, with the
    arrays of all their frames.
    """
    limits = []

    def make(name: str) -> Bench:
        bench = bench_of(name)  # loading a model sets the limit
        limits.append(mx.set_cache_limit(0))
        mx.clear_cache()
        return bench

    monkeypatch.setattr(logging.getLogger("orchard.engine"), "disabled", True)
    yield make
    mx.set_cache_limit(limits[0])


MODELS_OF_SHARING = some_at_night(
    ["deep", "alternating", "foreign head", "no head", "llama", "text", "demo"],
    ["deep", "foreign head", "llama"],
    LIKE_OTHERS,
)


@pytest.mark.parametrize("boundary", ["system", "prompt"])
@pytest.mark.parametrize("name", MODELS_OF_SHARING)
def test_diverging_rows_that_share_a_snapshot_get_the_same_tokens_as_without_cache(bench_of, taken, name, boundary):
    """Four at once, twice, and then each alone; nobody writes into the snapshot."""
    runner: MLXRunner = bench_of(name).runner
    system, tail = plain_tokens("system", 70), plain_tokens("tail", 9)
    tails = [plain_tokens(i, length) for i, length in enumerate((1, 3, 17, 40))] if boundary == "system" else [tail] * 4
    requests = [plain_request(f"r{i}", system, tail) for i, tail in enumerate(tails)]
    cold = cold_answers(runner, requests)
    contents = taken(runner)
    driver = Driver(runner, cache_config(boundaries=(boundary,)))
    driver.run({0: [plain_request("first", system, tail, max_tokens=1)]})
    before = contents()
    for again, steps in enumerate(([0, 0, 0, 0], [0, 0, 1, 3], [0, 40, 80, 120])):
        arrivals: dict[int, list[EngineRequest]] = {}
        for step, request in zip(steps, requests, strict=True):
            arrivals.setdefault(step, []).append(replace(request, request_id=f"{request.request_id} {again}"))
        driver.run(arrivals)
        for request in requests:
            row, num_cached = f"{request.request_id} {again}", 70 if boundary == "system" else 78
            assert_same(Answer.of(driver, row), cold[request.request_id], row, num_cached)
    after = contents()
    assert len(before) == len(after) == 1 and before[0].keys() == after[0].keys()
    assert all(np.array_equal(before[0][key], after[0][key]) for key in before[0]), "the snapshot has changed"


@pytest.mark.parametrize(
    "name", some_at_night(["alternating", "foreign head", "llama", "text"], ["alternating", "llama"], LIKE_OTHERS)
)
def test_rows_that_share_a_snapshot_are_unaffected_by_aborts_preemptions_and_failures(bench_of, taken, name):
    runner: MLXRunner = bench_of(name).runner
    system = plain_tokens("system", 70)
    names = ("aborted", "fails", "preempted", "urgent", "later")
    requests = {name: plain_request(name, system, plain_tokens(name, 5), max_tokens=24) for name in names}
    cold = cold_answers(runner, list(requests.values()))
    contents = taken(runner)
    config = cache_config({"max_running": 3, "scheduler": {"policy": "priority"}}, boundaries=("system",))
    driver = Driver(runner, config)
    driver.run({0: [plain_request("first", system, plain_tokens("first", 5), max_tokens=1)]})
    (before,) = contents()
    for name in ("aborted", "fails", "preempted"):
        fails = [Unruly((runner.vocab_size + 31) // 32, 9, "advance", ())] if name == "fails" else []
        driver.core.add_request(replace(requests[name], priority=1), fails)
    while driver.core.scheduler.num_decoding < 3:
        driver.core.step()
    driver.run({0: [requests["urgent"]]}, {1: ["aborted"]})
    assert driver.core.stats.num_preempted == 1 and driver.core.stats.num_aborted == 1
    assert driver.finish["fails"] is FinishReason.ERROR
    driver.run({0: [requests["later"]]})
    for name in ("urgent", "later"):
        assert_same(Answer.of(driver, name), cold[name], name, 70)
    assert Answer.of(driver, "preempted").token_ids == cold["preempted"].token_ids
    assert Answer.of(driver, "preempted").num_cached == 70
    for name in ("aborted", "fails"):
        assert 0 < len(driver.tokens[name]) < 24
        assert tuple(driver.tokens[name]) == cold[name].token_ids[: len(driver.tokens[name])], name
    (after, *_) = contents()
    assert all(np.array_equal(before[key], after[key]) for key in before), "the snapshot has changed"


@pytest.mark.parametrize(
    ("name", "room"),
    some_at_night([("deep", 12), ("alternating", 24), ("text", 24)], [("deep", 12)], LIKE_OTHERS, are_sets=True),
)
def test_memory_after_random_traffic_equals_the_accounted_bytes_of_the_cache(exactly, name, room):
    """Evictions, aborts and failures in between; what is behind the snapshots must not be kept by them."""
    bench: Bench = exactly(name)
    runner, rng = bench.runner, random.Random(name)
    driver = Driver(runner, cache_config(enabled=False))
    driver.run({0: [plain_request("warm", plain_tokens("warm", 200), plain_tokens("up", 100))]})
    base = _active_bytes(runner)
    max_gb = room * bench.snapshot_gb
    driver = Driver(runner, cache_config(max_gb=max_gb))
    for number in range(NUM_STORM_REQUESTS):
        parts = [plain_tokens((rng.randrange(3), depth), rng.choice(LENGTHS)) for depth in range(rng.randint(1, 4))]
        tail = plain_tokens(number, rng.choice([1, 17, 120]))
        driver.core.add_request(plain_request(str(number), *parts, tail, max_tokens=rng.randint(1, 6)))
        for _ in range(rng.choice([0, 0, 1, 2, 6])):
            with bench.faults() if rng.random() < 0.03 else nullcontext():
                driver.core.step()
            status = driver.core.prefixes.status()
            assert status.num_bytes <= status.max_bytes == int(max_gb * 2**30)
        if rng.random() < 0.2:
            driver.core.abort(str(number - rng.randint(0, 2)))
        if not driver.core.has_work:
            assert driver.core.prefixes.store.integrity_error() is None
    while driver.core.has_work:
        driver.core.step()
    prefix = driver.core.prefixes
    assert prefix.store.integrity_error() is None and prefix.status().num_integrity_errors == 0
    # What is kept depends on measured times.
    assert prefix.status().num_evicted > 5 and prefix.status().num_hits > 5
    assert driver.core.stats.num_aborted and driver.core.stats.num_failed
    held, told = _active_bytes(runner) - base, prefix.status().num_bytes
    assert abs(held - told) < MEMORY_TOLERANCE, f"{held} bytes are held, {told} in the books"
    assert prefix.clear().num_bytes and prefix.status().num_bytes == 0
    assert _active_bytes(runner) - base < MEMORY_TOLERANCE


def _active_bytes(runner: MLXRunner) -> int:
    gc.collect()
    mx.synchronize()
    return runner.memory()["active_bytes"]


@pytest.mark.parametrize("name", some_at_night(["no head", "llama", "deep", "text"], ["llama", "deep"], LIKE_OTHERS))
@pytest.mark.parametrize(
    "lengths",
    some_at_night([(100, 50), (17, 17), (65, 200)], [(17, 17), (65, 200)], "the gate has shorter and longer ones"),
)
def test_a_snapshot_takes_exactly_its_accounted_bytes(exactly, name, lengths):
    runner: MLXRunner = exactly(name).runner
    request = plain_request("r", *(plain_tokens(length, length) for length in lengths))
    Driver(runner, cache_config(enabled=False)).run({0: [request]})
    base = _active_bytes(runner)
    driver = Driver(runner, cache_config())
    driver.run({0: [request]})
    assert driver.core.prefixes.status().num_entries == 2
    held, told = _active_bytes(runner) - base, driver.core.prefixes.status().num_bytes
    assert held == told


@dataclass(frozen=True)
class EightRequests:
    """Requests with one system part of 150 tokens, and their answers without a cache by request id."""

    requests: list[EngineRequest]
    cold: dict[str, Answer]


@pytest.fixture(scope="module")
def eight(bench_of: Callable[[str], Bench]) -> EightRequests:
    system, tails = plain_tokens("long", 150), [plain_tokens(i, 20) for i in range(8)]
    requests = [plain_request(f"r{i}", system, tail, max_tokens=3) for i, tail in enumerate(tails)]
    return EightRequests(requests, cold_answers(bench_of("deep").runner, requests))


@pytest.mark.parametrize(("first", "num_choices"), [("stays", 3), ("is aborted", 1), ("fails", 1)])
def test_a_new_system_part_of_eight_concurrent_requests_is_prefilled_once(bench_of, eight, first, num_choices):
    """Also when the first of them leaves while it is prefilled: then the second begins anew."""
    bench: Bench = bench_of("deep")
    requests, cold = eight.requests, eight.cold
    driver = Driver(bench.runner, cache_config({"max_running": 24}))
    for request in requests:
        driver.core.add_request(replace(request, num_choices=num_choices))
    driver.core.step()
    assert driver.core.stats.num_prompt_tokens == 64
    if first == "is aborted":
        driver.core.abort("r0")
    with bench.faults() if first == "fails" else nullcontext():
        driver.core.step()
    driver.run({0: []})
    served = [Answer.of(driver, f"r{i}") for i in range(8) if first == "stays" or i]
    assert [answer.num_cached for answer in served] == [0, *[150] * (len(served) - 1)]
    wasted = {"stays": 0, "is aborted": 64 - 20, "fails": 64 - 20}[first]
    assert driver.core.stats.num_prompt_tokens == 150 + 8 * 20 + wasted
    assert driver.core.stats.num_cached_tokens == 150 * (len(served) - 1)
    for answer, expected in zip(served, [cold[f"r{i}"] for i in range(8) if first == "stays" or i], strict=True):
        assert answer.token_ids == expected.token_ids


@pytest.mark.parametrize("name", some_at_night(["deep", "foreign head", "demo"], ["deep", "foreign head"], LIKE_OTHERS))
@pytest.mark.parametrize("length", [1, 2, 16, 70])
def test_the_hidden_states_of_the_head_are_the_same_after_a_hit_as_after_a_miss(bench_of, monkeypatch, name, length):
    """Not only as often: what it says while drafting is the same, so its own state is that of the whole prefix.
    length: of what comes behind the prefix."""
    runner: MLXRunner = bench_of(name).runner
    request = plain_request("r", plain_tokens("prefix", 90), plain_tokens(name, length))
    said: list[np.ndarray] = []
    call, prefill = DraftingHead.__call__, runner.prefill

    def listen(head, *args):
        hidden = call(head, *args)
        said.append(np.array(hidden[:, -1]))
        return hidden

    def prefill_and_forget(*args):
        output = prefill(*args)
        said.clear()
        return output

    monkeypatch.setattr(DraftingHead, "__call__", listen)
    monkeypatch.setattr(runner, "prefill", prefill_and_forget)
    driver = Driver(runner, cache_config(boundaries=("system",)))
    heard = []
    for name in ("miss", "hit"):
        driver.run({0: [replace(request, request_id=name)]})
        heard.append(list(said))
    assert driver.chunks["hit"][0].num_cached == 90
    assert len(heard[0]) == len(heard[1]) > 3
    assert all(np.allclose(hit, miss, atol=1e-4) for miss, hit in zip(*heard, strict=True))
    assert replace(Answer.of(driver, "hit"), logprobs=(), num_cached=0) == replace(
        Answer.of(driver, "miss"), logprobs=()
    )


def test_acceptance_of_drafts_after_a_hit_equals_that_after_a_miss(runner, tokenizer):
    """Retrieval: a head that has not seen the text guesses badly."""
    (prompt,) = prompts(RETRIEVAL, 1, tokenizer, "prefix cache", 8)
    spec = EngineRequest("cold", prompt.token_ids, SamplingParams(24, 0.0), tokenizer.stop_token_ids)
    (cold,) = cold_answers(runner, [spec]).values()
    assert cold.num_accepted > 0.7 * cold.num_drafted
    for place in (len(prompt.token_ids) // 3, len(prompt.token_ids) - 1):
        driver = Driver(runner, cache_config(boundaries=("system",)))
        for name in ("miss", "hit"):
            driver.run({0: [replace(spec, request_id=name, boundaries=(Boundary("system", place),))]})
            assert_same(Answer.of(driver, name), cold, name, place if name == "hit" else 0)


def test_a_state_that_is_not_finite_is_not_cached(bench_of):
    """A poisonous token behind the system part: that is kept, and nothing behind it."""
    runner: MLXRunner = bench_of("foreign head").runner
    embedding = runner._model.module.language_model.model.embed_tokens
    weight, poison = embedding.weight, 501
    system = plain_tokens("system", 40)
    sick = replace(
        plain_request("sick", system, np.array([poison], np.int32), plain_tokens("more", 40)),
        boundaries=(Boundary("system", 40), Boundary("turn", 70)),
    )
    sound = plain_request("sound", system, plain_tokens("other", 10))
    cold = cold_answers(runner, [sound])
    driver = Driver(runner, cache_config())
    embedding.weight = mx.where(mx.arange(weight.shape[0])[:, None] == poison, mx.array(float("nan")), weight)
    try:
        for name in ("sick", "again"):
            driver.run({0: [replace(sick, request_id=name)]})
            assert driver.finish[name] is FinishReason.ERROR
            assert [entry.num_tokens for entry in driver.core.prefixes.status().entries] == [40]
    finally:
        embedding.weight = weight
    driver.run({0: [sound]})
    assert_same(Answer.of(driver, "sound"), cold["sound"], "sound", 40)
    driver.run({0: [replace(sick, request_id="healed")]})
    assert Answer.of(driver, "healed").num_cached == 40 and Answer.of(driver, "healed").finish == "length"


def test_chunks_of_a_failing_row_all_report_the_number_of_cached_tokens(bench_of):
    bench: Bench = bench_of("no head")
    driver = Driver(bench.runner, cache_config())
    for name in ("first", "second"):
        driver.core.add_request(plain_request(name, plain_tokens("system", 40), plain_tokens("tail", 10)))
        for _ in range(4):
            driver.core.step()
        with bench.faults():
            driver.core.step()
        driver.run({0: []})
    assert driver.finish["second"] is FinishReason.ERROR and len(driver.chunks["second"]) > 1
    assert {chunk.num_cached for chunk in driver.chunks["second"]} == {40}


def test_the_prompt_end_is_cached_despite_a_near_turn_end_where_it_is_the_only_boundary(bench_of):
    """A chat's turn ends a few tokens in front of its prompt's end: that is no boundary here."""
    runner: MLXRunner = bench_of("no head").runner
    driver = Driver(runner, cache_config(boundaries=("prompt",)))
    prompt = plain_tokens("prompt", 107)
    spec = EngineRequest("first", prompt, SamplingParams(1, 0.0), (), boundaries=(Boundary("turn", 100),))
    driver.run({0: [spec]})
    driver.run({0: [replace(spec, request_id="second")]})
    assert [answer.num_cached for answer in (Answer.of(driver, "first"), Answer.of(driver, "second"))] == [0, 106]
