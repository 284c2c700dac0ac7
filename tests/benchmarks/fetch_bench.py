"""Prefixes from another node: the rate of transfers, their seconds against computing, and what decoding rows notice.

    uv run python -m tests.benchmarks.fetch_bench --rounds 3 --directory /dev/shm

Both nodes are in this process, over loopback, so that they share its cores and the GIL. `transfer` is one file of --mib
MiB. `first token` is that of a second turn of --tokens tokens, at an engine that computes its first turn, fetches it
from another engine, or reads it from its own files. `longest pause` is between two tokens of a row: alone, while its
engine fetches or reads the prefix of another prompt, and while its engine serves files to another one. Transfers are
forced, whatever they are predicted to take. --link RATE (of tc, such as 1gbit; needs root) runs all of it in a network
namespace whose loopback has that rate. The models have random weights and are small: the seconds of computing grow
with the model, those of fetching with the bytes of its tokens.
"""

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np

import engine.worker  # noqa: F401  # before MLX
from engine.async_engine import AsyncEngine
from engine.config import DiskCacheConfig, EngineConfig
from engine.core.engine_core import EngineCore
from engine.core.prefix_cache.prompt_key import key_of_tokens
from engine.placement import PrefixHolder
from engine.protocol import EngineRequest, PromptOrigin, SamplingParams
from engine.snapshot_store.exchange import Sharing
from engine.snapshot_store.files import SnapshotFiles
from engine.snapshot_store.format import SnapshotMeta
from engine.snapshot_store.greeting import Identity
from engine.snapshot_store.snapshot_client import SnapshotClient
from engine.snapshot_store.snapshot_server import SnapshotServer
from engine.worker.model_runner import load_runner
from tests.benchmarks.measure import Spread, heading
from tests.benchmarks.prefix_bench import ttft_ms, turns
from tests.support.driver import fix_prefill_costs
from tests.support.families import FAMILIES
from tests.support.tiny import Tiny, build
from tests.support.zoo import make

MODELS = ("llama", "hybrid", "deepseek_v3")
SHARING = Sharing("127.0.0.1", b"benchmark")
NUM_NEW = 64
NUM_WORDS = 500  # fewer than the vocabularies of the models
ENOUGH = 1 << 50
INSIDE = "FETCH_BENCH_LINK"
"""Variable of the environment in the namespace."""
SHAPED = """ip link set lo up
tc qdisc add dev lo root handle 1: htb default 1 r2q 1000
tc class add dev lo parent 1: classid 1:1 htb rate "$0" burst 1mb
exec "$@"
"""
"""A program of the shell that shapes loopback to a rate, then runs a command."""


def transfer(directory: Path, mib: int, rounds: int) -> Spread:
    """Return GB/s of one file from a server to a client."""
    identity, rates = Identity(SHARING.token, "model"), []
    there = SnapshotFiles(DiskCacheConfig(path=str(directory / "there")), identity.fingerprint)
    data = np.random.default_rng(0).integers(0, 256, mib << 20, dtype=np.uint8)
    meta = SnapshotMeta("0" * 32, "", 0, "turn", "", np.arange(16, dtype=np.int32), (), PromptOrigin(), 0.0)
    there.save(meta, {"data": data})
    there.flush()
    server = SnapshotServer(there, identity, SHARING.host)
    for _ in range(rounds):
        here = SnapshotFiles(DiskCacheConfig(path=str(directory / "here")), identity.fingerprint)
        client = SnapshotClient(here, identity)
        fetched = client.fetch(server.address, meta.digest, meta.num_tokens, ENOUGH).done.result()
        assert fetched.failure is None, fetched
        rates.append(fetched.num_bytes / fetched.seconds / 1e9)
        here.clear().result()
        client.close()
        here.close(5)
    server.close()
    there.clear().result()
    there.close(5)
    return Spread.of(rates)


async def started(stack: AsyncExitStack, model: Path, disk: Path) -> AsyncEngine:
    """Return an engine that predicts computing to be slow."""
    options = {"model": str(model), "dtype": "float32", "prefix_cache": {"disk": {"path": str(disk)}}}
    made = AsyncEngine(EngineConfig.model_validate(options), load_runner, SHARING)
    stack.push_async_callback(made.shutdown)
    await made.wait_ready()
    await made._thread.call(lambda core: fix_prefill_costs(core, 0.0, 1.0))
    return made


def evict_all(core: EngineCore) -> None:
    """Leave all snapshots on disk alone."""
    assert core.prefixes._disk is not None
    core.prefixes._disk._files.flush()
    core.free_evictable()


def with_another_end(spec: EngineRequest) -> EngineRequest:
    """Return a second turn with as many other new tokens, of which nothing is cached."""
    ids = spec.token_ids.copy()
    ids[-NUM_NEW:] = (ids[-NUM_NEW:] + 1) % NUM_WORDS
    return replace(spec, token_ids=ids)


def _within_vocabulary(specs: Iterable[EngineRequest]) -> list[EngineRequest]:
    return [replace(spec, token_ids=spec.token_ids % NUM_WORDS) for spec in specs]


async def holder_of(there: AsyncEngine, spec: EngineRequest) -> PrefixHolder:
    """Return the holder of the longest prefix of a prompt, once it is on disk."""

    def find(core: EngineCore) -> PrefixHolder:
        key = key_of_tokens(spec, spec.token_ids, core.runner)
        entry = core.prefixes.store.match(key, len(key) - 1)
        assert entry is not None and core.prefixes._disk is not None
        assert core.prefixes.write_now(entry.digest)
        core.prefixes._disk._files.flush()
        return PrefixHolder(there.placement_facts()["snapshots"], entry.digest, entry.num_tokens)

    return await there._thread.call(find)


