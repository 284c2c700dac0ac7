"""Prompts that arrive together at an idle engine: how long they wait for their first tokens, without Ray and HTTP.

    uv run python -m tests.benchmarks.wave_bench --model DIR --prompts 16 --tokens 45 --common 0 30

Each round sends the prompts of every arm once, new ones each time, with a common system part of `--common` tokens. The
answers have `--output` tokens, so that rows decode while later prompts are computed. A figure is the median of the
rounds with the lowest and the highest.
"""

import argparse
import asyncio
import itertools
import json
import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.processing.checkpoint import resolve_checkpoint
from engine.processing.tokenizer import ChatTokenizer
from engine.protocol import Boundary, EngineRequest, SamplingParams
from tests.benchmarks.engine_bench import Stream, generate
from tests.benchmarks.measure import Spread, heading, percentile, table

FIRST_P50, FIRST_LAST, RATE, BURSTS = "first token p50, ms", "last first token, ms", "tokens/s", "bursts"


class Waves:
    """Prompts with random tokens of the vocabulary's ordinary words."""

    def __init__(self, tokenizer: ChatTokenizer, num_prompts: int, num_tokens: int, num_output: int):
        self._words = tokenizer.encode_text(" the cat sat on a mat and saw two old dogs near the red house by the sea")
        self._num_prompts, self._num_tokens, self._num_output = num_prompts, num_tokens, num_output
        self._rng = random.Random(0)
        self._ids = itertools.count()

    def requests(self, num_common: int) -> list[EngineRequest]:
        """Return the requests of one wave, whose first `num_common` tokens are a common system part."""
        common = self._tokens(num_common)
        sampling = SamplingParams(max_tokens=self._num_output, temperature=0.0)
        return [
            EngineRequest(
                request_id=f"wave-{next(self._ids)}",
                token_ids=np.concatenate([common, self._tokens(self._num_tokens - num_common)]),
                sampling=sampling,
                stop_token_ids=(),
                boundaries=(Boundary("system", num_common),) if num_common else (),
            )
            for _ in range(self._num_prompts)
        ]

    def _tokens(self, number: int) -> np.ndarray:
        return np.array([self._rng.choice(self._words) for _ in range(number)], np.int32)


def figures(rows: Sequence[Stream]) -> dict[str, float]:
    """Return the waits for first tokens, and the rate from the first request to the last token."""
    waits = [(row.first - row.sent) * 1e3 for row in rows]
    num_tokens = sum(number for row in rows for _, number in row.chunks)
    seconds = max(row.last for row in rows) - min(row.sent for row in rows)
    return {FIRST_P50: percentile(waits, 50), FIRST_LAST: max(waits), RATE: num_tokens / seconds}


async def measure(engine: AsyncEngine, waves: Waves, commons: Sequence[int], rounds: int) -> dict[int, list[dict]]:
    collected: dict[int, list[dict[str, float]]] = defaultdict(list)
    await engine.wait_ready()
    for round in range(-1, rounds):  # round -1 warms up
        for common in commons:
            before = engine.status().num_bursts
            rows = await asyncio.gather(*(generate(engine, request) for request in waves.requests(common)))
            if round >= 0:
                collected[common].append(figures(rows) | {BURSTS: engine.status().num_bursts - before})
    return collected


async def run(args: argparse.Namespace) -> None:
    config = EngineConfig.model_validate({"model": args.model, "max_running": max(32, args.prompts), **args.engine})
    tokenizer = ChatTokenizer(resolve_checkpoint(config.model, config.revision, weights=False))
    engine = AsyncEngine(config)
    try:
        waves = Waves(tokenizer, args.prompts, args.tokens, args.output)
        collected = await measure(engine, waves, args.common, args.rounds)
    finally:
        await engine.shutdown()
    print(heading(f"wave_bench, {Path(args.model).name}: {args.prompts} prompts of {args.tokens} tokens"))
    names = (FIRST_P50, FIRST_LAST, RATE, BURSTS)
    cells = [
        [str(common), *(f"{Spread.of([one[name] for one in of_arm]):.0f}" for name in names)]
        for common, of_arm in collected.items()
    ]
    print(table(["in common", *names], cells))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=45)
    parser.add_argument("--common", type=int, nargs="+", default=[0, 30])
    parser.add_argument("--output", type=int, default=60)
    parser.add_argument("--engine", type=json.loads, default={}, help="further options of the engine, as JSON")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    asyncio.run(run(args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
