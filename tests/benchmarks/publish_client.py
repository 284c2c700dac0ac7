"""The client of publish_bench, in a process of its own: concurrent streams, and when each of their tokens came.

    python -m tests.benchmarks.publish_client http://127.0.0.1:8000/v1 STREAMS TOKENS STEPS_PER_S

Writes JSON: for each seed the arrival of every token by time.monotonic(), the number of pieces of text, and errors.
"""

import asyncio
import json
import os
import sys
import time

import httpx

from tests.benchmarks.measure import CpuMeter
from tests.support.sse import Exchange, answer, completions_url, exchange, post, run

SPREAD_S = 1.0
"""The streams begin one after the other within this time."""


async def drive(base: str, model: str, num_streams: int, num_tokens: int, timeout_s: float) -> list[Exchange]:
    url, began = completions_url(base), time.monotonic() + 0.1

    def stream(seed: int) -> bytes:
        return post(
            url,
            {
                "model": model,
                "messages": [{"role": "user", "content": f"Stream {seed}"}],
                "max_tokens": num_tokens,
                "seed": seed,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        )

    dues = [began + SPREAD_S * seed / num_streams for seed in range(num_streams)]
    return await asyncio.gather(*(exchange(url, stream(seed), timeout_s, due) for seed, due in enumerate(dues)))


def main() -> int:
    base, num_streams, num_tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    timeout_s = 3 * num_tokens / float(sys.argv[4]) + 30
    model = httpx.get(base + "/models", timeout=30).raise_for_status().json()["data"][0]["id"]
    cpu = CpuMeter([os.getpid()])
    exchanges = run(drive(base, model, num_streams, num_tokens, timeout_s))
    cpu_s = cpu.cpu_s()
    answers = [answer(e) for e in exchanges]
    arrivals = {seed: [at for at, text in a.pieces for _ in text] for seed, a in enumerate(answers)}
    report = {
        "arrivals": arrivals,
        "num_pieces": sum(len(a.pieces) for a in answers),
        "cpu_s": cpu_s,
        "errors": sorted({a.error for a in answers if a.error is not None}),
    }
    json.dump(report, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
