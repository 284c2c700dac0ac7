"""The time that tools, the split of thoughts and grammars add to the time to first token and to the time per token.

    uv run python -m tests.benchmarks.faces_bench --rounds 5

Starts its own server, unless --url names one. Each arm has a control: plain chat whose prompt has as many tokens and
whose answer is the same or as long. One request runs at a time; every round sends all arms and controls --repeats times
in an order of its own. No prompt is in the prefix cache. A figure of a round is the median of its repeats; `added` is
arm minus control, within the round.

tools: chat with four tools, tool_choice auto, which answers with text; control: the same text of the tools as a system
message. reasoning: thinking on; control: thinking off (the answers differ in their thoughts). schema: an answer by
json_schema; control: the same question, answered with the same JSON freely. schema, new: the schema was never seen
before, so that its grammar is compiled.
"""

import argparse
import contextlib
import itertools
import json
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.benchmarks.measure import Spread, heading, provenance, table
from tests.e2e.server import serve_run
from tests.support.sse import Answer, answer, completions_url, exchange, post, run

TIMEOUT_S = 120.0
MAX_TOKENS = 96
STORY = "Tell me a story about a fox."
PERSON = "Emma is 31 years old. Emma lives in Oslo. Emma works as a baker. Emma likes green. Emma has a cat."
KEYS = {"name": "string", "age": "integer", "city": "string", "job": "string", "color": "string", "pet": "string"}
JSON_QUESTION = f"Answer with JSON only. Keys: {', '.join(KEYS)}.\n\n{PERSON}"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {name: {"type": kind} for name, kind in KEYS.items()},
    "required": list(KEYS),
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": {field: {"type": kind}}, "required": [field]},
        },
    }
    for name, description, field, kind in (
        ("get_weather", "Get the weather for a city", "city", "string"),
        ("set_timer", "Start a timer in minutes", "minutes", "integer"),
        ("read_file", "Read a file", "path", "string"),
        ("search", "Search the web", "query", "string"),
    )
]
TOOL_HELP = (
    "\n</tools>\nTo use a tool, answer in this form:\n<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n"
    "</parameter>\n</function>\n</tool_call>"
)
"""The end of the demo model's text about tools (chat_template.jinja)."""

CONTROLS = {"tools": "tools as text", "reasoning": "plain", "schema": "JSON, free", "schema, new": "JSON, free"}


def tools_as_text() -> str:
    return "# Tools\n<tools>" + "".join("\n" + json.dumps(tool) for tool in TOOLS) + TOOL_HELP


def by_schema(title: str) -> dict[str, Any]:
    schema = {"name": "person", "strict": True, "schema": {"title": title, **SCHEMA}}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def user(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def fields_of(arm: str, number: int) -> dict[str, Any]:
    """number: of the request, for what must be new."""
    if arm == "tools as text":
        return {"messages": [{"role": "system", "content": tools_as_text()}, *user(STORY)["messages"]]}
    return {
        "plain": lambda: user(STORY),
        "tools": lambda: {**user(STORY), "tools": TOOLS, "tool_choice": "auto"},
        "reasoning": lambda: {**user(STORY), "reasoning_effort": "high"},
        "JSON, free": lambda: user(JSON_QUESTION),
        "schema": lambda: {**user(JSON_QUESTION), **by_schema("person")},
        "schema, new": lambda: {**user(JSON_QUESTION), **by_schema(f"person {number}")},
    }[arm]()


class Server:
    """base: without /v1."""

    def __init__(self, base: str, salt: str):
        self._url = completions_url(f"{base}/v1")
        self._model = httpx.get(f"{base}/v1/models").raise_for_status().json()["data"][0]["id"]
        self._salt = salt
        self._numbers: Iterator[int] = itertools.count()

    def ask(self, arm: str) -> Answer:
        """Raises RuntimeError if there is no whole answer."""
        number = next(self._numbers)
        body = {"model": self._model, "temperature": 0, "max_tokens": MAX_TOKENS, "stream": True}
        body |= {"stream_options": {"include_usage": True}, "cache_salt": f"{self._salt} {number}"}
        request = post(self._url, {**body, **fields_of(arm, number)})
        found = answer(run(exchange(self._url, request, TIMEOUT_S)))
        if found.error is not None:
            raise RuntimeError(f"{arm}: {found.error}")
        return found


def measure(server: Server, num_rounds: int, num_repeats: int, rng: random.Random) -> dict[str, list[dict[str, float]]]:
    """The figures of each arm, by round."""
    arms = list({*CONTROLS, *CONTROLS.values()})
    for arm in arms:
        server.ask(arm)  # warms up
    rounds: dict[str, list[dict[str, float]]] = defaultdict(list)
    for _ in range(num_rounds):
        answers: dict[str, list[Answer]] = defaultdict(list)
        for arm in rng.sample(arms * num_repeats, len(arms) * num_repeats):
            answers[arm].append(server.ask(arm))
        for arm, found in answers.items():
            rounds[arm].append(figures(found))
    return rounds


def figures(answers: list[Answer]) -> dict[str, float]:
    """Medians, in milliseconds and tokens."""
    return {
        "ttft": statistics.median(1e3 * found.ttft_s for found in answers),
        "tpot": statistics.median(1e3 * (found.tpot_s or 0.0) for found in answers),
        "prompt": statistics.median(found.num_prompt_tokens for found in answers),
        "output": statistics.median(found.num_output_tokens for found in answers),
    }


def added(arm: list[dict[str, float]], control: list[dict[str, float]], figure: str) -> Spread:
    return Spread.of([mine[figure] - its[figure] for mine, its in zip(arm, control, strict=True)])


def report(rounds: dict[str, list[dict[str, float]]]) -> list[list[str]]:
    rows = []
    for arm, control in CONTROLS.items():
        for name in (control, arm):
            found = rounds[name]
            ttft, tpot = (Spread.of([figures[figure] for figures in found]) for figure in ("ttft", "tpot"))
            more = [
                f"{added(found, rounds[control], figure):.2f}" if name == arm else "" for figure in ("ttft", "tpot")
            ]
            rows.append(
                [name, f"{found[0]['prompt']:.0f}", f"{found[0]['output']:.0f}", f"{ttft:.1f}", f"{tpot:.2f}", *more]
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a running server, without /v1; default: one of its own")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5, help="requests of each arm in a round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        base = args.url
        if base is None:
            server = stack.enter_context(serve_run())
            server.wait_complete()
            stack.callback(server.stop)
            base = server.base_url
        rng = random.Random(args.seed)
        rounds = measure(Server(base, f"faces {rng.random()}"), args.rounds, args.repeats, rng)
    print(
        heading(f"faces_bench --rounds {args.rounds} --repeats {args.repeats}: ms, median [lowest highest] of rounds")
    )
    columns = ("arm", "prompt", "output", "to first token", "per token", "added to first", "added per token")
    print(table(columns, report(rounds)))
    if args.json:
        args.json.write_text(json.dumps({"provenance": provenance(), "rounds": rounds}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
