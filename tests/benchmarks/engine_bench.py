"""The engine alone, without Ray and HTTP: prefill and decode rates, waits, CPU time per token; what drafts bring.

    uv run python -m tests.benchmarks.engine_bench --rounds 5
    uv run python -m tests.benchmarks.engine_bench --mtp

Every round runs every arm once, in an order of its own, so that a slow minute of the machine hits all arms alike.
Requests have no stop tokens. Without --mtp nothing is drafted, and each gives exactly --output-tokens.

--mtp compares plain decoding with 1, 2 and 3 drafts per step and with as many as the engine chooses, by task
(tests/support/tasks.py). Each arm of each task and batch size keeps its engine: `auto` makes its first trials in the
round before the first, which does not count; later trials do. Rates are of steps in which all rows run: from when the
last has joined until the first has --tokens, fewer than its right answer has, as drafts behind an answer's end mean
nothing. All arms of a round see the same prompts and must give the same tokens; ratios are within a round.
"""

import argparse
import asyncio
import itertools
import json
import math
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig, MTPConfig
from engine.core.engine_core import EngineCore
from engine.core.row import Row
from engine.core.runner import PLAIN, Drafts, PrefillOutput, RowOutput
from engine.core.scheduler_output import Published
from engine.errors import EngineFailed
from engine.processing.checkpoint import resolve_checkpoint
from engine.processing.tokenizer import ChatTokenizer
from engine.protocol import EngineRequest, SamplingParams
from engine.worker import blas, loader
from engine.worker.decode import JoiningRow
from engine.worker.model_runner import MLXRunner
from engine.worker.prefill import PromptState, first_tokens
from tests.benchmarks.measure import Spread, heading, percentile, provenance, table
from tests.benchmarks.serve_bench import text_content
from tests.support.tasks import TASKS, requests

MAX_ROWS = 1024
DRAFT_ARMS: dict[str, Any] = {
    "plain": "off",
    **{f"{k} drafts": MTPConfig(max_draft_tokens=k, max_rows=MAX_ROWS) for k in (1, 2, 3)},
    "auto": "auto",
}
TOKENS_PER_ROW = 36  # at least, of each arm and round: shorter answers are repeated with other prompts
MIN_PROMPTS = 16  # of each task: small batches have other ones in each round


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
class Stream:
    """One answer: when its chunks came, how many tokens they held, and the process's CPU time at first and last."""

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


async def generate(engine: AsyncEngine, request: EngineRequest) -> Stream:
    process = psutil.Process()
    row = Stream(sent=time.monotonic())
    async for chunk in engine.generate(request):
        if chunk.error is not None:
            raise EngineFailed(chunk.error)
        if not row.chunks or chunk.finish_reason is not None:
            cpu = process.cpu_times()
            row.cpu_s.append(cpu.user + cpu.system)
        if chunk.token_ids:
            row.chunks.append((time.monotonic(), len(chunk.token_ids)))
    return row


def figures(arm: Arm, rows: Sequence[Stream]) -> dict[str, list[float]]:
    """Return the figures of one round: rates over the time in which all rows were decoding, waits of all rows in
    milliseconds."""
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
    return conditions(config, status.capabilities) | {
        "memory": status.memory,
        "max_rows_in_a_step": status.max_rows_in_a_step,
        "arms": [summary(arm, figures_of_arm) for arm, figures_of_arm in collected.items()],
    }


def conditions(config: EngineConfig, capabilities: dict[str, Any]) -> dict[str, Any]:
    return {
        "provenance": provenance(),
        "config": config.model_dump(),
        "blas": asdict(blas.preload()),
        "threads": {name: os.environ.get(name) for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")},
        "capabilities": capabilities,
    }


def print_conditions(title: str, report: dict[str, Any]) -> None:
    print(heading(title))
    print(f"BLAS: {report['blas']['source']} ({report['blas']['reason']}), threads {report['threads']}")
    print(f"config: {report['config']}\ncapabilities: {report['capabilities']}")


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

    print_conditions("engine_bench", report)
    print(f"memory: {report['memory']}\n{rounds} rounds: median [lowest highest] of one, percentiles over all\n")
    print(table(list(report["arms"][0]), [[cell(value) for value in row.values()] for row in report["arms"]]))
    print("tokens_per_s: of the prompt in a prefill arm, of all rows together in a decode arm")


@dataclass
class Counts:
    """Counts over the steps in which all rows ran; row_steps: one for each row of each."""

    seconds: float = 0.0
    row_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))


