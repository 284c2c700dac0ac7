"""The prefix cache through AsyncEngine: status, clearing, pinned prompts, files."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.errors import EngineFailed
from engine.protocol import Boundary, EngineRequest, SamplingParams
from tests.support.fake_runner import STOP, FakeRunner, answer, run_engine, until

SYSTEM = list(range(100, 150))


def request(name: str, tenant: str = "") -> EngineRequest:
    ids = np.array([*SYSTEM, 7, 8, 9], np.int32)
    boundaries = (Boundary("system", len(SYSTEM)),)
    return EngineRequest(name, ids, SamplingParams(3), (STOP,), boundaries=boundaries, tenant=tenant)


async def ask(engine: AsyncEngine, *requests: EngineRequest) -> list[int]:
    """One after the other: tokens from the cache."""
    found = []
    for one in requests:
        chunks = [chunk async for chunk in engine.generate(one)]
        assert [token for chunk in chunks for token in chunk.token_ids] == answer(one)
        assert len({chunk.num_cached for chunk in chunks}) == 1, "each chunk says it"
        found.append(chunks[0].num_cached)
    return found


def test_the_status_and_clearing_are_answered_between_steps():
    async def test(engine: AsyncEngine) -> None:
        assert await ask(engine, request("a"), request("b")) == [0, 50]
        status = await engine.cache_status()
        assert (status.num_hits, status.num_misses, status.num_entries, status.off_reason) == (1, 1, 1, None)
        cleared = await engine.clear_cache()
        assert (cleared.num_entries, cleared.num_bytes, cleared.num_files) == (1, status.num_bytes, 0)
        assert await ask(engine, request("c")) == [0]
        newest = (await engine.cache_status()).recent_misses[0]
        assert (newest.reason, newest.request_id) == ("cleared", "c"), "the client's own id"
        assert engine.status().num_cached_tokens == 50

    run_engine(test, FakeRunner(), {})


def test_a_failed_status_query_does_not_harm_the_engine(monkeypatch):
    async def test(engine: AsyncEngine) -> None:
        assert engine._thread.worker is not None
        monkeypatch.setattr(engine._thread.worker.prefixes, "status", lambda: 1 / 0)
        with pytest.raises(EngineFailed, match="ZeroDivisionError"):
            await engine.cache_status()
        assert await ask(engine, request("a"), request("b")) == [0, 50]

    run_engine(test, FakeRunner(), {})


def test_cache_queries_to_an_engine_that_was_shut_down_are_refused():
    async def test(engine: AsyncEngine) -> None:
        await engine.shutdown()
        with pytest.raises(EngineFailed, match="shut down"):
            await engine.cache_status()
        with pytest.raises(EngineFailed, match="shut down"):
            await engine.clear_cache()

    run_engine(test, FakeRunner(), {})


def words_runner() -> FakeRunner:
    """For prompts of the demo model's tokenizer."""
    runner = FakeRunner()
    runner.vocab_size = runner.num_embeddings = 100_000
    return runner


def pins(*systems: str, **more: Any) -> dict[str, Any]:
    return {"prefix_cache": {"pinned": [{"system": system} for system in systems], **more}}


def test_pinned_prompts_are_prefilled_before_the_engine_is_ready():
    async def test(engine: AsyncEngine) -> None:
        status = await engine.cache_status()
        assert status.num_pinned == 2 and engine.status().state == "ready"
        assert all(entry.pinned and entry.kind == "system" for entry in status.entries)
        assert (await engine.clear_cache()).num_entries == 0
        assert (await engine.cache_status()).num_pinned == 2

    run_engine(
        test, words_runner(), pins("You sell fruit. Never sell vegetables.", "You are a poet who counts syllables.")
    )


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (pins("You sell fruit.", max_gb=1e-7), "max_gb"),
        ({"prefix_cache": {"pinned": [{"system_file": "/nonexistent/system.txt"}]}}, "system.txt cannot be read"),
    ],
)
def test_a_prompt_that_cannot_be_pinned_ends_the_start_with_the_reason(config, reason):
    async def main() -> None:
        engine = AsyncEngine(EngineConfig.model_validate(config), lambda config, progress: words_runner())
        with pytest.raises(EngineFailed, match=reason):
            await engine.wait_ready()
        assert engine.status().state == "failed"
        with pytest.raises(EngineFailed, match=reason):
            engine.check_health()
        await engine.shutdown()

    asyncio.run(main())


