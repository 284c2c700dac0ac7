"""The engine alone, without Ray and HTTP: prefill and decode rates, waits, and CPU time per token.

    uv run python -m tests.benchmarks.engine_bench --rounds 5

Every round runs every arm once, in an order of its own, so that a slow minute of the machine hits all arms alike.
Requests have no stop tokens: each gives exactly --output-tokens.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.processing.checkpoint import resolve_checkpoint
from engine.processing.tokenizer import ChatTokenizer
from engine.protocol import EngineFailed, EngineRequest, SamplingParams
from engine.worker import blas
from tests.benchmarks.measure import Spread, heading, percentile, provenance, table
from tests.benchmarks.serve_bench import text_content


@dataclass(frozen=True)
class Arm:
    """`batch` requests at once. A prefill arm asks for one token of one long prompt."""

    batch: int
    prompt_tokens: int
    output_tokens: int

    @property
    def is_prefill(self) -> bool:
        return self.output_tokens == 1

    @property
    def name(self) -> str:
        return f"prefill {self.prompt_tokens}" if self.is_prefill else f"decode batch {self.batch}"


@dataclass
class Row:
    """One request: when its chunks came, how many tokens they held, and the process's CPU time at first and last."""

    sent: float
    chunks: list[tuple[float, int]] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    @property
    def first(self) -> float:
        return self.chunks[0][0]

    @property
    def last(self) -> float:
        return self.chunks[-1][0]


class Prompts:
    """Prompts of an exact length, each one new."""

    def __init__(self, tokenizer: ChatTokenizer):
        self._tokenizer = tokenizer
        self._rng = random.Random(0)
        self._ids = itertools.count()

    def request(self, arm: Arm) -> EngineRequest:
        number = next(self._ids)
        text = f"{number} {text_content(self._rng, (arm.prompt_tokens,))}"
        token_ids = self._tokenizer.encode_chat([{"role": "user", "content": text}], template_kwargs={})
        assert len(token_ids) >= arm.prompt_tokens
        return EngineRequest(
            request_id=f"bench-{number}",
            token_ids=np.ascontiguousarray(token_ids[-arm.prompt_tokens :]),
            sampling=SamplingParams(max_tokens=arm.output_tokens, temperature=0.0),
            stop_token_ids=(),
        )


async def generate(engine: AsyncEngine, request: EngineRequest) -> Row:
    process = psutil.Process()
    row = Row(sent=time.monotonic())
    async for chunk in engine.generate(request):
        if chunk.error is not None:
            raise EngineFailed(chunk.error)
        if not row.chunks or chunk.finish_reason is not None:
            cpu = process.cpu_times()
            row.cpu_s.append(cpu.user + cpu.system)
        if chunk.token_ids:
            row.chunks.append((time.monotonic(), len(chunk.token_ids)))
    return row


def figures(arm: Arm, rows: Sequence[Row]) -> dict[str, list[float]]:
    """Of one round: rates over the time in which all rows were decoding, waits of all rows in milliseconds."""
    ttft_ms = [(row.first - row.sent) * 1e3 for row in rows]
    if arm.is_prefill:
        return {"tokens_per_s": [arm.prompt_tokens / ttft_ms[0] * 1e3], "ttft_ms": ttft_ms}
    begin, end = max(row.first for row in rows), min(row.last for row in rows)
    num_tokens = sum(n for row in rows for at, n in row.chunks if begin < at <= end)
    cpu_s = min(row.cpu_s[-1] for row in rows) - max(row.cpu_s[0] for row in rows)
    gaps = [b - a for row in rows for (a, _), (b, _) in itertools.pairwise(row.chunks)]
    return {
        "tokens_per_s": [num_tokens / (end - begin)],
        "ttft_ms": ttft_ms,
        "tpot_ms": [gap * 1e3 for gap in gaps],
        "cpu_us_per_token": [cpu_s / num_tokens * 1e6],
    }


async def measure(config: EngineConfig, arms: Sequence[Arm], rounds: int) -> dict[str, Any]:
    prompts = Prompts(ChatTokenizer(resolve_checkpoint(config.model, config.revision, weights=False)))
    engine = AsyncEngine(config)
    collected: dict[Arm, list[dict[str, list[float]]]] = {arm: [] for arm in arms}
    try:
        await engine.wait_ready()
        for number in range(-1, rounds):  # round -1 warms up
            for arm in random.Random(number).sample(arms, len(arms)):
                requests = [prompts.request(arm) for _ in range(arm.batch)]
                rows = await asyncio.gather(*(generate(engine, request) for request in requests))
                if number >= 0:
                    collected[arm].append(figures(arm, rows))
        status = engine.status()
    finally:
        await engine.shutdown()
    return {
        "provenance": provenance(),
        "config": config.model_dump(),
        "blas": asdict(blas.preload()),
        "threads": {name: os.environ.get(name) for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")},
        "capabilities": status.capabilities,
        "memory": status.memory,
        "max_rows_in_a_step": status.max_rows_in_a_step,
        "arms": [summary(arm, figures_of_arm) for arm, figures_of_arm in collected.items()],
    }


def summary(arm: Arm, rounds: Sequence[dict[str, list[float]]]) -> dict[str, Any]:
    def spread(name: str) -> dict[str, float]:
        return asdict(Spread.of([value for figures in rounds for value in figures.get(name, ())]))

    def pooled(name: str, q: float) -> float:
        return percentile((value for figures in rounds for value in figures.get(name, ())), q)

    return {
        "arm": arm.name,
        **{name: spread(name) for name in ("tokens_per_s", "cpu_us_per_token")},
        **{f"{name}_p{q}": pooled(name, q) for name in ("ttft_ms", "tpot_ms") for q in (50, 99)},
    }


def print_report(report: dict[str, Any], rounds: int) -> None:
    def cell(value: Any) -> str:
        if isinstance(value, dict):
            value = Spread(**value)
        return value if isinstance(value, str) else f"{value:.1f}"

    print(heading("engine_bench"))
    print(f"BLAS: {report['blas']['source']} ({report['blas']['reason']}), threads {report['threads']}")
    print(f"config: {report['config']}\ncapabilities: {report['capabilities']}\nmemory: {report['memory']}")
    print(f"{rounds} rounds: median [lowest highest] of a round, percentiles over all rounds\n")
    print(table(list(report["arms"][0]), [[cell(value) for value in row.values()] for row in report["arms"]]))
    print("tokens_per_s: of the prompt in a prefill arm, of all rows together in a decode arm")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", default="1,4,8,16,32")
    parser.add_argument("--prefills", default="128,1024", help="prompt lengths of the prefill arms, in tokens")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="prompt of a decode arm")
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    args = parser.parse_args()
    batches = [int(batch) for batch in args.batches.split(",")]
    arms = [Arm(1, int(length), 1) for length in args.prefills.split(",")]
    arms += [Arm(batch, args.prompt_tokens, args.output_tokens) for batch in batches]
    config = EngineConfig.model_validate(
        {"model": args.model, "device": args.device, "dtype": args.dtype, "max_running": max(batches)}
    )
    report = asyncio.run(measure(config, arms, args.rounds))
    print_report(report, args.rounds)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
