"""The cost of overload: as many requests as the server can answer, and four times as many, in turns.

    uv run python -m tests.benchmarks.overload_bench --rounds 3

Starts its own server. Capacity is measured in a closed loop: a few more clients than rows, each of which sends its next
request when it has its answer. Then requests arrive by chance (Poisson) at the rate that this gave in the same round,
and at four times that rate; nobody waits for anybody, and nobody who is refused comes again. Goodput: output tokens per
second of answers that were completed. All answers have as many tokens.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.measure import Spread, heading, provenance, table
from tests.benchmarks.overload_figures import Round, arrivals, figures, summary
from tests.e2e.server import serve_run
from tests.support.sse import Exchange, completions_url, exchange, post, run

ANIMALS = ("fox", "cat", "dog", "owl", "bear", "frog", "duck", "horse")
TIMEOUT_S = 120.0


def body(number: int, num_tokens: int, **fields: Any) -> dict[str, Any]:
    question = f"Tell me a story about a {ANIMALS[number % len(ANIMALS)]}."
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "min_tokens": num_tokens,
        "max_tokens": num_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }


class Server:
    """base: as OpenAI's clients write it. Its requests are numbered, so that no two rounds differ in anything else."""

    def __init__(self, base: str, num_tokens: int):
        self._url = completions_url(base)
        self._num_tokens = num_tokens

    def closed(self, num_clients: int, seconds: float) -> list[Exchange]:
        return run(self._closed(num_clients, seconds))

    async def _closed(self, num_clients: int, seconds: float) -> list[Exchange]:
        end = time.monotonic() + seconds
        numbers, done = iter(range(10**9)), []

        async def client(numbers: Iterator[int]) -> None:
            while time.monotonic() < end:
                done.append(await self._ask(next(numbers)))

        await asyncio.gather(*(client(numbers) for _ in range(num_clients)))
        return done

    def open(self, due_s: Sequence[float]) -> list[Exchange]:
        return run(self._open(due_s))

    async def _open(self, due_s: Sequence[float]) -> list[Exchange]:
        began = time.monotonic() + 0.1
        return list(await asyncio.gather(*(self._ask(number, began + at) for number, at in enumerate(due_s))))

    async def _ask(self, number: int, due: float | None = None) -> Exchange:
        return await exchange(self._url, post(self._url, body(number, self._num_tokens)), TIMEOUT_S, due)


def small(config: dict[str, Any], max_running: int, max_queue: int) -> None:
    args = config["applications"][0]["args"]
    args["engine"].update(max_running=max_running, max_queue=max_queue)
    args["spec_prefill"] = {"enabled": False}


def measure(args: argparse.Namespace) -> tuple[list[float], list[Round]]:
    """Requests per second at capacity, by round, and the rounds of all arms."""
    rates, rounds, rng = [], [], random.Random(args.seed)
    num_clients = args.max_running + args.waiting_clients
    with serve_run(lambda config: small(config, args.max_running, args.max_queue)) as run_:
        run_.wait_ready()
        server = Server(f"{run_.base_url}/v1", args.tokens)
        server.closed(num_clients, args.ramp)  # warms up
        for _ in range(args.rounds):
            closed = server.closed(num_clients, args.seconds)
            rounds.append(figures("closed", closed, args.ramp, args.seconds))
            rates.append(rounds[-1].goodput / args.tokens)
            for factor in (1, args.overload):
                due_s = arrivals(rng, factor * rates[-1], args.seconds)
                rounds.append(figures(f"{factor:g} x", server.open(due_s), args.ramp, args.seconds))
        run_.stop()
    return rates, rounds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30.0, help="in which requests are sent, in each round and arm")
    parser.add_argument("--ramp", type=float, default=5.0, help="seconds at the start of a round that do not count")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--overload", type=float, default=4.0, help="times capacity")
    parser.add_argument("--max-running", type=int, default=8)
    parser.add_argument("--max-queue", type=int, default=8)
    parser.add_argument("--waiting-clients", type=int, default=4, help="in the closed loop, beside one for each row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    args = parser.parse_args()
    rates, rounds = measure(args)
    report = summary(rounds, f"{args.overload:g} x")
    print(heading(f"overload_bench, {args.max_running} rows, {args.max_queue} may wait, {args.tokens} tokens each"))
    print(f"{args.rounds} rounds of {args.seconds:g} s: median [lowest highest]")
    print(f"1 x is {Spread.of(rates):.2f} requests/s\n")
    print(table(list(report.arms[0]), [list(arm.values()) for arm in report.arms]))
    for line in report.lines:
        print(line)
    if args.json:
        content = {"provenance": provenance(), "rates": rates, "arms": report.arms, "lines": report.lines}
        args.json.write_text(json.dumps(content, indent=1))
    return 1 if report.errors else 0


if __name__ == "__main__":
    sys.exit(main())