class GatedRunner(MLXRunner):
    """Rows wait for each other: nothing decodes while the gate is closed, and what decodes is counted.

    Prompts are prefilled in their first round and kept: a row of the same name joins at once.
    """

    def __init__(self, config: EngineConfig):
        super().__init__(loader.load(config, lambda progress: None), config)
        self.no_bursts: str | None = "each prompt is prefilled once and kept"
        self.is_open = False
        self.counts = Counts()
        self._kept: dict[str, tuple[PromptState, list[RowOutput]]] = {}

    def decode(self, drafts: Drafts = PLAIN) -> dict[str, RowOutput]:
        outputs = super().decode(drafts) if self.is_open else {}
        for row_id, output in outputs.items():
            self.counts.row_steps += 1
            self.counts.drafted += output.num_drafted
            self.counts.accepted += output.num_accepted
            self.counts.tokens[row_id].extend(output.token_ids)
        return outputs

    def prefill(self, rows: Sequence[Row], max_tokens: int) -> PrefillOutput:
        row = rows[0]
        if row.id not in self._kept:
            prompt = self._prefill.begin(row)
            _, logits = self._prefill.advance(prompt, row.num_tokens)
            assert logits is not None
            self._kept[row.id] = prompt, first_tokens(rows, logits, self.vocab_size)
        prompt, first = self._kept[row.id]
        head_caches = [[*cache] for cache in prompt.head_caches]
        token_id, position = first[0].token_ids[0], prompt.next_position
        self._join([JoiningRow(row, [*prompt.cache], position, token_id, head_caches, prompt.hidden)])
        return PrefillOutput(row.num_tokens, {row.id: first[0]})


@dataclass(frozen=True)
class Cell:
    task: str
    batch: int


