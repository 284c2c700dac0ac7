"""What each proposer of draft tokens brings, by task and batch size: tokens per second beside plain decoding.

    uv run python -m tests.benchmarks.proposer_bench [--rounds 3] [--warm-ups 1] [--batches 1,4,8] [--tasks edits,tools]

The arms of a cell (task, batch size) are measured in turns, each with a fresh engine around the same loaded model, so
that the controller begins anew; --warm-ups says how often it answers the cell's requests before, unmeasured. Tokens per
second are those after the last request's first token. What a head or a draft model adds before, where it reads the
prompts too, is given apart, as a factor. In float32 on a CPU all arms give equal answers; elsewhere kernels round
differently with the number of tokens.

Tasks are those of tests/support/tasks.py, and `edits`: a prompt with a Python module of this repository, and as the
answer the same module with one name replaced. The demo model cannot edit code, so a matcher allows only the answer's
next token: every step is computed, verified and accepted as usual, but what is copied is given by a real edit.
"""

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

import engine.worker  # noqa: F401  # before MLX
from engine.config import EngineConfig
from engine.processing.tokenizer import ChatTokenizer
from engine.protocol import EngineRequest, SamplingParams
from engine.worker.model_runner import MLXRunner, load_runner
from tests.benchmarks.measure import ROOT, Spread
from tests.support.driver import Driver
from tests.support.script import Script
from tests.support.tasks import TASKS, requests

OFF: dict[str, Any] = {"mtp": "off", "prompt_lookup": "off", "prefix_cache": {"enabled": False}}
DRAFT_MODEL = {"model": "demo", "limits": "auto"}
ARMS: dict[str, dict[str, Any]] = {
    "off": OFF,
    "mtp": OFF | {"mtp": "auto"},
    "prompt_lookup": OFF | {"prompt_lookup": "auto"},
    "mtp and prompt_lookup": OFF | {"mtp": "auto", "prompt_lookup": "auto"},
    "draft_model": OFF | {"draft_model": DRAFT_MODEL},
}
PROPOSERS = ("mtp", "draft_model", "prompt_lookup")
EDITS = {
    "engine/core/virtual_token_counter.py": ("num_", "count_"),
    "engine/core/burst.py": ("chunk", "piece"),
    "engine/core/progress.py": ("predicted_s", "expected_s"),
    "engine/core/prefix_cache/node.py": ("num_tokens", "length"),
    "engine/worker/acceptance.py": ("sampled", "chosen"),
    "engine/worker/ranking.py": ("logits", "scores"),
    "engine/worker/logprobs.py": ("logprobs", "lps"),
    "engine/core/proposer_record.py": ("depth", "level"),
}
"""Module -> the name to replace, and its replacement."""
PROMPT_TOKENS, ANSWER_TOKENS = 700, 160


@dataclass(frozen=True)
class Job:
    """A request of a cell, with its matcher's text; None without."""

    request: EngineRequest
    script: np.ndarray | None = None


@dataclass
class Result:
    """One run of a cell in one arm."""

    prefill_s: float
    """Until each request had its first token."""
    tokens_per_s: float
    """Afterwards."""
    tokens: Mapping[str, list[int]]
    figures: dict[str, int]
    """Drafted and accepted tokens by proposer, as "mtp drafted"."""


def edits(count: int, tokenizer: ChatTokenizer) -> list[Job]:
    """Return requests to replace a name in a module."""
    jobs = []
    for path, (name, replacement) in list(EDITS.items())[:count]:
        text = (ROOT / path).read_text(encoding="utf-8")
        prompt = tokenizer.encode_text(text)[:PROMPT_TOKENS]
        answer = tokenizer.encode_text(text.replace(name, replacement))[:ANSWER_TOKENS]
        request = EngineRequest(path, prompt, SamplingParams(len(answer), 0.0), ())
        jobs.append(Job(request, answer))
    return jobs


def jobs_of(task: str, count: int, tokenizer: ChatTokenizer) -> list[Job]:
    """Return the requests of a cell."""
    if task == "edits":
        return edits(count, tokenizer)
    return [Job(request) for request in requests(task, count, tokenizer, None)]


def measure(runner: MLXRunner, config: dict[str, Any], jobs: Sequence[Job], num_warm_ups: int) -> Result:
    """Answer all requests at once with a fresh engine, which has answered them `num_warm_ups` times before."""
    driver = Driver(runner, EngineConfig.model_validate(config))
    for number in range(num_warm_ups):
        _answer(driver, runner.vocab_size, _named(jobs, f" warm-up {number}"))
    before = _figures(driver)
    prefill_s, tokens_per_s = _answer(driver, runner.vocab_size, jobs)
    figures = {name: value - before[name] for name, value in _figures(driver).items()}
    return Result(prefill_s, tokens_per_s, dict(driver.tokens), figures)


