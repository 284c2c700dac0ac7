"""The cost of watching: tokens/s, and CPU time per token, of servers with everything on, parts of it, and nothing.

    uv run python -m tests.benchmarks.watching_bench [--model DIRECTORY] [--rounds 5] [--arms off on]

`off`: nothing is recorded (unwatched/sitecustomize.py). `recorded`: phases, histograms, a line per request in the log,
the mirror to Ray. `scraped`: also a scrape of /metrics every second. `traced`: as recorded, and a trace of each request
goes to a receiver of OTLP. `on`: all of it. The arms take turns; their servers run all the time. CPU time is that of
all processes of the arm's server, and says more than tokens/s where the other servers' idle processes take turns too.
"""

import argparse
import asyncio
import contextlib
import json
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.benchmarks.measure import CpuMeter, Spread, heading, table
from tests.e2e.server import ServeRun, serve_run

CLIENTS = (1, 8, 16)
MAX_TOKENS = 120
ARMS = ("off", "recorded", "scraped", "traced", "on")
NUM_ANSWERS = 3
"""Answers that each client asks for in a round, one after the other."""


class Sink(BaseHTTPRequestHandler):
    """Takes whatever is posted: the receiver's own work must not count."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Be quiet."""


@contextlib.contextmanager
def receiver() -> Iterator[str]:
    """Receive traces. Yields the endpoint."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Sink)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces"
    server.shutdown()


@contextlib.asynccontextmanager
async def scraped(client: httpx.AsyncClient) -> AsyncIterator[None]:
    """Scrape /metrics every second meanwhile."""

    async def scrape() -> None:
        while True:
            (await client.get("/metrics")).raise_for_status()
            await asyncio.sleep(1.0)

    task = asyncio.ensure_future(scrape())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def tokens_and_seconds(base_url: str, model: str, num_clients: int, is_scraped: bool) -> tuple[int, float]:
    """Return the tokens, and the seconds, of `num_clients` clients, each of which asks again when it has its answer."""

    async def talk(client: httpx.AsyncClient, number: int) -> int:
        num_tokens = 0
        for turn in range(NUM_ANSWERS):
            body = {
                "model": model,
                "messages": [{"role": "user", "content": f"Tell a story about the number {number * 100 + turn}."}],
                "max_tokens": MAX_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    if line.startswith("data: {") and (usage := json.loads(line[6:]).get("usage")):
                        num_tokens += usage["completion_tokens"]
        return num_tokens

    async with (
        httpx.AsyncClient(base_url=base_url, timeout=600) as client,
        scraped(client) if is_scraped else contextlib.nullcontext(),
    ):
        began_s = time.monotonic()
        num_tokens = sum(await asyncio.gather(*(talk(client, number) for number in range(num_clients))))
        return num_tokens, time.monotonic() - began_s


def measure(server: ServeRun, model: str, num_clients: int, is_scraped: bool) -> tuple[float, float]:
    """Return the tokens/s, and the milliseconds of CPU time that the server takes per token."""
    processes = [server.pid, *(child.pid for child in psutil.Process(server.pid).children(recursive=True))]
    meter = CpuMeter(processes)
    num_tokens, seconds = asyncio.run(tokens_and_seconds(server.base_url, model, num_clients, is_scraped))
    return num_tokens / seconds, 1e3 * meter.cpu_s() / num_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    given = parser.parse_args()
    name = given.model if given.model == "demo" else Path(given.model).name

    def start(stack: contextlib.ExitStack, tracing: dict[str, Any], env: dict[str, str]) -> ServeRun:
        def change(config: dict[str, Any]) -> None:
            args = config["applications"][0]["args"]
            args["engine"] |= {"model": given.model, "max_running": max(CLIENTS), "share_device": True}
            args |= {"tracing": tracing, "spec_prefill": {"enabled": False}}

        server = stack.enter_context(serve_run(change, env))
        server.wait_ready()
        return server

    unwatched = str(Path(__file__).parent / "unwatched")
    with contextlib.ExitStack() as stack:
        endpoint = stack.enter_context(receiver())
        kinds: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
            "off": ({}, {"PYTHONPATH": os.pathsep.join([unwatched, os.environ.get("PYTHONPATH", "")])}),
            "recorded": ({}, {}),
            "traced": ({"endpoint": endpoint}, {}),
        }
        kind_of = dict(zip(ARMS, ("off", "recorded", "recorded", "traced", "traced"), strict=True))
        servers = {kind: start(stack, *kinds[kind]) for kind in dict.fromkeys(kind_of[arm] for arm in given.arms)}
        measured: dict[tuple[str, int], list[tuple[float, float]]] = {
            (arm, num): [] for arm in given.arms for num in CLIENTS
        }
        for round in range(given.rounds + 1):
            for num in CLIENTS:
                for arm in given.arms[:: -1 if round % 2 else 1]:
                    found = measure(servers[kind_of[arm]], name, num, is_scraped=arm in ("scraped", "on"))
                    if round:  # the first one warms up
                        measured[arm, num].append(found)
    print(heading(f"Watching, {name}, {given.rounds} rounds"))
    rows = []
    for num in CLIENTS:
        for arm in given.arms:
            rates, costs = zip(*measured[arm, num], strict=True)
            ratios = [
                [one[i] / other[i] for one, other in zip(measured[arm, num], measured[given.arms[0], num], strict=True)]
                for i in range(2)
            ]
            rows.append(
                [
                    str(num),
                    arm,
                    f"{Spread.of(rates):.1f}",
                    f"{Spread.of(ratios[0]):.3f}",
                    f"{Spread.of(costs):.2f}",
                    f"{Spread.of(ratios[1]):.3f}",
                ]
            )
    first = given.arms[0]
    print(table(["clients", "watched", "tokens/s", f"to {first}", "CPU ms/token", f"to {first}"], rows))


if __name__ == "__main__":
    main()
