"""Load on a running server: arrivals that do not wait for answers, text and images, and what the client saw.

    uv run python -m tests.benchmarks.serve_bench --rate 4 --requests 100 --image-ratio 0.25

Waits count from the moment a request was due, so that a server that stalls is charged for the requests behind it.
"""

import argparse
import asyncio
import base64
import io
import ipaddress
import json
import math
import os
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from PIL import Image, ImageDraw

from tests.benchmarks.measure import CpuMeter, heading, percentile, provenance, table
from tests.support.sse import Answer, Exchange, answer, completions_url, exchange, post, run

ANIMALS = ("fox", "cat", "dog", "owl", "bear", "frog", "duck", "horse")
COLORS = ("red", "green", "blue", "yellow", "orange", "purple", "black", "white")
FILLER = "The {animal} sees a {color} house near the river . In the morning it walks home and eats an apple ."


@dataclass(frozen=True)
class Workload:
    """Equal workloads make equal requests at equal times."""

    rate: float  # requests per second
    num_requests: int
    duration_s: float  # no request is due later
    arrivals: str  # poisson, fixed
    image_ratio: float
    prompt_words: tuple[int, ...]
    max_tokens: int
    image_px: int
    seed: int


@dataclass(frozen=True)
class Planned:
    at_s: float
    kind: str  # text, image
    body: dict[str, Any]


def plan(workload: Workload, model: str) -> list[Planned]:
    rng = random.Random(workload.seed)
    planned, at_s = [], 0.0
    while len(planned) < workload.num_requests and at_s <= workload.duration_s:
        kind = "image" if rng.random() < workload.image_ratio else "text"
        content = image_content(rng, workload.image_px) if kind == "image" else text_content(rng, workload.prompt_words)
        body = {
            "model": model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": workload.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        planned.append(Planned(at_s, kind, body))
        at_s += rng.expovariate(workload.rate) if workload.arrivals == "poisson" else 1 / workload.rate
    return planned


def text_content(rng: random.Random, lengths: tuple[int, ...]) -> str:
    """About as many words as one of `lengths`, ending in a question with a long answer."""
    words: list[str] = []
    length = rng.choice(lengths)
    while len(words) < length:
        words += FILLER.format(animal=rng.choice(ANIMALS), color=rng.choice(COLORS)).split()
    return " ".join([*words[:length], f"Tell me a story about a {rng.choice(ANIMALS)}."])


def image_content(rng: random.Random, size: int) -> list[dict[str, Any]]:
    """A drawing that no other request has, and a question about it."""
    picture = Image.new("RGB", (size, size), rng.choice(COLORS))
    draw = ImageDraw.Draw(picture)
    for _ in range(rng.randint(1, 4)):
        x, y, side = rng.randrange(size), rng.randrange(size), rng.randint(size // 8, size // 3)
        shape = rng.choice((draw.ellipse, draw.rectangle))
        shape((x, y, x + side, y + side), fill=rng.choice(COLORS))
    file = io.BytesIO()
    picture.save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "Describe what you see."}]


async def drive(base: str, planned: list[Planned], timeout_s: float) -> list[Exchange]:
    url, began = completions_url(base), time.monotonic() + 0.1
    requests = [(began + p.at_s, post(url, p.body)) for p in planned]
    return await asyncio.gather(*(exchange(url, request, timeout_s, due) for due, request in requests))


def summary(kind: str, answers: list[Answer]) -> dict[str, Any]:
    """Figures of one class of requests: milliseconds, and tokens per second from the first due to the last token."""
    good = [a for a in answers if a.error is None and a.pieces]
    num_tokens = sum(a.num_output_tokens for a in good)
    end = max((a.pieces[-1][0] for a in good), default=math.nan)
    waits = {
        "ttft": [a.ttft_s for a in good],
        "gap": [gap for a in good for gap in a.gaps_s],
        "tpot": [a.tpot_s for a in good if a.tpot_s is not None],
    }
    return {
        "class": kind,
        "requests": len(answers),
        "errors": sum(a.error is not None for a in answers),
        "empty": sum(a.error is None and not a.pieces for a in answers),
        "prompt_tokens_p50": percentile((a.num_prompt_tokens for a in good), 50),
        "output_tokens": num_tokens,
        "tokens_per_s": num_tokens / (end - min((a.due for a in answers), default=math.nan)),
        **{f"{name}_ms_p{q}": percentile(waits[name], q) * 1e3 for name in waits for q in (50, 99)},
    }