async def prefix(model: Path, directory: Path, num_tokens: int, rounds: int) -> None:
    """Print milliseconds to the first token of a second turn, and the bytes of its first one."""
    found, num_bytes = defaultdict[str, list[float]](list), 0
    async with AsyncExitStack() as stack:
        there = await started(stack, model, directory / "there")
        here = await started(stack, model, directory / "here")
        for number in range(rounds):
            first, second = _within_vocabulary(turns(random.Random(number), num_tokens, NUM_NEW, f"r{number}"))
            await ttft_ms(there, first)
            holder = await holder_of(there, second)
            before = (await here.cache_status()).fetch
            ms, num_cached = await ttft_ms(here, replace(second, request_id="fetched", holder=holder))
            after = (await here.cache_status()).fetch
            assert before is not None and after is not None and num_cached == holder.num_tokens, after
            num_bytes = after.fetched_bytes - before.fetched_bytes
            found["fetched"].append(ms)
            await here._thread.call(evict_all)
            ms, num_cached = await ttft_ms(here, replace(with_another_end(second), request_id="read"))
            assert num_cached >= holder.num_tokens
            found["read"].append(ms)
            ms, num_cached = await ttft_ms(here, replace(second, request_id="computed", tenant="another"))
            assert not num_cached
            found["computed"].append(ms)
    figures = " | ".join(f"{Spread.of(found[arm]):.0f}" for arm in ("computed", "fetched", "read"))
    print(f"| {model.name} | {num_bytes / 1e6:.1f} | {figures} |")


async def pauses_ms(engine: AsyncEngine, name: str, num_tokens: int) -> list[float]:
    """Return the milliseconds between the tokens of a new row."""
    spec = EngineRequest(name, np.arange(300, 340, dtype=np.int32), SamplingParams(num_tokens, temperature=0.0), ())
    at, found = 0.0, []
    async for chunk in engine.generate(spec):
        now = time.perf_counter()
        if chunk.token_ids and at:
            found.append(1e3 * (now - at))
        at = now
    return found


async def gap(model: Path, directory: Path, num_tokens: int, rounds: int) -> None:
    """Print the longest pause of a row alone, beside a fetch, beside a read from disk, and beside serving a file."""
    found = defaultdict[str, list[float]](list)
    async with AsyncExitStack() as stack:
        there = await started(stack, model, directory / "gap-there")
        here = await started(stack, model, directory / "gap-here")
        for number in range(rounds + 1):
            first, second = _within_vocabulary(turns(random.Random(1000 + number), num_tokens, NUM_NEW, f"g{number}"))
            await ttft_ms(there, first)
            holder = await holder_of(there, second)
            for arm, decoding in (("alone", here), ("fetching", here), ("reading", here), ("serving", there)):
                decode = asyncio.ensure_future(pauses_ms(decoding, "row", 200))
                while not decoding.status().num_output_tokens and not decode.done():
                    await asyncio.sleep(0.001)
                if arm == "serving":
                    await here.clear_cache()
                asked = replace(second, holder=holder)
                if arm == "reading":
                    await here._thread.call(evict_all)
                    asked = with_another_end(asked)
                if arm != "alone":
                    _, num_cached = await ttft_ms(here, replace(asked, request_id=arm))
                    assert num_cached >= holder.num_tokens
                longest_ms = max(await decode)
                if number:  # the first round compiles
                    found[arm].append(longest_ms)
            await here.clear_cache()
    print(f"| {model.name} | " + " | ".join(f"{Spread.of(pauses):.0f}" for pauses in found.values()) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=2048, help="of the second turn")
    parser.add_argument("--mib", type=int, default=256, help="of the file of `transfer`")
    parser.add_argument("--directory", default=None, help="where files are written; default: the temporary directory")
    parser.add_argument("--link", metavar="RATE", help="rate of the link, such as 1gbit; default: that of loopback")
    args = parser.parse_args()
    if args.link is not None and os.environ.get(INSIDE) != args.link:
        os.environ[INSIDE] = args.link
        os.execvp(
            "unshare", ["unshare", "--net", "sh", "-ec", SHAPED, args.link, sys.executable, "-m", *sys.orig_argv[2:]]
        )
    print(heading("Prefixes from another node"))
    print(f"link: {args.link or 'loopback'}\n")
    with tempfile.TemporaryDirectory(dir=args.directory) as made:
        directory = Path(made)
        print(f"transfer of {args.mib} MiB: {transfer(directory, args.mib, args.rounds):.2f} GB/s\n")
        models = {
            name: build(directory / name, Tiny(layers=4, interval=2))
            if name == "hybrid"
            else make(directory / name, FAMILIES[name])
            for name in MODELS
        }
        print("first token of a second turn, ms\n\n| model | MB | computed | fetched | read |\n|---|---|---|---|---|")
        for name, model in models.items():
            asyncio.run(prefix(model, directory / f"{name}-files", args.tokens, args.rounds))
        print("\nlongest pause of a row, ms\n\n| model | alone | fetching | reading | serving |\n|---|---|---|---|---|")
        for name, model in models.items():
            asyncio.run(gap(model, directory / f"{name}-files", args.tokens, args.rounds))


if __name__ == "__main__":
    main()
