"""Conversations that are handed over: the seconds that it takes, and those that it saves the next turn.

    uv run python -m tests.benchmarks.hand_over_bench --rounds 3 --directory /dev/shm

Both nodes are in this process, over loopback, so that they share its cores and the GIL. One engine answers the first
turn of --conversations conversations of --tokens tokens each, and is drained; the other one takes its snapshots over.
`next turn` is the time to the first token of the second turns there: with what was handed over, read from its disk
tier, and without it, computed. `pause` is the longest between two tokens of a row at the receiver: alone, and beside
the hand-over. The models have random weights and are small: the seconds of computing grow with the model,
those of the hand-over with the bytes of its tokens.
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from pathlib import Path

import numpy as np

import engine.worker  # noqa: F401  # before MLX
from engine.async_engine import AsyncEngine
from engine.placement import ConversationKeys, TakenOver
from engine.protocol import EngineRequest, SamplingParams
from tests.benchmarks.fetch_bench import MODELS, NUM_NEW, _within_vocabulary, started
from tests.benchmarks.measure import Spread, heading
from tests.benchmarks.prefix_bench import ttft_ms, turns
from tests.support.families import FAMILIES
from tests.support.tiny import Tiny, build
from tests.support.zoo import make

LIMIT_S = 600.0
MAX_TOKENS = 1500
ALONE_S = 0.5


Turns = tuple[EngineRequest, EngineRequest]
"""The first and the second turn of a conversation."""


def conversations(num: int, num_tokens: int) -> list[Turns]:
    """Return conversations, with the keys by which they are placed."""
    found = []
    for number in range(num):
        first, second = _within_vocabulary(turns(random.Random(number), num_tokens, NUM_NEW, f"c{number}"))
        keys = ConversationKeys(10 * number, 10 * number + 1, (10 * number + 3, 10 * number + 2))
        found.append((replace(first, keys=replace(keys, turns=keys.turns[1:])), replace(second, keys=keys)))
    return found


async def hand_over(there: AsyncEngine, here: AsyncEngine) -> TakenOver:
    """Drain an engine; return what the other one has got."""
    await there.move_all()
    offered = await there.take_over.offered(512)
    taken = await here.take_over.take(there.placement_facts()["snapshots"], offered, LIMIT_S)
    assert taken.num_taken == taken.num_offered > 0, taken
    return taken


async def longest_pause_ms(engine: AsyncEngine, name: str, until: Awaitable[object]) -> float:
    """Return the most milliseconds between two tokens of a new row, which ends with what is awaited."""
    ids, waited = np.arange(300, 340, dtype=np.int32), asyncio.ensure_future(until)
    spec = EngineRequest(name, ids, SamplingParams(MAX_TOKENS, temperature=0.0), ())
    at, longest_ms = 0.0, 0.0
    async with aclosing(engine.generate(spec)) as chunks:  # type: ignore[type-var]
        async for chunk in chunks:
            now = time.perf_counter()
            longest_ms, at = max(longest_ms, 1e3 * (now - at) if at else 0.0), now
            assert chunk.finish_reason is None, f"the row has ended after {MAX_TOKENS} tokens"
            if waited.done():
                return longest_ms
    raise AssertionError("the row has ended")


async def one_round(
    model: Path, directory: Path, talks: Sequence[tuple[EngineRequest, EngineRequest]]
) -> dict[str, float]:
    """Return the figures of a round with new engines."""
    async with AsyncExitStack() as stack:
        there = await started(stack, model, directory / "there")
        here = await started(stack, model, directory / "here")
        for first, _ in talks:
            await ttft_ms(there, first)
        handing = asyncio.Event()

        async def hand_over_later() -> TakenOver:
            await handing.wait()
            return await hand_over(there, here)

        alone_ms = await longest_pause_ms(here, "alone", asyncio.sleep(ALONE_S))
        moving = asyncio.ensure_future(hand_over_later())
        beside = asyncio.ensure_future(longest_pause_ms(here, "beside", moving))
        await asyncio.sleep(ALONE_S)  # the row decodes
        handing.set()
        taken, beside_ms = await moving, await beside
        found = {"mb": taken.num_bytes / 1e6, "s": taken.seconds, "alone": alone_ms, "beside": beside_ms}
        for arm, more in (("with", {}), ("without", {"tenant": "another"})):
            times = list[float]()
            for number, (_, second) in enumerate(talks):
                ms, num_cached = await ttft_ms(here, replace(second, request_id=f"{arm} {number}", **more))
                assert bool(num_cached) == (arm == "with")
                times.append(ms)
            found[arm] = Spread.of(times).median
        for each in (there, here):
            await each.clear_cache()
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--conversations", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=2048, help="of each conversation's second turn")
    parser.add_argument("--directory", default=None, help="where files are written; default: the temporary directory")
    args = parser.parse_args()
    print(heading("Conversations that are handed over"))
    print(f"{args.conversations} conversations of {args.tokens} tokens\n")
    print("| model | MB | hand-over, s | MB/s | next turn with, ms | without | pause alone, ms | beside |")
    print("|---|---|---|---|---|---|---|---|")
    talks = conversations(args.conversations, args.tokens)
    with tempfile.TemporaryDirectory(dir=args.directory) as made:
        directory = Path(made)
        for name in MODELS:
            path = directory / name
            model = build(path, Tiny(layers=4, interval=2)) if name == "hybrid" else make(path, FAMILIES[name])
            found = defaultdict[str, list[float]](list)
            for number in range(args.rounds):
                figures = asyncio.run(one_round(model, directory / f"{name}-{number}", talks))
                for key, value in {**figures, "mb/s": figures["mb"] / figures["s"]}.items():
                    found[key].append(value)
            shown = {key: Spread.of(values) for key, values in found.items()}
            times = " | ".join(f"{shown[key]:.0f}" for key in ("with", "without", "alone", "beside"))
            print(
                f"| {name} | {shown['mb'].median:.1f} | {shown['s']:.2f} | {shown['mb/s']:.0f} | {times} |", flush=True
            )


if __name__ == "__main__":
    main()
