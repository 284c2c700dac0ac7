"""The scenarios of the comparison and the client that runs them, in a process of its own.

    python -m tests.benchmarks.peers.load http://127.0.0.1:8000 MODEL [--images] [--tools]

Prints one JSON object per scenario. Closed loop, temperature 0, streamed. A first token is the first text, thought or
call; the tokens of an answer are those that the server counts.
"""

import argparse
import asyncio
import base64
import io
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from PIL import Image, ImageDraw

from tests.benchmarks.measure import percentile

NUM_TOKENS = 120
"""Maximum tokens of an answer in the scenarios that measure decoding."""

CLIENTS = (1, 4, 8, 16, 32)
ANIMALS = ("fox", "lion", "cat", "bear", "wolf", "owl", "deer", "crow")
COLORS = ("red", "blue", "green", "yellow")
SENTENCES = (
    "The weather was calm and the people walked slowly along the road.",
    "A small cat slept near the window of the house.",
    "The baker sold bread and the children played in the garden.",
    "In the evening the wind moved the leaves of the trees.",
)
FACT = "The access code of the old mill is 4831."
QUESTION = "What is the access code of the old mill?"

STAGGER_S = 0.4
BEHIND_S = 0.5
"""Seconds after the start of a long prompt at which short ones arrive."""

TURNS = 5
"""Turns of each agent. Calls and results in its history are scripted, so that all arms get the same prompts."""


def _tool(name: str, text: str, argument: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": text, "parameters": parameters}}


TOOLS = [
    _tool("get_weather", "Get the weather in a city.", "city"),
    _tool("read_file", "Read a file of the project.", "path"),
    _tool("run_command", "Run a command in the shell.", "command"),
    _tool("search", "Search the project for a text.", "text"),
]

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Sample:
    """One answer: its first token and its end, in seconds from the request, and its tokens; or why there is none."""

    first_s: float = 0.0
    last_s: float = 0.0
    num_tokens: int = 0
    error: str = ""


def user(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def story(i: int) -> Messages:
    return user(f"Tell me a long story about a {ANIMALS[i % len(ANIMALS)]} and the number {i}.")


def picture(i: int) -> Messages:
    image, out = Image.new("RGB", (192, 192), "white"), io.BytesIO()
    ImageDraw.Draw(image).ellipse((50, 50, 140, 140), fill=COLORS[i % len(COLORS)])
    image.save(out, "PNG")
    url = "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is in the image?"}]
    return [{"role": "user", "content": parts}]


def long_text(num_words: int, seed: int) -> str:
    chosen, words = random.Random(seed), 0
    sentences = []
    while words < num_words:
        sentences.append(chosen.choice(SENTENCES))
        words += len(sentences[-1].split())
    return " ".join([*sentences, FACT])


def agent(i: int) -> list[Messages]:
    """Return the prompts of an agent's turns, each of which begins with the one before."""
    messages: Messages = [
        {"role": "system", "content": f"You are agent {i}. " + long_text(400, 100 + i)},
        {"role": "user", "content": f"Find the error in module {i} and say what causes it."},
    ]
    prompts = []
    for turn in range(TURNS):
        prompts.append(list(messages))
        function = {"name": "read_file", "arguments": json.dumps({"path": f"src/module_{i}_{turn}.py"})}
        id = f"call_{i}_{turn}"
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [{"id": id, "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": id, "content": long_text(120, 10 * i + turn)},
        ]
    return prompts


class Client:
    """Sends requests to one server and summarizes scenarios."""

    def __init__(self, http: httpx.AsyncClient, base: str, model: str):
        self._http, self._url, self._model = http, f"{base}/v1/chat/completions", model

    async def ask(
        self,
        messages: Messages,
        num_tokens: int = NUM_TOKENS,
        after_s: float = 0.0,
        leaves_after: int | None = None,
        tools: Sequence[dict[str, Any]] = (),
    ) -> Sample:
        """Return the figures of one answer, which is left behind after `leaves_after` pieces if that is given."""
        await asyncio.sleep(after_s)
        body = {
            "model": self._model,
            "messages": messages,
            "max_tokens": num_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"tools": list(tools)} if tools else {}),
        }
        began, first, last, pieces, counted = time.perf_counter(), None, 0.0, 0, None
        try:
            async with self._http.stream("POST", self._url, json=body) as response:
                if response.status_code != 200:
                    return Sample(error=f"status {response.status_code}")
                async for event in _events(response):
                    counted = (event.get("usage") or {}).get("completion_tokens", counted)
                    if not _has_output(event):
                        continue
                    last = time.perf_counter() - began
                    first = last if first is None else first
                    pieces += 1
                    if pieces == leaves_after:
                        break
        except (httpx.HTTPError, ValueError) as error:
            return Sample(error=type(error).__name__)
        if first is None:
            return Sample(error="no output")
        return Sample(first, last, counted or pieces)


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])