class DraftBench:
    """One engine, its controller included, for each cell and arm; one model for all."""

    def __init__(self, config: EngineConfig, cells: Sequence[Cell], num_tokens: int | None):
        tokenizer = ChatTokenizer(resolve_checkpoint(config.model, config.revision, weights=False))
        count = max(MIN_PROMPTS, config.max_running)
        self._requests = {task: requests(task, count, tokenizer, num_tokens) for task in {c.task for c in cells}}
        self.runner = GatedRunner(config)
        configs = {
            arm: config.model_copy(update={"mtp": mtp, "prompt_lookup": "off"}) for arm, mtp in DRAFT_ARMS.items()
        }
        pairs = itertools.product(cells, configs)
        self._cores = {(cell, arm): EngineCore(configs[arm], self.runner, raise_errors) for cell, arm in pairs}

    def round(self, cell: Cell, number: int) -> dict[str, dict[str, float]]:
        """Figures by arm."""
        chosen = self._requests[cell.task]
        num_turns = -(-TOKENS_PER_ROW // chosen[0].sampling.max_tokens)
        counts: dict[str, list[Counts]] = {arm: [] for arm in DRAFT_ARMS}
        for turn in range(number * num_turns, (number + 1) * num_turns):
            batch = [chosen[(turn * cell.batch + i) % len(chosen)] for i in range(cell.batch)]
            for arm in random.Random(f"{cell} {turn}").sample(list(DRAFT_ARMS), len(DRAFT_ARMS)):
                counts[arm].append(self._run(self._cores[cell, arm], batch))
        return {arm: draft_figures(counts[arm], counts["plain"]) for arm in DRAFT_ARMS}

    def _run(self, core: EngineCore, requests: Sequence[EngineRequest]) -> Counts:
        for request in requests:
            core.add_request(request)
        while core.scheduler.num_decoding < len(requests):
            core.step()
        self.runner.counts, self.runner.is_open = Counts(), True
        began = time.perf_counter()
        while core.scheduler.num_decoding == len(requests):
            core.step()
        self.runner.counts.seconds = time.perf_counter() - began
        self.runner.is_open = False
        for request in requests:
            core.abort(request.request_id)
        while core.has_work:
            core.step()
        return self.runner.counts


def raise_errors(chunks: Published) -> None:
    if errors := [chunk.error for chunk in chunks.values() if chunk.error is not None]:
        raise EngineFailed(errors[0])


def draft_figures(turns: Sequence[Counts], plain: Sequence[Counts]) -> dict[str, float]:
    """Return the figures of one arm in one round. acceptance: nan when nothing was drafted. other_tokens: rows that did
    not get the tokens of plain decoding, as far as both went."""

    def rate(turns: Sequence[Counts]) -> float:
        num_tokens = sum(len(ids) for turn in turns for ids in turn.tokens.values())
        return num_tokens / sum(turn.seconds for turn in turns)

    drafted, accepted = sum(turn.drafted for turn in turns), sum(turn.accepted for turn in turns)
    pairs = [(a.tokens[row], b.tokens[row]) for a, b in zip(turns, plain, strict=True) for row in b.tokens]
    return {
        "tokens_per_s": rate(turns),
        "ratio": rate(turns) / rate(plain),
        "acceptance": accepted / drafted if drafted else math.nan,
        "drafts_per_step": drafted / sum(turn.row_steps for turn in turns),
        "other_tokens": sum(any(x != y for x, y in zip(a, b, strict=False)) for a, b in pairs),
    }


def measure_drafts(config: EngineConfig, cells: Sequence[Cell], rounds: int, num_tokens: int | None) -> dict[str, Any]:
    bench = DraftBench(config, cells, num_tokens)
    collected: dict[tuple[Cell, str], list[dict[str, float]]] = defaultdict(list)
    for number in range(rounds + 1):
        for cell in random.Random(number).sample(cells, len(cells)):
            for arm, values in bench.round(cell, number).items():
                collected[cell, arm] += [values] if number else []  # round 0 warms up
    summaries = [draft_summary(cell, arm, collected[cell, arm]) for cell in cells for arm in DRAFT_ARMS]
    return conditions(config, bench.runner.capabilities) | {"arms": summaries}


def draft_summary(cell: Cell, arm: str, rounds: Sequence[dict[str, float]]) -> dict[str, Any]:
    values = {name: [figures[name] for figures in rounds] for name in rounds[0]}
    num_other = int(sum(values.pop("other_tokens")))
    spreads = {name: asdict(Spread.of([v for v in of if not math.isnan(v)])) for name, of in values.items()}
    return asdict(cell) | {"arm": arm} | spreads | {"other_tokens": num_other}


def print_draft_report(report: dict[str, Any], rounds: int) -> None:
    digits = {"tokens_per_s": 0, "ratio": 2, "acceptance": 3, "drafts_per_step": 2}

    def cell(name: str, value: Any) -> str:
        return f"{Spread(**value):.{digits[name]}f}" if name in digits else str(value)

    print_conditions("engine_bench --mtp", report)
    print(f"{rounds} rounds: median [lowest highest] of one\n")
    print(table(list(report["arms"][0]), [[cell(*item) for item in row.items()] for row in report["arms"]]))
    print("ratio: to plain decoding; other_tokens: rows of all rounds that got other tokens than plain decoding gives")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="default: 5, with --mtp 4")
    parser.add_argument("--batches", help="default: 1,4,8,16,32, with --mtp 1,2,4,8,16")
    parser.add_argument("--prefills", default="128,1024", help="prompt lengths of the prefill arms, in tokens")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="prompt of a decode arm")
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--mtp", action="store_true", help="what drafts bring, by task")
    parser.add_argument("--tasks", default=",".join(TASKS), help="with --mtp")
    parser.add_argument("--tokens", type=int, help="with --mtp, of each row; default: about as many as its answer has")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    args = parser.parse_args()
    rounds, batches = (4, "1,2,4,8,16") if args.mtp else (5, "1,4,8,16,32")
    args.rounds = args.rounds or rounds
    args.batches = [int(batch) for batch in (args.batches or batches).split(",")]
    if args.tokens is not None and args.tokens < 2:
        parser.error("--tokens must be 2 or more: the first one comes with the prompt")
    args.tasks = args.tasks.split(",")
    if unknown := set(args.tasks) - set(TASKS):
        parser.error(f"no such task: {', '.join(unknown)}; there are {', '.join(TASKS)}")
    return args


def main() -> int:
    args = arguments()
    values = {"model": args.model, "device": args.device, "dtype": args.dtype, "max_running": max(args.batches)}
    if args.mtp:
        cells = [Cell(task, batch) for task in args.tasks for batch in args.batches]
        report = measure_drafts(EngineConfig.model_validate(values), cells, args.rounds, args.tokens)
        print_draft_report(report, args.rounds)
    else:
        arms = [Arm(1, int(length), 1) for length in args.prefills.split(",")]
        arms += [Arm(batch, args.prompt_tokens, args.output_tokens) for batch in args.batches]
        report = asyncio.run(
            measure(EngineConfig.model_validate(values | {"mtp": "off", "prompt_lookup": "off"}), arms, args.rounds)
        )
        print_report(report, args.rounds)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