def test_what_a_model_without_a_prefix_cache_could_only_ignore_ends_the_start_with_its_names(tmp_path: Path):
    def whole() -> FakeRunner:
        runner = words_runner()
        runner.whole_prompts = "the tokens of its prompts see each other"
        return runner

    async def main(config: dict[str, Any], reason: str) -> None:
        engine = AsyncEngine(EngineConfig.model_validate(config), lambda config, progress: whole())
        with pytest.raises(EngineFailed, match=f"^EngineFailed: {reason} cannot be used with demo: the tokens of its"):
            await engine.wait_ready()
        await engine.shutdown()

    disk = {"path": str(tmp_path)}
    asyncio.run(main({"prefix_cache": {"disk": disk}}, "prefix_cache.disk"))
    asyncio.run(main(pins("You sell fruit.", disk=disk), "prefix_cache.disk and prefix_cache.pinned"))


def test_an_engine_shut_down_while_it_prefills_pinned_prompts_stays_stopped():
    async def main() -> None:
        config = EngineConfig.model_validate(pins("You sell fruit.", "You are a poet."))
        engine = AsyncEngine(config, lambda config, progress: words_runner())
        await until(lambda: engine._thread.worker is not None)
        await engine.shutdown()
        with pytest.raises(EngineFailed, match="shut down"):
            await engine.wait_ready()
        assert engine._thread._warming is not None
        await asyncio.wait({engine._thread._warming})
        assert engine.status().state == "stopped"

    asyncio.run(main())


def test_disk_and_pins_without_a_cache_are_refused():
    with pytest.raises(ValueError, match="enabled is false: pinned and disk would have no effect"):
        EngineConfig.model_validate(pins("You sell fruit.", enabled=False, disk={"path": "/tmp/x"}))


def test_a_disk_that_cannot_be_used_ends_the_start_and_closes_the_runner(tmp_path: Path):
    (tmp_path / "file").touch()

    async def main() -> None:
        runner = FakeRunner()
        config = EngineConfig.model_validate({"prefix_cache": {"disk": {"path": str(tmp_path / "file")}}})
        engine = AsyncEngine(config, lambda config, progress: runner)
        with pytest.raises(EngineFailed, match="file"):
            await engine.wait_ready()
        assert runner.closed
        await engine.shutdown()

    asyncio.run(main())


def test_a_restarted_engine_continues_from_the_files_of_the_previous_one(tmp_path: Path):
    config = {"prefix_cache": {"disk": {"path": str(tmp_path / "snapshots"), "max_gb": 1}}}

    async def first(engine: AsyncEngine) -> None:
        assert await ask(engine, request("a"), request("other", tenant="x")) == [0, 0]

    async def second(engine: AsyncEngine) -> None:
        entries = (await engine.cache_status()).entries
        assert [(entry.where, entry.num_bytes) for entry in entries] == [("disk", 0)] * 2
        assert await ask(engine, request("b"), request("c"), request("d", tenant="y")) == [50, 50, 0]
        status = await engine.cache_status()
        assert sorted(entry.where for entry in status.entries) == ["both", "both", "disk"]
        cleared = await engine.clear_cache()
        assert cleared.num_files >= 2 and not os.listdir(tmp_path / "snapshots")

    run_engine(first, FakeRunner(), config)
    run_engine(second, FakeRunner(), config)


def test_files_that_are_lost_or_torn_cost_a_prefill_and_no_answer(tmp_path: Path):
    config = {"prefix_cache": {"disk": {"path": str(tmp_path), "max_gb": 1}}}

    async def first(engine: AsyncEngine) -> None:
        await ask(engine, request("a"), request("b", tenant="x"))

    async def second(engine: AsyncEngine) -> None:
        files[0].unlink()
        files[1].write_bytes(files[1].read_bytes()[:-7])
        assert await ask(engine, request("c"), request("d", tenant="x")) == [0, 0]
        assert await ask(engine, request("e"), request("f", tenant="x")) == [50, 50]

    run_engine(first, FakeRunner(), config)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == 2
    run_engine(second, FakeRunner(), config)


def test_another_models_files_are_not_taken(tmp_path: Path):
    config = {"prefix_cache": {"disk": {"path": str(tmp_path), "max_gb": 1}}}
    other = FakeRunner()
    other.fingerprint = "another model"

    async def first(engine: AsyncEngine) -> None:
        await ask(engine, request("a"))

    async def second(engine: AsyncEngine) -> None:
        assert await ask(engine, replace(request("b"))) == [0]

    run_engine(first, FakeRunner(), config)
    run_engine(second, other, config)
