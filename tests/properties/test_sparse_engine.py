"""Sparse prompts in the engine's daily life: snapshots of every length, preemption, failures, long ones, the door."""

import asyncio
import gc
import logging
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.errors import InvalidRequest
from engine.protocol import Boundary, EngineRequest, FinishReason, SamplingParams
from engine.worker.model_runner import MLXRunner
from tests.support.cold_runner import load_cold
from tests.support.conversations import LENGTHS, Answer, cache_config, compare_logprobs, plain_tokens
from tests.support.demo_model import DRAFT
from tests.support.driver import Driver
from tests.support.night import some_at_night
from tests.support.sparse_prompts import KINDS, num_computed, with_plan, with_random_plan

MEMORY_TOLERANCE = 2**20
NUM_STORM_REQUESTS = 30
SAMPLING = SamplingParams(8, seed=5, logprobs=2)


@pytest.fixture(scope="session")
def load(tiny_model: Callable[..., Path], runner: MLXRunner, text_runner: MLXRunner) -> Callable[[str], MLXRunner]:
    """load(name of one of KINDS, demo or text), once."""
    runners = {"demo": runner, "text": text_runner}

    def make(name: str) -> MLXRunner:
        if name not in runners:
            config = EngineConfig(model=str(tiny_model(**KINDS[name])))
            runners[name] = load_cold(config)
        return runners[name]

    return make


def answer(runner: MLXRunner, spec: EngineRequest) -> Answer:
    """Alone, plainly, without a cache."""
    driver = Driver(runner, cache_config({"mtp": "off"}, enabled=False))
    driver.run({0: [spec]})
    return Answer.of(driver, spec.request_id)


def assert_same(got: Answer, cold: Answer, name: Any) -> None:
    """But for drafts and what was cached."""
    compare_logprobs(str(name), got.logprobs, cold.logprobs)
    assert (got.token_ids, got.finish, got.error) == (cold.token_ids, cold.finish, None), name


def tokens_of(name: Any, num_tokens: int = 150) -> EngineRequest:
    return EngineRequest(str(name), plain_tokens(name, num_tokens), SAMPLING, ())