def _has_output(event: dict[str, Any]) -> bool:
    deltas = [choice.get("delta") or {} for choice in event.get("choices") or ()]
    keys = ("content", "reasoning_content", "reasoning", "tool_calls")
    return any(delta.get(key) for delta in deltas for key in keys)


def summary(scenario: str, samples: Sequence[Sample], wall_s: float) -> dict[str, Any]:
    """Return the figures of a scenario: tokens per second over its wall time, and milliseconds of its answers."""
    good = [sample for sample in samples if not sample.error]
    firsts = [sample.first_s * 1e3 for sample in good]
    paces = [(one.last_s - one.first_s) / (one.num_tokens - 1) * 1e3 for one in good if one.num_tokens > 1]
    return {
        "scenario": scenario,
        "requests": len(samples),
        "errors": sorted(sample.error for sample in samples if sample.error),
        "tokens/s": sum(sample.num_tokens for sample in good) / wall_s,
        "first token p50, ms": percentile(firsts, 50),
        "first token last, ms": max(firsts, default=float("nan")),
        "per token p50, ms": percentile(paces, 50),
    }


async def scenarios(client: Client, images: bool, tools: bool) -> AsyncIterator[dict[str, Any]]:
    """Run the scenarios one after the other and yield their figures."""

    async def at_once(name: str, *asked: Any) -> dict[str, Any]:
        began = time.perf_counter()
        samples = await asyncio.gather(*asked)
        return summary(name, samples, time.perf_counter() - began)

    await client.ask(story(0), 20)
    if images:
        await client.ask(picture(0), 5)
    for num in CLIENTS:
        yield await at_once(f"text, {num}", *(client.ask(story(i)) for i in range(num)))
    if images:
        yield await at_once("images, 8", *(client.ask(picture(i)) for i in range(8)))
        mixed = (client.ask(picture(i) if i % 2 else story(i)) for i in range(8))
        yield await at_once("text and images, 8", *mixed)
    if tools:
        asked = (user(f"What is the weather in {city}?") for city in ("Paris", "Oslo", "Rome", "Lima"))
        yield await at_once("tools, 4", *(client.ask(messages, 60, tools=TOOLS) for messages in asked))
    yield await at_once("arrivals", *(client.ask(story(20 + i), after_s=i * STAGGER_S) for i in range(8)))

    began = time.perf_counter()
    long = user(f"{long_text(2500, 1)} {QUESTION}")
    short = (client.ask(story(i), 20, after_s=BEHIND_S) for i in range(2))
    first, *others = await asyncio.gather(client.ask(long, 10), *short)
    wall_s = time.perf_counter() - began
    yield summary("2,500 words", [first], wall_s)
    yield summary("short behind 2,500 words", others, wall_s)

    for name, num_words in (("1k", 800), ("4k", 3200)):
        history = user(f"{long_text(num_words, num_words)} {QUESTION}")
        yield summary(f"{name}, first turn", [await client.ask(history, 10)], 1)
        history += [{"role": "assistant", "content": FACT}, *user("What is 3 + 4?")]
        yield summary(f"{name}, second turn", [await client.ask(history, 10)], 1)
    if tools:

        async def run(prompts: list[Messages]) -> list[Sample]:
            return [await client.ask(prompt, 40, tools=TOOLS) for prompt in prompts]

        began = time.perf_counter()
        turns = await asyncio.gather(*(run(agent(i)) for i in range(4)))
        later = [sample for samples in turns for sample in samples[1:]]
        yield summary("4 agents, later turns", later, time.perf_counter() - began)
    leaving = (client.ask(story(i), leaves_after=5 if i % 3 == 0 else None) for i in range(16))
    yield await at_once("text, 16, a third leaves", *leaving)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base")
    parser.add_argument("model")
    parser.add_argument("--images", action="store_true")
    parser.add_argument("--tools", action="store_true")
    args = parser.parse_args()
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=100)) as http:
        async for figures in scenarios(Client(http, args.base, args.model), args.images, args.tools):
            print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