def _named(jobs: Sequence[Job], suffix: str) -> list[Job]:
    """Return the same requests with other ids."""
    return [replace(job, request=replace(job.request, request_id=job.request.request_id + suffix)) for job in jobs]


def _answer(driver: Driver, vocab_size: int, jobs: Sequence[Job]) -> tuple[float, float]:
    """Return the seconds until each request had its first token, and tokens per second afterwards."""
    driver.tokens.clear()
    began_s = time.perf_counter()
    for job in jobs:
        matchers = [] if job.script is None else [Script(job.script, vocab_size)]
        driver.core.add_request(job.request, matchers)
    while driver.core.has_work and sum(map(bool, driver.tokens.values())) < len(jobs):
        driver.core.step()
    decode_began_s, num_before = time.perf_counter(), sum(map(len, driver.tokens.values()))
    while driver.core.has_work:
        driver.core.step()
    seconds = time.perf_counter() - decode_began_s
    return decode_began_s - began_s, (sum(map(len, driver.tokens.values())) - num_before) / seconds


def _figures(driver: Driver) -> dict[str, int]:
    status = driver.core._speculation.status()
    return {f"{name} {what}": status[name][f"num_{what}"] for name in PROPOSERS for what in ("drafted", "accepted")}


def main() -> int:
    """Measure all cells and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-ups", type=int, default=1)
    parser.add_argument("--batches", default="1,4,8")
    parser.add_argument("--tasks", default=",".join(("edits", *TASKS)))
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    common = {
        "model": "demo",
        "device": args.device,
        "dtype": args.dtype,
        "max_running": 16,
        "share_device": args.device != "cpu",
    }
    runner = load_runner(EngineConfig.model_validate(common), lambda progress: None)
    with_draft = load_runner(EngineConfig.model_validate(common | {"draft_model": DRAFT_MODEL}), lambda progress: None)
    tokenizer = ChatTokenizer(runner._model.path)
    arms = args.arms.split(",")
    rates = " | ".join(f"{arm}, tokens/s" for arm in arms)
    print(f"| task | rows | {rates} | accepted | prefill, factor | equal answers |")
    print("|" + "---|" * (len(arms) + 5))
    for task in args.tasks.split(","):
        for batch in map(int, args.batches.split(",")):
            jobs = jobs_of(task, batch, tokenizer)
            print_cell(task, batch, arms, runner, with_draft, jobs, args.rounds, args.warm_ups)
    return 0


def print_cell(
    task: str,
    batch: int,
    arms: Sequence[str],
    runner: MLXRunner,
    with_draft: MLXRunner,
    jobs: list[Job],
    rounds: int,
    num_warm_ups: int,
) -> None:
    """Measure one cell in all arms, in turns, and print its line."""
    rates: dict[str, list[float]] = defaultdict(list)
    prefill_s: dict[str, list[float]] = defaultdict(list)
    figures: dict[str, int] = defaultdict(int)
    equal = num_answers = 0
    for number in range(rounds + 1):
        answers = {}
        for arm in arms:
            result = measure(with_draft if arm == "draft_model" else runner, ARMS[arm], jobs, num_warm_ups)
            answers[arm] = result.tokens
            if number:  # the first round compiles kernels
                rates[arm].append(result.tokens_per_s)
                prefill_s[arm].append(result.prefill_s)
                for name, value in result.figures.items():
                    if arm == name.split()[0]:
                        figures[name] += value
        equal += sum(answers[arm][name] == tokens for arm in arms for name, tokens in answers[arms[0]].items())
        num_answers += len(arms) * len(jobs)
    accepted = [
        f"{name} {figures[f'{name} accepted'] / figures[f'{name} drafted']:.2f}"
        for name in PROPOSERS
        if figures[f"{name} drafted"]
    ]
    cells = " | ".join(f"{Spread.of(rates[arm]):.0f}" for arm in arms)
    factors = [
        f"{arm} {median(prefill_s[arm]) / median(prefill_s[arms[0]]):.2f}"
        for arm in arms
        if arm in ("mtp", "draft_model")
    ]
    line = [task, str(batch), cells, ", ".join(accepted) or "-", ", ".join(factors), f"{equal / num_answers:.2f}"]
    print(f"| {' | '.join(line)} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
