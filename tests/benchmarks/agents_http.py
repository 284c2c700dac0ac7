"""Agents' conversations through HTTP in a memory that holds fewer of them: how much of each prompt is computed again.

    uv run python -m tests.benchmarks.agents_http --agents 4 --room 3 --turns 20

Starts its own server with the demo model, whose memory is limited so that the rows of --room conversations fit at
their end; --disk adds a disk tier to its prefix cache. All agents work at the same time: each sends its next turn
--think seconds after its answer. They share a system prompt; a turn adds about --new tokens to what was said, and the
answer takes --answer tokens. A request that is refused because the queue is full or late is sent again.

computed/new: prompt tokens that were not in the prefix cache, per prompt token that is new. New are the tokens behind
the prompt of the turn before, so the last answer is new as well: a server that keeps answers gets below 1. First turns
do not count.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import httpx  # isort: skip

from engine.config import EngineConfig
from engine.core.memory.costs import MemoryCosts
from engine.worker.model_runner import load_runner
from tests.benchmarks.measure import heading, percentile, provenance, table
from tests.e2e.server import serve_run

SYSTEM_WORDS, OPEN_WORDS = 300, 400
WORDS = (
    "red",
    "blue",
    "green",
    "house",
    "tree",
    "river",
    "stone",
    "bird",
    "fish",
    "road",
    "lamp",
    "door",
    "book",
    "rain",
)
TIMEOUT_S, RETRY_S = 600.0, 1.0
HEADROOM_GB = 0.1
CHUNK_TOKENS = 64
"""Prompt tokens whose intermediate results have room beside the rows."""


@dataclass
class Turn:
    """The figures of one answered request."""

    num_prompt: int
    num_cached: int
    num_output: int
    seconds: float


@dataclass
class Agent:
    """One conversation."""

    name: str
    rng: random.Random
    messages: list[dict[str, str]]
    turns: list[Turn] = field(default_factory=list)
    num_retries: int = 0

    async def work(self, client: httpx.AsyncClient, url: str, args: argparse.Namespace) -> None:
        for _ in range(args.turns):
            reply = await self._ask(client, url, args.answer)
            self.messages.append({"role": "assistant", "content": reply})
            self.messages.append({"role": "user", "content": words(self.rng, args.new)})
            await asyncio.sleep(args.think)

    async def _ask(self, client: httpx.AsyncClient, url: str, answer: int) -> str:
        body = {
            "model": "demo",
            "messages": self.messages,
            "max_tokens": answer,
            "ignore_eos": True,
            "temperature": 0,
            "user": self.name,
            "specprefill": False,
            "chat_template_kwargs": {"enable_thinking": False},
        }
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            response = await client.post(url, json=body)
            if response.status_code in (429, 503):
                self.num_retries += 1
                await asyncio.sleep(RETRY_S)
                continue
            response.raise_for_status()
            found = response.json()
            usage = found["usage"]
            num_cached = usage["prompt_tokens_details"]["cached_tokens"]
            seconds = loop.time() - began_s
            self.turns.append(Turn(usage["prompt_tokens"], num_cached, usage["completion_tokens"], seconds))
            return found["choices"][0]["message"]["content"]


def words(rng: random.Random, num_tokens: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(num_tokens))


def make_agents(num_agents: int, seed: int) -> list[Agent]:
    rng = random.Random(seed)
    system = {"role": "system", "content": words(rng, SYSTEM_WORDS)}
    agents = []
    for i in range(num_agents):
        own = random.Random(rng.random())
        agents.append(Agent(f"agent{i}", own, [system, {"role": "user", "content": words(own, OPEN_WORDS)}]))
    return agents


def limit_gb(costs: MemoryCosts, room: int, num_tokens: int) -> float:
    """Return a memory limit under which so many rows of so many tokens fit, with the chunks of a prompt."""
    rows = costs.rows(room, costs.slots(num_tokens + costs.overshoot))
    step = max(costs.chunk(CHUNK_TOKENS, num_tokens), costs.layer(room, costs.slots(num_tokens)))
    return (costs.base_bytes + rows + step) / 2**30 + HEADROOM_GB


def demo_costs() -> MemoryCosts:
    runner = load_runner(EngineConfig(model="demo"), lambda part: None)
    try:
        return runner.costs
    finally:
        runner.close()


def figures(agents: list[Agent]) -> dict[str, float]:
    num_computed = num_new = 0
    for agent in agents:
        for before, turn in zip(agent.turns, agent.turns[1:], strict=False):
            num_computed += turn.num_prompt - turn.num_cached
            num_new += turn.num_prompt - before.num_prompt
    later = [turn.seconds for agent in agents for turn in agent.turns[1:]]
    return {
        "computed_per_new": num_computed / num_new,
        "num_new": num_new,
        "longest_prompt": max(turn.num_prompt for agent in agents for turn in agent.turns),
        "turn_s_p50": statistics.median(later),
        "turn_s_p99": percentile(later, 99),
        "num_retries": sum(agent.num_retries for agent in agents),
    }


async def run(base_url: str, agents: list[Agent], args: argparse.Namespace) -> None:
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
        url = f"{base_url}/v1/chat/completions"
        await asyncio.gather(*(agent.work(client, url, args) for agent in agents))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--room", type=int, default=3, help="conversations whose rows fit in memory at their end")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--new", type=int, default=100, help="words of a turn, about one token each")
    parser.add_argument("--answer", type=int, default=40, help="tokens of an answer")
    parser.add_argument("--think", type=float, default=0.0, help="seconds between an answer and the next turn")
    parser.add_argument("--disk", type=float, default=0.0, help="GB of the prefix cache's disk tier; 0 for none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    args = parser.parse_args()
    num_tokens = SYSTEM_WORDS + OPEN_WORDS + args.turns * (args.new + args.answer + 12)
    limit = limit_gb(demo_costs(), args.room, num_tokens)

    def change(config: dict[str, Any]) -> None:
        engine = config["applications"][0]["args"]["engine"]
        memory = {"limit_gb": limit, "headroom_gb": HEADROOM_GB, "reserve_tokens": args.answer}
        engine.update(memory=memory, vision_cache_mb=0)
        if args.disk:
            engine.setdefault("prefix_cache", {})["disk"] = {"path": disk_path, "max_gb": args.disk}

    agents = make_agents(args.agents, args.seed)
    with tempfile.TemporaryDirectory() as disk_path, serve_run(change) as server:
        server.wait_complete()
        asyncio.run(run(server.base_url, agents, args))
        status = httpx.get(f"{server.base_url}/v1/status", timeout=60).json()
        server.stop()
    found = figures(agents)
    print(heading(f"agents_http: {args.agents} agents, {args.turns} turns, memory for {args.room} ({limit:.2f} GB)"))
    print(table(tuple(found), [[f"{value:.2f}" for value in found.values()]]))
    if args.json:
        args.json.write_text(json.dumps({"provenance": provenance(), "figures": found, "status": status}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
