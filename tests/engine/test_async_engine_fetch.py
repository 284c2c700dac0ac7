"""Prefixes between two engines, each with its own device thread."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.errors import EngineFailed
from engine.placement import PrefixHolder
from engine.protocol import EngineRequest
from engine.snapshot_store.exchange import Sharing
from tests.engine.core.prefix_cache.test_disk_tier import request, turns
from tests.support.driver import fix_prefill_costs
from tests.support.fake_runner import FakeRunner, answer

SHARING = Sharing("127.0.0.1", b"secret")
LENGTH = 40 + 3 * 20


def make_runner(config: EngineConfig, progress: Callable[[float], None]) -> FakeRunner:
    runner = FakeRunner()
    runner.vocab_size = runner.num_embeddings = 10_000
    return runner


def run_engines(
    test: Callable[[AsyncEngine, AsyncEngine], Awaitable[None]],
    path: Path,
    sharing: Sharing | None = SHARING,
    **cache: Any,
) -> None:
    """The test with two engines, for at most 20 s."""

    async def main() -> None:
        engines = []
        for name in ("there", "here"):
            options = {"disk": {"path": str(path / name)}, **cache}
            config = EngineConfig.model_validate({"prefix_cache": options})
            engines.append(AsyncEngine(config, make_runner, sharing))
        try:
            for engine in engines:
                await engine.wait_ready()
                await engine._thread.call(lambda core: fix_prefill_costs(core, 0.0, 0.1))
            async with asyncio.timeout(60):
                await test(*engines)
        finally:
            for engine in engines:
                await engine.shutdown()

    asyncio.run(main())


async def ask(engine: AsyncEngine, spec: EngineRequest) -> int:
    chunks = [chunk async for chunk in engine.generate(spec)]
    assert [token for chunk in chunks for token in chunk.token_ids] == answer(spec)
    return chunks[0].num_cached


async def clear_files(engine: AsyncEngine) -> None:
    """Remove the files of an engine once it has written some; the snapshots stay in its memory."""
    while True:
        disk = (await engine.cache_status()).disk
        assert disk is not None
        if disk["num_files"]:
            break
        await asyncio.sleep(0.01)
    removed = await engine._thread.call(lambda core: core.prefixes.clear_files())
    assert removed is not None and await asyncio.wrap_future(removed)


async def holder_of(engine: AsyncEngine, num_tokens: int) -> PrefixHolder:
    digest = await engine._thread.call(
        lambda core: next(e.digest for e in core.prefixes.store.nodes() if e.num_tokens == num_tokens)
    )
    return PrefixHolder(engine.placement_facts()["snapshots"], digest, num_tokens)


def test_an_engine_fetches_what_another_one_holds_and_both_count_it(tmp_path):
    async def test(there: AsyncEngine, here: AsyncEngine) -> None:
        await ask(there, request("t", *turns(3)))
        holder = await holder_of(there, LENGTH)
        assert await ask(here, replace(request("again", *turns(4)), holder=holder)) == LENGTH
        got, gave = (await here.cache_status()).fetch, (await there.cache_status()).fetch
        assert got is not None and gave is not None
        assert got.num_fetched == gave.num_served == 2 and got.fetched_bytes == gave.served_bytes > 0
        assert here.figures().fetch == got

    run_engines(test, tmp_path)


def test_a_snapshot_without_a_file_is_written_between_the_steps_of_its_engine(tmp_path):
    async def test(there: AsyncEngine, here: AsyncEngine) -> None:
        await ask(there, request("t", *turns(3)))
        holder = await holder_of(there, LENGTH)
        await clear_files(there)
        assert await ask(here, replace(request("again", *turns(4)), holder=holder)) == LENGTH

    run_engines(test, tmp_path)


def test_a_failure_to_write_for_another_node_does_not_harm_the_engine(tmp_path, monkeypatch):
    async def test(there: AsyncEngine, here: AsyncEngine) -> None:
        await ask(there, request("t", *turns(3)))
        holder = await holder_of(there, LENGTH)
        await clear_files(there)
        assert there._thread.worker is not None
        monkeypatch.setattr(there._thread.worker.prefixes, "write_now", lambda digest: 1 / 0)
        assert await ask(here, replace(request("again", *turns(4)), holder=holder)) == 0
        assert await ask(there, request("u", *turns(4))) == LENGTH

    run_engines(test, tmp_path)


@pytest.mark.parametrize("options", [{"sharing": None}, {"fetch": "off"}])
def test_without_an_exchange_nothing_listens_and_the_prompt_is_computed(tmp_path, options):
    async def test(there: AsyncEngine, here: AsyncEngine) -> None:
        await ask(there, request("t", *turns(3)))
        holder = replace(await holder_of(there, LENGTH), address="127.0.0.1:1")
        assert there.placement_facts()["snapshots"] == ""
        assert await ask(here, replace(request("again", *turns(4)), holder=holder)) == 0
        assert (await here.cache_status()).fetch is None

    run_engines(test, tmp_path, **options)


def test_an_engine_that_was_shut_down_listens_no_more(tmp_path):
    async def test(there: AsyncEngine, here: AsyncEngine) -> None:
        await ask(there, request("t", *turns(3)))
        holder = await holder_of(there, LENGTH)
        await there.shutdown()
        assert await ask(here, replace(request("again", *turns(4)), holder=holder)) == 0
        fetch = (await here.cache_status()).fetch
        assert fetch is not None and fetch.failures == {"unreachable": 1}

    run_engines(test, tmp_path)


def test_a_port_that_is_in_use_fails_the_start_with_the_options_name(tmp_path):
    async def test(there: AsyncEngine, here: AsyncEngine) -> None:
        port = int(there.placement_facts()["snapshots"].rpartition(":")[2])
        options = {"disk": {"path": str(tmp_path / "third")}, "fetch_port": port}
        config = EngineConfig.model_validate({"prefix_cache": options})
        third = AsyncEngine(config, make_runner, SHARING)
        with pytest.raises(EngineFailed, match=f"fetch_port.*port {port}"):
            await third.wait_ready()
        await third.shutdown()

    run_engines(test, tmp_path)
