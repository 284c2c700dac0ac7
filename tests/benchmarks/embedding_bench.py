"""Embeddings of many short texts: one request to a real server, and the same texts in an engine alone, in turns.

    uv run python -m tests.benchmarks.embedding_bench [--model DIRECTORY] [--texts 256] [--rounds 5]

The model is all-MiniLM-L6-v2 by default (tests/support/minilm.py). The engine alone is AsyncEngine in this process,
which gets all texts at once, tokenized. CPU time is that of all processes of the server, or of this one.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx
import psutil

from deployments.planners.prompt_planner import PromptPlanner
from deployments.requests import ChatRequest
from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.protocol import EngineRequest
from tests.benchmarks.measure import CpuMeter, Spread, heading, table
from tests.e2e.server import ServeRun, serve_run
from tests.support.minilm import checkpoint
from tests.support.pooled_plans import planned

SENTENCE = "the quick brown fox jumps over a lazy dog while seven wise men watch from the old stone bridge near town"
NUM_WORDS = 20


def text_of(number: int) -> str:
    words = SENTENCE.split()
    return " ".join(words[(7 * number + 3 * i + number * i) % len(words)] for i in range(NUM_WORDS))


async def all_ends(engine: AsyncEngine, requests: Sequence[EngineRequest]) -> None:
    async def end_of(request: EngineRequest) -> None:
        async for chunk in engine.generate(request):
            assert chunk.embedding is not None, chunk.error

    await asyncio.gather(*(end_of(request) for request in requests))


def post(server: ServeRun, texts: Sequence[str]) -> int:
    """Return the tokens of all texts."""
    model = httpx.get(f"{server.base_url}/v1/models").json()["data"][0]["id"]
    body = {"model": model, "input": texts, "encoding_format": "base64"}
    answer = httpx.post(f"{server.base_url}/v1/embeddings", json=body, timeout=600)
    answer.raise_for_status()
    assert len(answer.json()["data"]) == len(texts)
    return answer.json()["usage"]["prompt_tokens"]


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    model = given.model or str(checkpoint())
    texts = [text_of(number) for number in range(given.texts)]
    config = EngineConfig(model=model, max_queue=given.texts, share_device=True)
    planner = await asyncio.to_thread(PromptPlanner, config)
    asked = [ChatRequest(f"r-{i}", (), raw_prompt=text) for i, text in enumerate(texts)]
    requests = await asyncio.to_thread(planned, planner, *asked)

    def change(served: dict[str, Any]) -> None:
        served["applications"][0]["args"]["engine"] |= {"model": model, "share_device": True}

    measured: dict[str, list[tuple[float, float]]] = {"HTTP": [], "engine alone": []}
    with serve_run(change) as server:
        await asyncio.to_thread(server.wait_ready)
        engine = AsyncEngine(config)
        await engine.wait_ready()
        of_server = [server.pid, *(child.pid for child in psutil.Process(server.pid).children(recursive=True))]
        for round in range(given.rounds + 1):
            for arm in measured:
                meter, began_s = CpuMeter(of_server if arm == "HTTP" else [psutil.Process().pid]), time.monotonic()
                if arm == "HTTP":
                    num_tokens = await asyncio.to_thread(post, server, texts)
                    assert num_tokens == sum(len(one.token_ids) for one in requests)
                else:
                    await all_ends(engine, [replace(one, request_id=f"{round}-{i}") for i, one in enumerate(requests)])
                if round:  # the first one warms up
                    measured[arm].append((time.monotonic() - began_s, meter.cpu_s()))
        await engine.shutdown()
    print(heading(f"{given.texts} texts of {len(requests[0].token_ids)} tokens, {given.rounds} rounds"))
    rows = []
    for arm, found in measured.items():
        seconds, cpu_s = zip(*found, strict=True)
        each_ms = [1e3 * one / given.texts for one in seconds]
        rows.append([arm, f"{Spread.of(seconds):.2f}", f"{Spread.of(each_ms):.1f}", f"{Spread.of(cpu_s):.2f}"])
    print(table(["", "seconds", "ms per text", "CPU seconds"], rows))


if __name__ == "__main__":
    asyncio.run(main())
