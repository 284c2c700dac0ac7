"""The cost of watching: tokens/s of servers with everything on, parts of it, and nothing, in turns.

    uv run python -m tests.benchmarks.watching_bench [--model DIRECTORY] [--rounds 5]

`off`: nothing is recorded (unwatched/sitecustomize.py). `recorded`: phases, histograms, a line per request in the log,
the mirror to Ray. `scraped`: also a scrape of /metrics every second. `traced`: as recorded, and a trace of each request
goes to a receiver of OTLP. `on`: all of it. The servers run all the time; the idle ones wait, but for their mirrors.
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

from tests.benchmarks.measure import Spread, heading, table
from tests.e2e.server import ServeRun, serve_run

CLIENTS = (1, 8, 16)
MAX_TOKENS = 120
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


async def tokens_per_s(base_url: str, model: str, num_clients: int, is_scraped: bool) -> float:
    """Return the tokens/s of `num_clients` clients, each of which asks again when it has its answer."""

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
        return num_tokens / (time.monotonic() - began_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=5)
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

    with contextlib.ExitStack() as stack:
        endpoint = stack.enter_context(receiver())
        unwatched = str(Path(__file__).parent / "unwatched")
        off = start(stack, {}, {"PYTHONPATH": os.pathsep.join([unwatched, os.environ.get("PYTHONPATH", "")])})
        recorded, traced = start(stack, {}, {}), start(stack, {"endpoint": endpoint}, {})
        arms = {
            "off": (off, False),
            "recorded": (recorded, False),
            "scraped": (recorded, True),
            "traced": (traced, False),
            "on": (traced, True),
        }
        rates: dict[tuple[str, int], list[float]] = {(arm, num): [] for arm in arms for num in CLIENTS}
        for round in range(given.rounds + 1):
            for num in CLIENTS:
                for arm in sorted(arms, reverse=bool(round % 2)):
                    server, is_scraped = arms[arm]
                    rate = asyncio.run(tokens_per_s(server.base_url, name, num, is_scraped))
                    if round:  # the first one warms up
                        rates[arm, num].append(rate)
    print(heading(f"Watching, {name}, {given.rounds} rounds"))
    rows = []
    for num in CLIENTS:
        for arm in arms:
            ratios = [one / other for one, other in zip(rates[arm, num], rates["off", num], strict=True)]
            rows.append([str(num), arm, f"{Spread.of(rates[arm, num]):.1f}", f"{Spread.of(ratios):.3f}"])
    print(table(["clients", "watched", "tokens/s", "to off"], rows))


if __name__ == "__main__":
    main()
