"""Measure the running server as its users speak of speed: tokens per second of prompts (pp) and of answers (tg).

Prompts have exact lengths in tokens, counted by the server. Each begins with other random words, so that nothing of it
is cached; with a depth, so many tokens before it are computed first and then come from the prefix cache.
"""

import argparse
import random
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from deployments.commands import connection
from deployments.commands.connection import Connection
from deployments.commands.output import CommandError, UsageError, say, show_json, show_table

WORDS = ("harbor", "bright", "gate", "old", "quiet", "river", "stone", "window", "green", "seven", "paper", "winter")
ROUND_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Load:
    """One row of the table."""

    pp: int
    """Prompt tokens that are computed, of each request."""
    tg: int
    """Tokens of each answer; the model may not end it earlier."""
    depth: int
    """Tokens before them that are cached."""
    concurrency: int
    """Requests at the same time."""

    def __str__(self) -> str:
        return f"pp {self.pp}, tg {self.tg}, depth {self.depth}, {self.concurrency} at once"


@dataclass(frozen=True)
class Sample:
    """One request."""

    first_token_s: float
    seconds: float
    num_prompt: int
    num_cached: int
    num_tokens: int


@dataclass(frozen=True)
class Figure:
    """Values of all rounds."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Figure":
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:,.1f} [{self.lowest:,.1f} {self.highest:,.1f}]"


@dataclass(frozen=True)
class Result:
    """The measurements of a load, over its rounds."""

    load: Load
    pp_tokens_per_s: Figure
    """Computed prompt tokens of all requests of a round, by the seconds until the last of their first tokens."""
    tg_tokens_per_s: Figure
    """Tokens behind the first ones of all requests of a round, by the seconds from the first to the last token."""
    tg_tokens_per_s_per_request: Figure
    first_token_ms: Figure
    num_cached: int
    """Cached tokens of a prompt, at least."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    connection.add_arguments(parser)
    parser.add_argument(
        "--pp", type=int, nargs="+", default=[512, 2048], metavar="N", help="prompt tokens; default: 512 2048"
    )
    parser.add_argument("--tg", type=int, nargs="+", default=[128], metavar="N", help="answer tokens; default: 128")
    parser.add_argument(
        "--depth", type=int, nargs="+", default=[0], metavar="N", help="cached tokens before; default: 0"
    )
    parser.add_argument(
        "--concurrency", type=int, nargs="+", default=[1], metavar="N", help="requests at once; default: 1"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="measurements of each row; default: 3")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    _check(options)
    server = connection.connection_of(options, ROUND_TIMEOUT_S)
    card = server.get("/v1/models")["data"][0]
    loads = _loads(options, card)
    prompts = Prompts(server, card["id"], random.Random())
    say(f"{card['id']} at {server.url}: {len(loads)} loads, {options.rounds} rounds each, after a warm-up")
    results = []
    for load in loads:
        results.append(_measure(server, prompts, load, options.rounds))
        say(f"  {load} done")
    if options.json:
        told = {"url": server.url, "model": card["id"], "rounds": options.rounds}
        show_json({**told, "results": list(map(asdict, results))})
        return 0
    columns = (
        "pp",
        "#tg",
        "#depth",
        "#cached",
        "#at once",
        "#pp tokens/s",
        "#tg tokens/s",
        "#tg per request",
        "#first token ms",
    )
    show_table(columns, map(_row, results), f"{card['id']}: median [lowest highest] of {options.rounds} rounds")
    say(
        "pp: computed prompt tokens of all requests by the time until the last of their first tokens; tg: their "
        "answers' tokens from the first to the last. Through HTTP, queue and network included; sampling is greedy."
    )
    return 0


def _check(options: argparse.Namespace) -> None:
    least = {"pp": 16, "tg": 2, "depth": 0, "concurrency": 1}
    for name, low in least.items():
        for value in getattr(options, name):
            if value < low:
                raise UsageError(f"--{name} is {value}; it must be at least {low}")
    if not 1 <= options.rounds <= 100:
        raise UsageError(f"--rounds is {options.rounds}; it must be between 1 and 100")


