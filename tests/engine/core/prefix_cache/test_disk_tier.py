"""The prefix cache with real files and a runner without a model."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.config import DiskCacheConfig, EngineConfig
from engine.core.engine_core import EngineCore
from engine.core.memory.costs import MemoryCosts
from engine.protocol import Boundary, EngineRequest, FinishReason, SamplingParams
from engine.snapshot_store.files import SnapshotFiles
from tests.support.clock import Clock
from tests.support.driver import Driver
from tests.support.fake_runner import BYTES_PER_TOKEN, STATE_BYTES, STOP, FakeRunner, answer

SYSTEM = list(range(100, 140))


def request(name: str, *parts: list[int], **more: Any) -> EngineRequest:
    ids = [token for part in parts for token in part]
    boundaries = (Boundary("system", len(parts[0])), Boundary("turn", len(ids)))
    spec = {"boundaries": boundaries, **more}
    return EngineRequest(name, np.array([*ids, 7, 8], np.int32), SamplingParams(2, seed=len(name)), (STOP,), **spec)


def turns(num_turns: int) -> list[list[int]]:
    return [SYSTEM, *([1000 + i] * 20 for i in range(num_turns))]


class Engine(Driver):
    """With files of its own; another one with the same path is a restarted one."""

    def __init__(
        self,
        path: Path,
        runner: FakeRunner | None = None,
        max_bytes: int = 2**30,
        max_gb: float = 1,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.runner = runner or FakeRunner()
        super().__init__(self.runner)
        self.files = SnapshotFiles(DiskCacheConfig(path=str(path), max_gb=max_gb), "model")
        config = EngineConfig.model_validate({"prefix_cache": {"max_gb": max_bytes / 2**30}})
        self.core = EngineCore(config, self.runner, self._publish, clock=clock, files=self.files)

    def cached(self, *requests: EngineRequest) -> list[int]:
        """One after the other, each written before the next."""
        for one in requests:
            self.run({0: [one]})
            self.files.flush()
            assert self.finish[one.request_id] is FinishReason.LENGTH and self.tokens[one.request_id] == answer(one)
            assert self.core.prefixes.store.integrity_error() is None
        return [self.chunks[one.request_id][0].num_cached for one in requests]

    def where(self) -> dict[int, str]:
        return {entry.num_tokens: entry.where for entry in self.core.prefixes.status().entries}


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Any]:
    made: list[Engine] = []

    def make(**more: Any) -> Engine:
        made.append(Engine(tmp_path, **more))
        return made[-1]

    yield make
    for one in made:
        one.core.close()


def restarted(engines: Any, before: Engine, **more: Any) -> Engine:
    before.core.close()
    return engines(**more)


def test_a_snapshot_evicted_from_memory_is_read_back_from_its_file(engines):
    engine = engines(max_bytes=2 * STATE_BYTES + 100 * BYTES_PER_TOKEN)
    first, other = request("a", SYSTEM, [1] * 20), request("b", [500 + t for t in SYSTEM[:30]], [1] * 21)
    assert engine.cached(first, other, replace(first, request_id="c")) == [0, 0, 60]
    assert set(engine.where().values()) == {"disk", "both"}
    assert engine.core.prefixes.store.counters.num_evicted > 0


def test_a_chain_is_read_back_without_the_states_in_between(engines):
    before = engines()
    for i in range(12):
        before.cached(request(f"t{i}", *turns(i + 1)))
    room = 4 * STATE_BYTES + 300 * BYTES_PER_TOKEN
    engine = restarted(engines, before, max_bytes=room)
    assert engine.cached(request("again", *turns(12))) == [40 + 12 * 20]
    assert engine.core.prefixes.store.num_bytes <= room
    assert engine.core.prefixes.store.counters.num_evicted == 0, "no other snapshot was evicted for them"


def test_prefix_that_does_not_fit_into_the_cache_is_read_into_the_row_that_continues_it(engines):
    before = engines()
    before.cached(request("a", *turns(12)))
    engine = restarted(engines, before, max_bytes=2 * STATE_BYTES)
    assert engine.cached(request("b", *turns(12))) == [280]
    assert engine.core.prefixes.store.num_bytes <= 2 * STATE_BYTES


def test_prefix_that_does_not_fit_into_the_cache_is_computed_for_several_rows(engines):
    before = engines()
    before.cached(request("a", *turns(12)))
    engine = restarted(engines, before, max_bytes=2 * STATE_BYTES)
    engine.runner.costs = MemoryCosts(token_bytes=BYTES_PER_TOKEN, state_bytes=STATE_BYTES)
    several = request("b", *turns(12), num_choices=2)
    engine.run({0: [several]})
    assert engine.chunks["b"][0].num_cached == 40


def test_an_answer_is_written_when_the_kv_segments_in_front_of_it_are_returned(engines):
    engine = engines()
    spec = replace(request("a", SYSTEM, [1] * 60), sampling=SamplingParams(70, seed=1))
    engine.run({0: [spec]})
    engine.files.flush()
    kinds = {entry.kind for entry in engine.core.prefixes.store.nodes()}
    assert {meta.kind for meta in engine.files.entries()} == kinds >= {"answer"}


def test_entries_that_wait_to_be_written_are_listed_once(engines):
    engine = engines()
    ask = replace(request("a", *turns(1)), sampling=SamplingParams(100, seed=1))
    engine.core.add_request(ask)
    while "a" not in engine.chunks:
        engine.core.step()
    tier = engine.core.prefixes._disk
    waiting = set(tier._waiting)
    for _ in range(5):
        engine.core.prefixes.write_behind()
    assert waiting and set(tier._waiting) == waiting
    engine.run({0: []})
    engine.files.flush()
    assert not tier._waiting and waiting <= {meta.digest for meta in engine.files.entries()}


def test_a_snapshot_that_does_not_fit_in_memory_when_its_row_ends_is_written_to_disk(engines):
    """Several conversations in turn, each of which pushes out the one before: nothing is computed twice."""
    engine = engines(max_bytes=3 * STATE_BYTES)
    asks = [request(f"{number}", SYSTEM, [number] * 200) for number in (1, 2, 3)]
    engine.cached(*asks)
    assert [engine.cached(replace(ask, request_id=f"{ask.request_id} again"))[0] for ask in asks] == [240] * 3


@pytest.mark.parametrize("num_turns", [1, 3])
def test_two_prompts_that_read_the_same_snapshot_at_the_same_time_are_both_served(engines, num_turns, monkeypatch):
    before = engines()
    before.cached(*(request(str(i), *turns(i)) for i in range(1, num_turns + 1)))
    engine = restarted(engines, before)
    monkeypatch.setattr(engine.core._prefill, "_max_stall_s", 0.0)
    asks = [replace(request(name, *turns(num_turns), [int(name)] * 60)) for name in ("7", "8")]
    engine.run({0: [replace(request("9", [9] * 30), sampling=SamplingParams(40, seed=1)), *asks]})
    for ask in asks:
        assert engine.chunks[ask.request_id][0].num_cached >= 40 + 20 * num_turns
        assert engine.tokens[ask.request_id] == answer(ask)
    assert engine.core.stats.num_failed == 0 and engine.core.prefixes.store.integrity_error() is None


def test_layers_are_copied_step_by_step_while_rows_decode(engines, monkeypatch):
    before = engines()
    before.cached(request("a", SYSTEM, [1] * 20))
    engine = restarted(engines, before)
    monkeypatch.setattr(engine.core._prefill, "_max_stall_s", 0.0)
    decoding = replace(request("decoding", [9] * 30), sampling=SamplingParams(60, seed=3), boundaries=())
    engine.core.add_request(decoding)
    engine.core.step()
    engine.files.flush()
    engine.core.add_request(request("b", SYSTEM, [1] * 20))
    positions = []
    while "b" not in engine.chunks:
        engine.core.step()
        positions.append(len(engine.tokens["decoding"]))
    assert engine.chunks["b"][0].num_cached == 60
    assert len(set(positions)) >= 2, "the other row got tokens meanwhile"
    engine.run({0: []})
    assert engine.tokens["b"] == answer(request("b", SYSTEM, [1] * 20))


def test_entries_of_evicted_files_are_pruned_and_the_next_miss_reports_the_eviction(engines):
    engine = engines(max_bytes=4 * STATE_BYTES, max_gb=2**16 / 2**30)
    for i in range(200):
        engine.cached(request(f"r{i}", [i * 50 + t for t in range(40)], [1] * 20))
    engine.core.prefixes.store.prune()
    assert len(engine.core.prefixes.store) <= len(engine.files.entries()) + 4 < 100
    miss = engine.cached(request("old", list(range(40)), [1] * 20))
    assert miss == [0] and engine.core.prefixes.status().recent_misses[0].reason == "evicted"


def test_a_failed_restore_does_not_remove_the_files_of_the_snapshots(engines):
    engine = engines()
    engine.cached(request("a", SYSTEM, [1] * 20), request("b", SYSTEM, [1] * 20, [2] * 20))
    before = len(engine.files.entries())
    engine.runner.broken = {"restore"}
    assert engine.cached(request("c", SYSTEM, [1] * 20)) == [0]
    engine.runner.broken = set()
    assert len(engine.files.entries()) == before
    assert engine.cached(request("d", SYSTEM, [1] * 20, [2] * 20)) == [80]


@pytest.mark.parametrize("error", [ValueError("not of this model"), MemoryError(), RuntimeError("[malloc]")])
def test_a_snapshot_that_cannot_be_read_back_costs_a_prefill_and_no_answer(engines, monkeypatch, error):
    before = engines()
    before.cached(request("a", SYSTEM, [1] * 20))
    engine = restarted(engines, before)

    def failing(*args: Any) -> Any:
        raise error

    monkeypatch.setattr(engine.runner, "import_snapshot", failing)
    assert engine.cached(request("b", SYSTEM, [1] * 20)) == [0]
    assert engine.core.prefixes.status().num_unusable == 1
    assert engine.core.failed_steps_in_a_row == 0
    monkeypatch.undo()
    assert engine.cached(request("c", SYSTEM, [1] * 20)) == [60]


def hang(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.files, "load", lambda digest, prefix: Future())


def test_a_file_is_kept_when_its_parent_is_evicted_from_memory_while_it_is_read(engines, monkeypatch):
    before = engines()
    before.cached(request("a", SYSTEM, [1] * 90))
    engine = restarted(engines, before)
    assert engine.cached(request("b", SYSTEM, [2] * 20)) == [40]
    load, read = engine.files.load, Future()
    monkeypatch.setattr(engine.files, "load", lambda digest, prefix: read)
    engine.core.add_request(request("c", SYSTEM, [1] * 90))
    engine.core.step()
    cache = engine.core.prefixes.store
    (turn,) = [entry for entry in cache.nodes() if entry.num_tokens == 130]
    system = cache.get(turn.parent_digest)
    assert system is not None
    cache.forget_memory(system)
    monkeypatch.undo()
    read.set_result(load(turn.digest).result(60))
    engine.run({0: []})
    assert engine.tokens["c"] == answer(request("c", SYSTEM, [1] * 90))
    assert 130 in {meta.num_tokens for meta in engine.files.entries()}
    assert cache.integrity_error() is None


def test_a_read_from_a_hanging_disk_is_abandoned_after_the_timeout(engines, monkeypatch):
    monkeypatch.setattr("engine.core.prefix_cache.disk_tier.READ_TIMEOUT_S", 0.2)
    before = engines()
    before.cached(request("a", SYSTEM, [1] * 20))
    engine = restarted(engines, before)
    hang(engine, monkeypatch)
    began = time.monotonic()
    assert engine.cached(request("b", SYSTEM, [1] * 20)) == [0]
    assert time.monotonic() - began >= 0.2 and engine.core.prefixes.status().num_unusable == 1


def test_an_abort_or_a_clear_while_prompts_wait_for_the_disk_costs_no_answer(engines, monkeypatch):
    before = engines()
    before.cached(request("a", SYSTEM, [1] * 20))
    engine = restarted(engines, before)
    hang(engine, monkeypatch)
    engine.core.add_request(request("gone", SYSTEM, [1] * 20))
    engine.core.step()
    engine.core.abort("gone")
    engine.run({0: [request("other", [5] * 40, [6] * 20)]})
    engine.core.add_request(request("cleared", SYSTEM, [1] * 20))
    engine.core.step()
    monkeypatch.undo()
    engine.core.prefixes.clear()
    engine.core.prefixes.clear_files()
    [prompt] = engine.core.scheduler.prefills.in_progress
    assert prompt.session is not None and prompt.session.reading is not None
    prompt.session.reading.until_s = 0.0
    engine.run({0: []})
    assert engine.tokens["cleared"] == answer(request("cleared", SYSTEM, [1] * 20)) and "gone" not in engine.tokens
    assert engine.core.prefixes.store.integrity_error() is None


def pinned(name: str, ids: list[int]) -> EngineRequest:
    boundaries = (Boundary("system", len(ids)),)
    ids_array = np.array([*ids, 1], np.int32)
    return EngineRequest(name, ids_array, SamplingParams(2), (STOP,), boundaries=boundaries, pinned=True)


def test_a_pinned_prompt_is_pinned_even_if_its_tokens_were_stored_as_another_kind(engines):
    before = engines()
    before.cached(EngineRequest("raw", np.array([*SYSTEM, 1], np.int32), SamplingParams(2), (STOP,)))
    assert [entry.kind for entry in before.core.prefixes.status().entries] == ["prompt"]
    engine = restarted(engines, before)
    engine.cached(pinned("pin", SYSTEM))
    assert [(entry.num_tokens, entry.pinned) for entry in engine.core.prefixes.status().entries] == [(40, True)]


def test_a_shorter_system_part_is_not_pinned_in_place_of_the_whole(engines):
    engine = engines()
    engine.cached(request("a", SYSTEM[:30], [1] * 20), pinned("pin", SYSTEM))
    assert {e.num_tokens: e.pinned for e in engine.core.prefixes.status().entries} == {50: False, 30: False, 40: True}


def test_clearing_keeps_a_pinned_snapshot_even_if_its_parent_is_only_on_disk(engines):
    clock = Clock(0.0)
    engine = engines(max_bytes=3 * STATE_BYTES + 120 * BYTES_PER_TOKEN, clock=clock)
    engine.core.prefixes.memory.seconds = lambda start, end: float(
        end - start
    )  # reading is cheaper, however slow it is
    engine.cached(request("a", SYSTEM[:20], [1] * 20), pinned("pin", SYSTEM))
    for i in range(4):
        clock.advance(1)
        engine.cached(request(f"r{i}", [i * 50 + t for t in range(300, 340)], [1] * 20))
    assert engine.where()[20] == "disk"
    engine.core.prefixes.clear()
    engine.core.prefixes.clear_files()
    engine.files.flush()
    assert engine.where() == {40: "memory"} and engine.core.prefixes.store.integrity_error() is None
    assert engine.cached(request("b", SYSTEM, [1] * 20)) == [40]


def test_a_file_stored_behind_another_parent_is_read_back_behind_that_parent(engines):
    one, other = engines(), engines()  # two processes with one directory
    one.cached(request("a", SYSTEM, [1] * 20))
    whole = [*SYSTEM, *[1] * 20]
    other.core.prefixes.memory.max_bytes = STATE_BYTES + 70 * BYTES_PER_TOKEN
    other.cached(request("b", whole[:20], whole[20:]))
    other.cached(request("c", [9] * 50, [1] * 5))
    assert other.cached(request("d", whole[:20], whole[20:])) == [60]
