"""Time to first token with and without the prefix cache, and what a snapshot costs.

    uv run python -m tests.benchmarks.prefix_bench --rounds 5
    python -m tests.benchmarks.prefix_bench --shape qwen3.5-4b --tokens 8192

Without --shape: the demo model behind AsyncEngine. Each round makes a new conversation for each length, takes its first
turn in, and then sends the second turn, with --new tokens more, in three arms, in an order of their own: `off`, to an
engine without the cache; `cold`, as a tenant who has nothing in it; and `warm`. `disk` is an engine that was started
again and has the first turn in its files alone. The bound is what warm may take: cold x (new + 64) / prompt + 15 ms.

With --shape: a random model of that shape. Milliseconds of taking and restoring one snapshot, and its bytes.
"""

import argparse
import asyncio
import gc
import random
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.core.row import Row
from engine.errors import EngineFailed
from engine.protocol import Boundary, EngineRequest, SamplingParams
from engine.worker.model_runner import MLXRunner
from tests.benchmarks.measure import Spread, heading
from tests.benchmarks.step_bench import SHAPES, random_model

VOCABULARY = range(300, 1200)  # ordinary words of the demo model's tokenizer
SLACK_TOKENS, SLACK_MS = 64, 15.0


def turns(rng: random.Random, num_tokens: int, num_new: int, name: str) -> tuple[EngineRequest, EngineRequest]:
    """A conversation's first and second turn: the second has num_tokens, of which num_new are new."""
    ids = np.array([rng.choice(VOCABULARY) for _ in range(num_tokens)], np.int32)
    end = num_tokens - num_new
    boundaries = (Boundary("system", end // 2), Boundary("turn", end - 4))
    first = EngineRequest(f"{name}-1", ids[:end], SamplingParams(1, temperature=0.0), (), boundaries=boundaries)
    boundaries = (boundaries[0], Boundary("turn", num_tokens - 4))
    return first, replace(first, request_id=f"{name}-2", token_ids=ids, boundaries=boundaries)


async def ttft_ms(engine: AsyncEngine, request: EngineRequest) -> tuple[float, int]:
    """And how many tokens came from the cache."""
    began = time.perf_counter()
    num_cached, first_s = 0, 0.0
    async for chunk in engine.generate(request):
        if chunk.error is not None:
            raise EngineFailed(chunk.error)
        first_s = first_s or time.perf_counter() - began
        num_cached = chunk.num_cached
    return first_s * 1e3, num_cached


async def start(**prefix_cache: Any) -> AsyncEngine:
    engine = AsyncEngine(EngineConfig.model_validate({"prefix_cache": prefix_cache}))
    await engine.wait_ready()
    return engine


async def measure(tokens: list[int], num_new: int, rounds: int) -> None:
    rng, times = random.Random(0), defaultdict[tuple[int, str], list[float]](list)
    with tempfile.TemporaryDirectory() as path:
        disk = {"disk": {"path": path, "max_gb": 4}}
        on, off = await start(**disk), await start(enabled=False)
        seconds: dict[int, list[EngineRequest]] = defaultdict(list)
        for round_number in range(rounds + 1):
            for length in tokens:
                first, second = turns(rng, length, num_new, f"{round_number}-{length}")
                await ttft_ms(on, first)
                arms = {"off": (off, ""), "cold": (on, f"tenant-{round_number}"), "warm": (on, "")}
                for arm in rng.sample(sorted(arms), len(arms)):
                    engine, tenant = arms[arm]
                    took, num_cached = await ttft_ms(engine, replace(second, request_id=arm, tenant=tenant))
                    assert (num_cached > 0) == (arm == "warm"), (arm, num_cached)
                    if round_number:  # the first one warms up
                        times[length, arm].append(took)
                seconds[length].append(second)
        await on.shutdown()
        again = await start(**disk)
        for length in tokens:
            for second in seconds[length][1:]:
                ids = second.token_ids.copy()
                ids[-num_new:] = [rng.choice(VOCABULARY) for _ in range(num_new)]  # `warm` has stored its own turn
                took, num_cached = await ttft_ms(again, replace(second, token_ids=ids))
                assert length - num_new - 4 <= num_cached <= length - num_new, num_cached
                times[length, "disk"].append(took)
        await again.shutdown()
        await off.shutdown()
    print(f"{num_new} new tokens; milliseconds to the first token")
    for length in tokens:
        arms = "  ".join(f"{arm} {Spread.of(times[length, arm]):.0f}" for arm in ("off", "cold", "warm", "disk"))
        cold, warm = (Spread.of(times[length, arm]).median for arm in ("cold", "warm"))
        bound = cold * (num_new + SLACK_TOKENS) / length + SLACK_MS
        verdict = "within" if warm <= bound else "MISSED"
        print(f"{length:6} tokens: {arms}  bound for warm {bound:.0f}: {verdict}; {cold / warm:.1f} x sooner than cold")


def snapshot_costs(shape: str, tokens: list[int], rounds: int) -> None:
    runner = MLXRunner(random_model(SHAPES[shape]), EngineConfig(mtp="off"))
    rng = np.random.default_rng(0)
    for length in tokens:
        ids = rng.integers(0, runner.vocab_size, length + 1).astype(np.int32)
        times: dict[str, list[float]] = defaultdict(list)
        snapshot: Any = None
        grown = 0
        for round_number in range(rounds + 1):
            row = Row(EngineRequest(f"{length}-{round_number}", ids, SamplingParams(1, 0.0), ()))
            took = {"prefill": _ms(lambda row=row, length=length: _prefill(runner, row, length))}
            snapshot = None
            gc.collect()
            before = mx.get_active_memory()
            taken: list[Any] = []
            took["snapshot"] = _ms(lambda row=row, taken=taken: taken.append(runner.snapshot([row], None)))
            grown = mx.get_active_memory() - before
            snapshot = taken[0]
            runner.drop([row.id])
            other = Row(replace(row.spec, request_id="restored"))
            took["restore"] = _ms(lambda other=other, snapshot=snapshot: runner.restore([other], snapshot))
            took["last token"] = _ms(lambda other=other: runner.prefill([other], 1))
            runner.drop([other.id])
            if round_number:
                for name, value in took.items():
                    times[name].append(value)
        figures = ", ".join(f"{name} {Spread.of(values):.2f}" for name, values in times.items())
        print(
            f"{shape}, {length} tokens: {figures} ms; {snapshot.segment_bytes / 2**20:.1f} MiB of keys and values, "
            f"{snapshot.state_bytes / 2**20:.1f} MiB of states; memory grew by {grown / 2**20:.1f} MiB"
        )


def _prefill(runner: MLXRunner, row: Row, length: int) -> None:
    num_prefilled = 0
    while num_prefilled < length:
        num_prefilled += runner.prefill([row], min(2048, length - num_prefilled)).num_tokens


def _ms(work: Any) -> float:
    mx.synchronize()
    began = time.perf_counter()
    work()
    mx.synchronize()
    return (time.perf_counter() - began) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shape", choices=SHAPES)
    args = parser.parse_args()
    if args.shape is not None:
        snapshot_costs(args.shape, args.tokens, args.rounds)
        return
    print(heading("prefix_bench"))
    asyncio.run(measure(args.tokens, args.new, args.rounds))


if __name__ == "__main__":
    main()