def print_summaries(summaries: list[dict[str, Any]]) -> None:
    def cell(value: Any) -> str:
        return f"{value:.1f}" if isinstance(value, float) else str(value)

    print(table(list(summaries[0]), [[cell(value) for value in row.values()] for row in summaries]))
    print("gap: between two pieces of text in the stream; tpot: per output token after the first, by usage")


def engine_pids(base: str) -> list[int]:
    """Return the process ids of the engines on this machine, as /v1/status names them."""
    status = httpx.get(base.rstrip("/") + "/status", timeout=10).raise_for_status().json()
    return [replica["pid"] for replica in status["engines"] if psutil.pid_exists(replica["pid"])]


def is_loopback(base: str) -> bool:
    host = httpx.URL(base).host
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def measure(base: str, workload: Workload, model: str, timeout_s: float) -> dict[str, Any]:
    planned = plan(workload, model)
    warm_up = [p for kind in ("text", "image") for p in planned if p.kind == kind][:1] + planned[-1:]
    run(drive(base, [Planned(0.0, p.kind, p.body) for p in warm_up], timeout_s))
    engine = CpuMeter(engine_pids(base) if is_loopback(base) else [])
    client = CpuMeter([os.getpid()])
    exchanges = run(drive(base, planned, timeout_s))
    engine_cpu_s, client_cpu_s, wall_s = engine.cpu_s(), client.cpu_s(), client.wall_s()
    answers = [answer(e) for e in exchanges]
    by_kind = {kind: [a for a, p in zip(answers, planned, strict=True) if p.kind == kind] for kind in ("text", "image")}
    by_kind = {kind: group for kind, group in by_kind.items() if group}
    num_tokens = sum(a.num_output_tokens for a in answers) or math.nan
    return {
        "workload": asdict(workload),
        "provenance": provenance(),
        "classes": [summary(kind, group) for kind, group in by_kind.items()] + [summary("all", answers)],
        "engine_cpu_us_per_token": engine_cpu_s / num_tokens * 1e6,
        "engine_cpu_cores": engine_cpu_s / wall_s,
        "client_cpu_us_per_token": client_cpu_s / num_tokens * 1e6,
        "sent_late_ms_p99": percentile((a.sent - a.due for a in answers if a.sent), 99) * 1e3,
        "wall_s": wall_s,
        "errors": sorted({a.error for a in answers if a.error is not None}),
    }


def print_report(base: str, report: dict[str, Any]) -> None:
    workload = " ".join(f"{name}={value}" for name, value in report["workload"].items())
    print(f"{heading(f'serve_bench {base}')}\n{workload}\n")
    print_summaries(report["classes"])
    print(
        f"engine process: {report['engine_cpu_us_per_token']:.0f} us CPU per output token, prefill included "
        f"({report['engine_cpu_cores']:.2f} cores over {report['wall_s']:.1f} s); "
        f"client: {report['client_cpu_us_per_token']:.0f} us, sent late by {report['sent_late_ms_p99']:.1f} ms (p99)"
    )
    for error in report["errors"]:
        print(f"error: {error}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--allow-remote", action="store_true", help="let --url name another machine")
    parser.add_argument("--model", help="default: the first of /v1/models")
    parser.add_argument("--rate", type=float, default=2.0, help="requests per second")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--duration", type=float, default=60.0, help="seconds in which requests are sent")
    parser.add_argument("--arrivals", choices=("poisson", "fixed"), default="poisson")
    parser.add_argument("--image-ratio", type=float, default=0.25)
    parser.add_argument("--prompt-words", default="8,64,256", help="each text prompt has one of these lengths")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--image-px", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one answer")
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    args = parser.parse_args()
    if not args.url.startswith("http://"):
        parser.error("--url must begin with http://")
    if not is_loopback(args.url) and not args.allow_remote:
        parser.error(f"{args.url} is not this machine; --allow-remote if you mean it")
    return args


def main() -> int:
    args = arguments()
    workload = Workload(
        rate=args.rate,
        num_requests=args.requests,
        duration_s=args.duration,
        arrivals=args.arrivals,
        image_ratio=args.image_ratio,
        prompt_words=tuple(int(words) for words in args.prompt_words.split(",")),
        max_tokens=args.max_tokens,
        image_px=args.image_px,
        seed=args.seed,
    )
    model = args.model or httpx.get(args.url.rstrip("/") + "/models").raise_for_status().json()["data"][0]["id"]
    report = measure(args.url, workload, model, args.timeout)
    print_report(args.url, report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))
    return 1 if report["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