def dense_to(spec: EngineRequest, end: int) -> EngineRequest:
    """Kept up to `end`, and every third chunk of 10 behind it."""
    places = np.arange(end + 1, len(spec.token_ids))
    return with_plan(spec, np.union1d(np.arange(end), [*places[places // 10 % 3 == 1], len(spec.token_ids) - 1]))


@contextmanager
def faults(runner: MLXRunner) -> Iterator[None]:
    layers = type(runner._model.module.language_model.model)
    with mock.patch.object(layers, "__call__", side_effect=ZeroDivisionError):
        yield


def assert_empty(driver: Driver) -> None:
    """No rows, and nobody holds a snapshot any more."""
    core, memory = driver.core, driver.core.runner.memory()
    assert not core.has_work and memory["decode_cache_bytes"] == memory["prefill_cache_bytes"] == 0
    assert core.prefixes.store.integrity_error() is None and core.prefixes.status().num_integrity_errors == 0
    core.prefixes.clear()
    assert core.prefixes.status().num_bytes == core.prefixes.status().num_entries == 0


@pytest.mark.parametrize(
    "name",
    some_at_night(["foreign head", "no head"], ["foreign head"], "its head has a state beside that of the layers"),
)
def test_the_longest_snapshot_that_is_no_longer_than_the_gap_serves_a_plan(load, name):
    """Whatever else is there, what it gives is what it gives without; and dense prompts still get dense tokens."""
    runner, spec = load(name), tokens_of("prompt")
    dense, gaps = answer(runner, spec), (29, 30, 69, 70, 71, 120)
    cold = {end: answer(runner, dense_to(spec, end)) for end in gaps}
    assert len({(one.token_ids, one.logprobs) for one in (dense, *cold.values())}) == len(gaps) + 1
    for lengths in ((30,), (30, 70, 100), (149,)):
        driver = Driver(runner, cache_config(boundaries=("system",)))
        for length in lengths:
            ids = spec.token_ids if length == 149 else np.append(spec.token_ids[: length + 1], [20, 21])
            boundaries = (Boundary("system", length),)
            driver.run({0: [replace(spec, request_id=f"{length}", token_ids=ids, boundaries=boundaries)]})
        for end in gaps:
            driver.run({0: [replace(dense_to(spec, end), request_id=f"sparse {end}")]})
            got = Answer.of(driver, f"sparse {end}")
            assert_same(got, cold[end], (lengths, end))
            assert got.num_cached == max((length for length in lengths if length <= end), default=0)
        driver.run({0: [replace(spec, request_id="dense")]})
        assert_same(Answer.of(driver, "dense"), dense, lengths)
        assert Answer.of(driver, "dense").num_cached == max(lengths, default=0)
        assert sorted(entry.num_tokens for entry in driver.core.prefixes.status().entries) == list(lengths)


@pytest.mark.parametrize(
    ("name", "chunk"),
    some_at_night(
        [("alternating", 16), ("no head", 2048)],
        [("alternating", 16)],
        "the gate has the model with a head, in chunks that end at no boundary",
        are_sets=True,
    ),
)
@pytest.mark.parametrize(
    "end", some_at_night([49, 50, 90, 91, 148, 149], [49, 90, 91, 149], "the gate has each place beside a boundary")
)
def test_boundaries_before_the_first_gap_are_cached_for_all_prompts_and_none_behind_it(load, name, chunk, end):
    runner, boundaries = load(name), (Boundary("system", 50), Boundary("turn", 90))
    spec = replace(tokens_of("prompt"), boundaries=boundaries)
    sparse, dense = replace(dense_to(spec, end), request_id="sparse"), answer(runner, spec)
    driver = Driver(runner, cache_config({"prefill_chunk_tokens": chunk}))
    cold = answer(runner, sparse)
    driver.run({0: [sparse]})
    all_kept = end == 149  # then the end of the prompt is in front of no gap
    lengths = [n for n in (50, 90) if n <= end] + [149] * all_kept
    assert sorted(entry.num_tokens for entry in driver.core.prefixes.status().entries) == lengths
    served = max(lengths, default=0)
    others = [("again", sparse, served), ("dense", spec, served), ("dense again", spec, 149), ("late", sparse, served)]
    for request_id, one, num_cached in others:
        driver.run({0: [replace(one, request_id=request_id)]})
        got = Answer.of(driver, request_id)
        assert_same(got, cold if one is sparse else dense, request_id)
        assert got.num_cached == num_cached, request_id
    driver.run({0: [replace(sparse, request_id="other tenant", tenant="other")]})
    assert_same(Answer.of(driver, "other tenant"), cold, "other tenant")
    assert Answer.of(driver, "other tenant").num_cached == 0
    driver.core.prefixes.clear()
    driver.run({0: [replace(sparse, request_id="cleared")]})
    assert_same(Answer.of(driver, "cleared"), cold, "cleared")
    assert Answer.of(driver, "cleared").num_cached == 0
    assert_empty(driver)


@pytest.mark.parametrize(
    "mtp",
    [
        pytest.param("off", marks=pytest.mark.night("tests/properties/test_preempted_rows.py has rows without drafts")),
        {"max_draft_tokens": 3},
    ],
    ids=["plain", "drafts"],
)
@pytest.mark.parametrize(("name", "enabled"), [("deep", False), ("foreign head", True)], ids=["no cache", "cache"])
def test_a_preempted_sparse_row_continues_with_exactly_the_same_tokens(load, name, enabled, mtp):
    """The tokens computed again are the kept ones and the generated ones, which follow the whole prompt."""
    runner, rng = load(name), random.Random(name)
    engine = {"mtp": mtp, "max_running": 2, "scheduler": {"policy": "priority"}}
    driver = Driver(runner, cache_config(engine, enabled=enabled))
    sampling = replace(SAMPLING, max_tokens=30)
    rows = {
        f"row {i}": replace(
            dense_to(tokens_of(f"row {i}"), 60), sampling=sampling, priority=1, boundaries=(Boundary("system", 40),)
        )
        for i in range(2)
    }
    urgent = replace(with_random_plan(rng, tokens_of("urgent"), None), sampling=SAMPLING)
    cold = {row: answer(runner, spec) for row, spec in (rows | {"urgent": urgent}).items()}
    for spec in rows.values():
        driver.core.add_request(spec)
    while min(len(driver.tokens[row]) for row in rows) < 9:
        driver.core.step()
    before = driver.core.stats.num_prompt_tokens
    assert before == sum(num_computed(spec) for spec in rows.values())
    (out,) = _preempted(driver, urgent, rows)
    driver.run({0: []})
    for row, expected in cold.items():
        assert_same(Answer.of(driver, row), expected, row)
    for row, spec in rows.items():
        assert {chunk.num_skipped for chunk in driver.chunks[row]} == {150 - num_computed(spec)}
    again = driver.core.stats.num_prompt_tokens - before - num_computed(urgent)
    served = 40 if enabled else 0
    assert again == num_computed(rows[out[0]]) - served + out[1], "kept tokens and those given out"
    assert_empty(driver)


def _preempted(driver: Driver, urgent: EngineRequest, rows: dict[str, EngineRequest]) -> list[tuple[str, int]]:
    """Lets the urgent one in; which rows had to leave, with how many tokens of an answer."""
    driver.core.add_request(urgent)
    while not driver.core.stats.num_preempted:
        driver.core.step()
    counts = {row: len(driver.tokens[row]) for row in rows}
    for _ in range(2):
        driver.core.step()
    return [(row, count) for row, count in counts.items() if len(driver.tokens[row]) == count]


@pytest.mark.parametrize(
    "num_steps", some_at_night(range(1, 5), [2, 3], "the gate ends it in the chunks before and behind the gap")
)
@pytest.mark.parametrize("ends", ["fails", "is aborted"])
def test_a_sparse_prompt_failed_or_aborted_midway_leaves_no_state_behind_its_gap(load, ends, num_steps):
    """num_steps: chunks in front of the end; the third ends behind the gap. What others have stored stays."""
    runner = load("foreign head")
    spec = replace(dense_to(tokens_of("prompt", 200), 80), boundaries=(Boundary("turn", 72),))
    assert num_computed(spec) > 80 + 32
    cold = answer(runner, spec)
    driver = Driver(runner, cache_config({"prefill_chunk_tokens": 16}))
    other = np.append(spec.token_ids[:45], [20, 21, 22])
    first = replace(tokens_of("first"), token_ids=other, boundaries=(Boundary("system", 40),))
    driver.run({0: [first]})
    kept = driver.core.prefixes.status().num_bytes
    driver.core.add_request(replace(spec, request_id="ends"))
    for _ in range(num_steps):
        driver.core.step()
    assert not driver.tokens["ends"] and driver.core.scheduler.num_running == 1
    if ends == "fails":
        with faults(runner):
            driver.core.step()
        assert driver.finish["ends"] is FinishReason.ERROR
        assert {chunk.num_skipped for chunk in driver.chunks["ends"]} == {200 - num_computed(spec)}
        assert driver.core.prefixes.status().num_bytes == kept
    else:
        driver.core.abort("ends")
    driver.run({0: []})
    assert all(entry.num_tokens <= 80 for entry in driver.core.prefixes.status().entries)
    driver.run({0: [replace(spec, request_id="again")]})
    assert_same(Answer.of(driver, "again"), cold, "again")
    assert Answer.of(driver, "again").num_cached >= 40
    assert_empty(driver)


@pytest.mark.parametrize("name", ["alternating"])
def test_memory_after_random_sparse_prompts_equals_the_accounted_bytes_of_the_cache(load, monkeypatch, name):
    """Aborts and failures in between. Freed buffers are not reused here, so that active bytes are those in use."""
    runner, rng = load(name), random.Random(name)
    monkeypatch.setattr(logging.getLogger("orchard.engine"), "disabled", True)  # pytest keeps frames with their arrays
    limit = mx.set_cache_limit(0)
    mx.clear_cache()
    try:
        Driver(runner, cache_config(enabled=False)).run({0: [tokens_of("warm up", 300)]})
        base = _active_bytes(runner)
        driver = Driver(runner, cache_config())
        _storm(driver, rng)
        held, told = _active_bytes(runner) - base, driver.core.prefixes.status().num_bytes
        assert abs(held - told) < MEMORY_TOLERANCE, f"{held} bytes are held, {told} in the books"
        assert_empty(driver)
        assert _active_bytes(runner) - base < MEMORY_TOLERANCE
    finally:
        mx.set_cache_limit(limit)


def _storm(driver: Driver, rng: random.Random) -> None:
    runner: Any = driver.core.runner
    for number in range(NUM_STORM_REQUESTS):
        parts = [plain_tokens((rng.randrange(3), depth), rng.choice(LENGTHS)) for depth in range(rng.randint(1, 4))]
        ids = np.concatenate([*parts, plain_tokens(number, rng.choice([1, 17, 120]))])
        spec = EngineRequest(str(number), ids, replace(SAMPLING, max_tokens=rng.randint(1, 6)), ())
        spec = with_random_plan(rng, replace(spec, boundaries=(Boundary("system", len(parts[0])),)), None)
        driver.core.add_request(spec)
        for _ in range(rng.choice([0, 0, 1, 2, 6])):
            with faults(runner) if rng.random() < 0.15 else nullcontext():
                driver.core.step()
        if rng.random() < 0.3:
            driver.core.abort(str(number - rng.randint(0, 2)))
        if not driver.core.has_work:
            assert driver.core.prefixes.store.integrity_error() is None
    driver.run({0: []})
    stats, status = driver.core.stats, driver.core.prefixes.status()
    assert stats.num_aborted and stats.num_failed and status.num_hits and status.num_stored


def _active_bytes(runner: MLXRunner) -> int:
    gc.collect()
    mx.synchronize()
    return runner.memory()["active_bytes"]


@pytest.mark.parametrize(
    "mtp",
    [pytest.param("off", marks=pytest.mark.night("rows that draft decode in each step, too")), {"max_draft_tokens": 2}],
    ids=["plain", "drafts"],
)
def test_rows_that_decode_get_a_token_in_every_step_of_a_long_sparse_prompt(load, monkeypatch, mtp):
    runner, chunks = load("demo"), []
    engine = {"mtp": mtp, "prefill_chunk_tokens_busy": 200, "prefill_chunk_tokens": 2048}
    driver = Driver(runner, cache_config(engine | {"scheduler": {"max_stall_s": 1000}}, enabled=False))
    long = tokens_of("long", 4500)
    long = with_plan(long, np.union1d(np.arange(4500)[np.arange(4500) // 32 % 3 == 1], [4499]))
    rows = [replace(tokens_of(f"row {i}", 20), sampling=replace(SAMPLING, max_tokens=200)) for i in range(2)]
    driver.run({0: [replace(rows[0], sampling=replace(SAMPLING, max_tokens=4))]})
    rows = [replace(row, request_id=f"decodes {i}") for i, row in enumerate(rows)]
    for row in rows:
        driver.core.add_request(row)
    while min(len(driver.tokens[row.request_id]) for row in rows) < 4:
        driver.core.step()
    before, prefill = driver.core.stats.num_prompt_tokens, runner.prefill
    monkeypatch.setattr(runner, "prefill", lambda *args: chunks.append(prefill(*args)) or chunks[-1])
    driver.core.add_request(long)
    while not driver.tokens[long.request_id]:
        counts, taken = [len(driver.tokens[row.request_id]) for row in rows], driver.core.stats.num_prompt_tokens
        driver.core.step()
        assert all(len(driver.tokens[row.request_id]) > n for row, n in zip(rows, counts, strict=True))
        assert 0 < driver.core.stats.num_prompt_tokens - taken <= 200
    assert driver.core.stats.num_prompt_tokens - before == num_computed(long) == sum(c.num_tokens for c in chunks)
    assert len(chunks) >= num_computed(long) // 200
    for request_id in (long.request_id, *(row.request_id for row in rows)):
        driver.core.abort(request_id)
    driver.run({0: []})
    assert_empty(driver)


def test_a_plan_that_omits_part_of_an_image_fails_alone(load, picture):
    runner, image = load("demo"), picture("red")
    marks = np.full(image.num_tokens, runner.image_token_id, np.int32)
    spec = tokens_of("text", 20)
    spec = replace(spec, token_ids=np.concatenate([spec.token_ids, marks, [30, 31]]).astype(np.int32), images=(image,))
    driver = Driver(runner, cache_config(enabled=False))
    beside, bad = tokens_of("beside", 20), np.delete(np.arange(len(spec.token_ids)), 25)
    driver.run({0: [beside, replace(with_plan(spec, bad), request_id="bad")]})
    assert driver.finish["bad"] is FinishReason.ERROR and "1 of" in str(driver.errors["bad"])
    assert_same(Answer.of(driver, "beside"), answer(runner, beside), "beside")
    assert_empty(driver)


def ask_door(model: Any, test: Callable[[AsyncEngine], Awaitable[None]], **config: Any) -> None:
    async def main() -> None:
        given = EngineConfig.model_validate({"model": str(model), **config})
        engine = AsyncEngine(given, lambda config, progress: load_cold(config))
        await engine.wait_ready()
        try:
            async with asyncio.timeout(60):
                await test(engine)
        finally:
            await engine.shutdown()

    asyncio.run(main())


def test_chunks_and_status_report_the_skipped_tokens_of_sparse_prompts(load, tiny_model):
    """All chunks tell what was left out; the status counts; the cache holds nothing behind a gap."""
    boundaries = (Boundary("system", 30), Boundary("turn", 80))
    spec = replace(tokens_of("prompt"), boundaries=boundaries, num_choices=2)
    sparse = dense_to(spec, 50)
    cold = answer(load("deep"), replace(sparse, num_choices=1))

    async def test(engine: AsyncEngine) -> None:
        for number in range(3):
            one = replace(sparse, request_id=f"{number}")
            chunks = [chunk async for chunk in engine.generate(one)]
            assert {chunk.num_skipped for chunk in chunks} == {150 - num_computed(sparse)}
            assert {chunk.num_cached for chunk in chunks} == {30 if number else 0}
            tokens = [token for chunk in chunks if chunk.index == 0 for token in chunk.token_ids]
            assert tuple(tokens) == cold.token_ids
            assert [entry.num_tokens for entry in (await engine.cache_status()).entries] == [30]
        status = engine.status()
        assert status.num_sparse == 6 and status.num_cached_tokens == 2 * 30, "rows, one for each choice"
        assert status.num_skipped_tokens == 6 * (150 - num_computed(sparse))
        held = await engine.cached_prefix(replace(spec, request_id="asks"))
        assert (held.num_tokens, held.no_sparse) == (30, None)
        chunks = [chunk async for chunk in engine.generate(replace(spec, num_choices=1, request_id="dense"))]
        assert {(chunk.num_skipped, chunk.num_cached) for chunk in chunks} == {(0, 30)}
        assert engine.status().num_sparse == 6
        held = await engine.cached_prefix(replace(spec, request_id="asks", tenant="other"))
        assert held.num_tokens == 0

    ask_door(tiny_model(**KINDS["deep"]), test, mtp="off")


def test_a_plan_that_does_not_fit_its_prompt_is_refused_before_any_step(tiny_model):
    spec = tokens_of("prompt", 60)
    good = dense_to(spec, 20).sparse
    assert good is not None
    bad = {
        "another prompt": (replace(good, fingerprint="0" * 64), spec),
        "another token": (good, replace(spec, token_ids=np.append(spec.token_ids[:-1], 20).astype(np.int32))),
        "the last is missing": (with_plan(spec, good.positions[:-1]).sparse, spec),
        "not ascending": (with_plan(spec, [3, 2, 59]).sparse, spec),
        "longer": (good, replace(spec, token_ids=np.append(spec.token_ids, 20).astype(np.int32))),
        "of 64 bits": (replace(good, positions=good.positions.astype(np.int64)), spec),
    }

    async def test(engine: AsyncEngine) -> None:
        before = engine.status()
        for name, (plan, one) in bad.items():
            with pytest.raises(InvalidRequest, match="prefill plan") as error:
                await anext(engine.generate(replace(one, sparse=plan)))
            assert error.value.field == "sparse", name
        after = engine.status()
        assert (after.num_prompt_tokens, after.num_steps, after.num_sparse) == (0, before.num_steps, 0)
        chunks = [chunk async for chunk in engine.generate(replace(spec, sparse=good))]
        assert chunks[-1].finish_reason is FinishReason.LENGTH and chunks[0].num_skipped == 60 - len(good.positions)

    ask_door(tiny_model(**KINDS["no head"]), test)


def test_a_model_that_takes_no_explicit_positions_refuses_every_plan():
    spec = tokens_of("prompt", 60)

    async def test(engine: AsyncEngine) -> None:
        assert (await engine.cached_prefix(spec)).no_sparse
        with pytest.raises(InvalidRequest, match="positions"):
            await anext(engine.generate(dense_to(spec, 20)))
        assert engine.status().num_prompt_tokens == 0
        assert [chunk async for chunk in engine.generate(spec)][-1].finish_reason is FinishReason.LENGTH

    ask_door(DRAFT, test)