def _loads(options: argparse.Namespace, card: dict[str, Any]) -> list[Load]:
    """Return a load for each combination of the arguments. Raises CommandError: one exceeds the model's context."""
    loads = [
        Load(pp, tg, depth, concurrency)
        for depth in options.depth
        for concurrency in options.concurrency
        for pp in options.pp
        for tg in options.tg
    ]
    for load in loads:
        if (needed := load.depth + load.pp + load.tg) > card["max_model_len"]:
            raise CommandError(f"{load} needs {needed} tokens; the context of {card['id']} has {card['max_model_len']}")
    return loads


class Prompts:
    """Makes prompts of exact lengths, as token ids.

    Args:
        server: Counts the tokens.
        model: A name that it serves.
        random_: Chooses the words.
    """

    def __init__(self, server: Connection, model: str, random_: random.Random):
        self._server = server
        self._model = model
        self._random = random_

    def make(self, num_tokens: int) -> list[int]:
        """Return a prompt of random words. Raises CommandError: the server's tokenizer makes no tokens of words."""
        tokens: list[int] = []
        while len(tokens) < num_tokens:
            words = [self._word() for _ in range(max(16, num_tokens - len(tokens)))]
            more = self._server.post("/tokenize", {"prompt": " ".join(words)})["tokens"]
            if not more:
                raise CommandError(f"{self._server.url} makes no tokens of {words[0]!r}")
            tokens += more
        return tokens[:num_tokens]

    def _word(self) -> str:
        return self._random.choice(WORDS) if self._random.random() < 0.5 else str(self._random.randrange(10_000))

    def body(self, tokens: Sequence[int], num_tokens: int) -> dict[str, Any]:
        """Return a request whose answer has exactly `num_tokens` tokens."""
        return {
            "model": self._model,
            "prompt": list(tokens),
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "specprefill": False,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": False},
        }


def _measure(server: Connection, prompts: Prompts, load: Load, num_rounds: int) -> Result:
    rounds = [_round(server, prompts, load) for _ in range(num_rounds + 1)][1:]  # the first one is the warm-up
    samples = [sample for samples, *_ in rounds for sample in samples]
    return Result(
        load,
        Figure.of([pp for _, pp, _ in rounds]),
        Figure.of([tg for _, _, tg in rounds]),
        Figure.of([(one.num_tokens - 1) / (one.seconds - one.first_token_s) for one in samples]),
        Figure.of([1e3 * one.first_token_s for one in samples]),
        min(one.num_cached for one in samples),
    )


def _round(server: Connection, prompts: Prompts, load: Load) -> tuple[list[Sample], float, float]:
    """Send the requests of one round together; return them, and the tokens per second of prompts and of answers."""
    contexts = [prompts.make(load.depth) if load.depth else [] for _ in range(load.concurrency)]
    for context in contexts:
        if context:
            _read(server.stream("/v1/completions", prompts.body(context, 2)))
    asked = [[*context, *prompts.make(load.pp)] for context in contexts]
    start = threading.Barrier(load.concurrency)
    with ThreadPoolExecutor(load.concurrency) as pool:
        jobs = [pool.submit(_ask, server, prompts.body(tokens, load.tg), start) for tokens in asked]
        samples = [job.result() for job in jobs]
    first_s, end_s = max(one.first_token_s for one in samples), max(one.seconds for one in samples)
    computed = sum(one.num_prompt - one.num_cached for one in samples)
    num_later = sum(one.num_tokens - 1 for one in samples)
    return samples, computed / first_s, num_later / (end_s - min(one.first_token_s for one in samples))


def _ask(server: Connection, body: dict[str, Any], start: threading.Barrier) -> Sample:
    start.wait()
    began, first_token_s, usage = time.monotonic(), None, {}
    for event in server.stream("/v1/completions", body):
        if first_token_s is None:
            first_token_s = time.monotonic() - began
        usage = event.get("usage") or usage
    seconds = time.monotonic() - began
    assert first_token_s is not None
    if usage.get("completion_tokens") != body["max_tokens"]:
        raise CommandError(f"an answer has {usage.get('completion_tokens')} tokens instead of {body['max_tokens']}")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Sample(first_token_s, seconds, usage["prompt_tokens"], cached, usage["completion_tokens"])


def _read(events: Iterator[Any]) -> None:
    for _ in events:
        pass


def _row(result: Result) -> list[object]:
    load = result.load
    figures = (
        result.pp_tokens_per_s,
        result.tg_tokens_per_s,
        result.tg_tokens_per_s_per_request,
        result.first_token_ms,
    )
    return [load.pp, load.tg, load.depth, result.num_cached, load.concurrency, *figures]
