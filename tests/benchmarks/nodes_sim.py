"""Several engines behind one ingress: which of them gets a request, and what that is worth to agents.

    uv run python -m tests.benchmarks.nodes_sim --machine 27B-4bit/64GB --nodes 2 --agents 8 --arm quotes --seeds 10-14

Each node is a real EngineCore over a virtual clock (sim_runner.py), with its own Quoter; the ingress is the Placement
of deployments/placement. Agents are those of agents_sim.py: 60,000 tokens, 20,000 of which all share, 2,500 more per
turn, 12 turns. The ingress knows the length of a prompt to 5 %, and not how long a conversation will become. Arms:

calls: the node with the fewest open requests, ties at random.
hash: the first node of the conversation by rendezvous, whatever its load.
quotes: candidates are asked, the one with the fewest seconds is booked.

The columns: turns that were answered per hour; the same over that of one node with its share of the agents; TTFT of
later turns; computed/new as in agents_sim.py, of later turns; turns that were computed on another node than the turn
before; questions and bookings per request.

    uv run python -m tests.benchmarks.nodes_sim --simple --nodes 10 --nodes 100 --nodes 1000 --seeds 10-14

Simple nodes (simple_nodes/) instead: no EngineCore, but a queue, a prefix cache with LRU and a pace, and the engine's
quotes and bookings, so that a thousand nodes take minutes. Each node has an ingress with a memory of its own, and each
request goes to a random one. Loads, per node of the machine: agents (three), full (four, which fill the memory), chats
(one-shot, of twenty applications with a system part each), documents (30 to 100 thousand tokens and one to five
questions), mix. Faults: stale (quotes and bookings act a second later), lost (5 % of the questions and of the
bookings), joins, dies, drains (a tenth of the nodes). The columns:

cached: prompt tokens that were cached where they were computed, of those that could be, which are the turn before with
  its answer if its node is there, else the system part if any node has computed it; in brackets, of later turns only.
busiest / mean: of the seconds in which a node works, relative to those in which it exists; in brackets the worst seed.
computed/new: prompt tokens that were computed, per prompt token that no request had sent.
TTFT: of later turns and chats. moved: turns on another node than the turn before.
messages: questions and bookings per request. most asked / mean: the same for the questions that a node gets.

A second table: CPU time of placing one request that asks all it may, without keys and calls.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from heapq import heappop, heappush
from itertools import count, cycle, islice, product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from deployments.placement.place import NodeFacts, Placement
from deployments.placement.rendezvous import Rendezvous
from engine.core.prefill_executor import PrefillExecutor
from engine.placement import ConversationKeys, Question
from engine.protocol import FinishReason, TokenChunk
from tests.benchmarks.agents_sim import OPEN_TOKENS, Agents
from tests.benchmarks.measure import heading, percentile, provenance, table
from tests.benchmarks.sim_runner import (
    FIGURES_PERIOD_S,
    GIB,
    MAC_4B,
    MACHINES,
    MAX_S,
    STOP,
    VOCAB_SIZE,
    Ask,
    Machine,
    Simulation,
)
from tests.benchmarks.simple_nodes import placement_timing
from tests.benchmarks.simple_nodes.cluster import FAULTS
from tests.benchmarks.simple_nodes.figures import COLUMNS as SIMPLE_COLUMNS
from tests.benchmarks.simple_nodes.figures import figures as simple_figures
from tests.benchmarks.simple_nodes.figures import line as simple_line
from tests.benchmarks.simple_nodes.loads import LOADS
from tests.support.clock import Clock

ARMS = ("calls", "hash", "quotes")
MAX_TURN_KEYS = 15
ESTIMATE_ERROR = 0.05
"""By how much the ingress' estimate of a prompt's tokens may be wrong."""


class Node(Simulation):
    """One engine; requests come from the ingress."""

    def __init__(self, name: str, machine: Machine, route: Callable[[Ask, Callable[[Ask], None], float], None]):
        super().__init__(machine, {})
        self.name = name
        self._route = route

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def facts(self) -> NodeFacts:
        core = self.core
        room, pace_s = core.budget.needs.request_bytes, core.costs.prompt_s(0, 2048)
        return NodeFacts(self.name, room, core.runner.max_context_tokens, pace_s=pace_s)

    def take(self, ask: Ask, then: Callable[[Ask], None], now: float) -> None:
        """Take a request of the ingress."""
        self.clock.now_s = max(self.clock.now_s, now)
        self._send(ask, then)

    def _ended(self, ask: Ask, chunk: TokenChunk, then: Callable[[Ask], None]) -> None:
        if chunk.finish_reason is FinishReason.EXPIRED and ask.retries:
            ask.retries -= 1
            self._route(ask, then, self.clock.now_s + (chunk.retry_after_s or 1.0))
            return
        super()._ended(ask, chunk, then)


class Cluster:
    """Nodes in one virtual time, their ingress, and their clients."""

    def __init__(self, machines: Sequence[Machine], arm: str, seed: int):
        self.machine = machines[0]
        self.clock = Clock(0.0)
        self.random = np.random.default_rng(seed)
        self.nodes = {f"node{i}": Node(f"node{i}", machine, self._again) for i, machine in enumerate(machines)}
        self.asks: list[Ask] = []
        self.num_messages = self.num_moved = 0
        self.num_placed = Counter[str]()
        self._arm = arm
        self._rng = random.Random(seed)
        self._keys: dict[str, ConversationKeys] = {}  # by conversation, of its last turn
        self._last: dict[str, str] = {}
        self._placement = Placement()
        self._placement.update(node.facts for node in self.nodes.values())
        self._rendezvous = Rendezvous(dict.fromkeys(self.nodes, 1.0))
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = count()

    def tokens(self, num_tokens: int) -> np.ndarray:
        """Return random token ids, none of them STOP."""
        return self.random.integers(STOP + 1, VOCAB_SIZE, num_tokens, dtype=np.int32)

    def ask_at(self, time_s: float, ask: Ask, then: Callable[[Ask], None] = lambda ask: None) -> None:
        """Send the request at this time; `then` is called when it has ended for good."""
        self.asks.append(ask)
        ask.keys = self._keys_of(ask)
        ask.arrived_s = time_s
        self._again(ask, then, time_s)

    def run(self) -> None:
        """Until no request is open and none will come."""
        with (
            patch("engine.core.engine_core.FIGURES_PERIOD_S", FIGURES_PERIOD_S),
            patch.object(PrefillExecutor, "_device_s", _device_s),
        ):
            while True:
                busy = min((one for one in self.nodes.values() if one.core.has_work), key=_now, default=None)
                next_s = self._events[0][0] if self._events else MAX_S
                if busy is not None and _now(busy) < next_s:
                    self.clock.now_s = _now(busy)
                    busy.step()
                    self.clock.now_s = _now(busy)  # follow-ups of what it has published come after that
                elif next_s < MAX_S:
                    self.clock.now_s = next_s
                    heappop(self._events)[2]()
                else:
                    return

    def _again(self, ask: Ask, then: Callable[[Ask], None], time_s: float) -> None:
        heappush(self._events, (time_s, next(self._serial), lambda: self._send(ask, then)))

    def _send(self, ask: Ask, then: Callable[[Ask], None]) -> None:
        name = {"calls": self._by_calls, "hash": self._by_hash, "quotes": self._by_quotes}[self._arm](ask)
        self.num_moved += ask.turn > 0 and self._last[ask.conversation] != name
        self._last[ask.conversation] = name
        self.num_placed[name] += 1
        self.nodes[name].take(ask, then, self.clock.now_s)

    def _by_calls(self, ask: Ask) -> str:
        fewest = min(node.num_open for node in self.nodes.values())
        return self._rng.choice([name for name, node in self.nodes.items() if node.num_open == fewest])

    def _by_hash(self, ask: Ask) -> str:
        assert ask.keys is not None
        return self._rendezvous.ranked(ask.keys.conversation, 1)[0]

    def _by_quotes(self, ask: Ask) -> str:
        assert ask.keys is not None
        num_tokens = int(len(ask.token_ids) * self._rng.uniform(1 - ESTIMATE_ERROR, 1 + ESTIMATE_ERROR))
        question = Question(f"q{next(self._serial)}", ask.keys, num_tokens, max_tokens=ask.max_tokens)
        quotes = {name: self._quoter(name).quote(question) for name in self._placement.candidates(question)}
        quotes |= {name: self._quoter(name).quote(question) for name in self._placement.more(question, quotes)}
        name = self._placement.choose(question, quotes)
        assert name is not None
        refused = self._quoter(name).book(question)
        assert refused is None, "nothing has happened since the quote"
        self._placement.placed(question, name)
        self._quoter(name).bookings.remove(question.request_id)  # the request itself follows at once
        self.num_messages += len(quotes) + 1
        return name

    def _quoter(self, name: str) -> Any:
        node = self.nodes[name]
        if not node.core.has_work:
            node.clock.now_s = max(node.clock.now_s, self.clock.now_s)
        return node.core.quoter

    def _keys_of(self, ask: Ask) -> ConversationKeys:
        """Return the keys of a request: hashes of its token prefixes at the end of the system part and of each turn."""
        whole, before = _hash(ask.token_ids), self._keys.get(ask.conversation)
        if before is None or not ask.turn:
            keys = ConversationKeys(_hash(ask.token_ids[: ask.num_system]), whole, (whole,))
        else:
            keys = replace(before, turns=(whole, *before.turns)[:MAX_TURN_KEYS])
        self._keys[ask.conversation] = keys
        return keys


def _device_s(prefill: PrefillExecutor, began_s: float, in_flight_s: float) -> float:
    """Replace PrefillExecutor._device_s: the simulated device has ended its decode step when a chunk begins."""
    return prefill._clock() - began_s


def _now(node: Node) -> float:
    return node.clock.now_s


def _hash(token_ids: np.ndarray) -> int:
    return int.from_bytes(blake2b(np.ascontiguousarray(token_ids).data, digest_size=8).digest(), "little")


def faster(machine: Machine, name: str, memory_bytes: int, factor: float) -> Machine:
    """Return a machine that is faster in everything, with so much memory."""
    figures = ("chunk_s", "token_s", "pair_s", "weights_s", "row_s", "draft_s")
    seconds = {figure: getattr(machine, figure) / factor for figure in figures}
    return replace(machine, name=name, memory_bytes=memory_bytes, bandwidth=factor * machine.bandwidth, **seconds)


UNLIKE = {
    MAC_4B: 1,
    faster(MAC_4B, "4B-4bit/64GB", 48 * GIB, 4.0): 4,
    faster(MAC_4B, "4B-4bit/512GB", 384 * GIB, 8.0): 8,
}
"""Unlike Macs with one model, and the agents that keep each of them busy."""


@dataclass(frozen=True)
class Scenario:
    """Nodes and the agents that work on them."""

    machines: tuple[Machine, ...]
    num_agents: int
    turns: int = 12
    think_s: float = 2.0

    def run(self, arm: str, seed: int) -> Cluster:
        """Agents begin one after the other, in the time in which the nodes compute their first prompts."""
        cluster = Cluster(self.machines, arm, seed)
        client: Any = cluster
        agents = Agents(client, self.turns, self.think_s)
        pace = sum(1 / machine.prompt_seconds(OPEN_TOKENS) for machine in self.machines)
        begins_s = 0.0
        for i in range(self.num_agents):
            cluster.ask_at(begins_s, agents.open(f"agent{i}"), agents.think)
            begins_s += 1.1 / pace * float(cluster.random.uniform(0.5, 1.5))
        cluster.run()
        return cluster


def figures(scenario: Scenario, arm: str, seed: int) -> dict[str, Any]:
    """Run a scenario and return its figures; see the head of the file."""
    began_s = time.process_time()
    cluster = scenario.run(arm, seed)
    answered = [ask for ask in cluster.asks if ask.is_answered]
    later = [ask for ask in answered if ask.turn]
    waits = [ask.first_s - ask.arrived_s for ask in later]
    by_node = {
        name: sum(chunk.num_tokens for chunk in node.runner.chunks if node.ask_of(chunk).turn)
        for name, node in cluster.nodes.items()
    }
    elapsed_s = max(node.clock.now_s for node in cluster.nodes.values())
    return {
        "arm": arm,
        "seed": seed,
        "num_nodes": len(cluster.nodes),
        "num_agents": scenario.num_agents,
        "turns_per_h": 3600 * len(answered) / elapsed_s,
        "ttft_p50_s": percentile(waits, 50),
        "ttft_mean_s": float(np.mean(waits)) if waits else 0.0,
        "ttft_p99_s": percentile(waits, 99),
        "computed_per_new": sum(by_node.values()) / max(1, sum(ask.num_new for ask in later)),
        "num_moved": cluster.num_moved,
        "messages": cluster.num_messages / max(1, len(cluster.asks)),
        "num_unanswered": len(cluster.asks) - len(answered),
        "elapsed_s": elapsed_s,
        "placed": dict(sorted(cluster.num_placed.items())),
        "cpu_s": time.process_time() - began_s,
    }


COLUMNS = (
    "machine", "nodes / agents", "arm", "turns/h", "× one node", "TTFT p50 / mean / p99, s", "computed/new", "moved",
    "messages", "requests by node",
)  # fmt: skip


def line(name: str, found: Sequence[dict[str, Any]], one_node: float) -> list[str]:
    """Return a row of the table: the means over seeds, and the range of the turns."""

    def mean(figure: str) -> float:
        return float(np.mean([each[figure] for each in found]))

    turns = [each["turns_per_h"] for each in found]
    spread = f" [{min(turns):.0f}–{max(turns):.0f}]" if len(turns) > 1 else ""
    return [
        name,
        f"{found[0]['num_nodes']} / {found[0]['num_agents']}",
        found[0]["arm"],
        f"{mean('turns_per_h'):.1f}{spread}",
        f"{mean('turns_per_h') / one_node:.2f}",
        f"{mean('ttft_p50_s'):.1f} / {mean('ttft_mean_s'):.1f} / {mean('ttft_p99_s'):.0f}",
        f"{mean('computed_per_new'):.2f}",
        f"{mean('num_moved'):.0f}",
        f"{mean('messages'):.1f}" if found[0]["arm"] == "quotes" else "–",
        " | ".join("/".join(str(num) for num in each["placed"].values()) for each in found),
    ]


SHARE_COLUMNS = ("arm", "machine", "alone, turns/h", "share", "share of the requests beside the others", "off by")


def shares(arms: Sequence[str], seeds: Sequence[int], turns: int) -> list[list[str]]:
    """Return the rows of the table of unlike nodes: of all requests, each gets the share that it answers alone."""
    alone = [figures(Scenario((one,), num, turns), "quotes", seeds[0])["turns_per_h"] for one, num in UNLIKE.items()]
    rows = []
    for arm in arms:
        together = Scenario(tuple(UNLIKE), sum(UNLIKE.values()), turns)
        found = [figures(together, arm, seed) for seed in seeds]
        placed = np.array([[each["placed"].get(f"node{i}", 0) for i in range(len(UNLIKE))] for each in found])
        got = placed.sum(axis=0) / placed.sum()
        turns_per_h = float(np.mean([each["turns_per_h"] for each in found]))
        for machine, one, part in zip(UNLIKE, alone, got, strict=True):
            share = one / sum(alone)
            off = f"{100 * (part / share - 1):+.0f} %"
            rows.append([arm, machine.name, f"{one:.0f}", f"{100 * share:.0f} %", f"{100 * part:.0f} %", off])
        rows.append([arm, "all", f"{sum(alone):.0f}", "", f"{turns_per_h:.0f} turns/h", ""])
    return rows


TIMED_NODES = (3, 64, 1000)


def run_simple(args: argparse.Namespace) -> None:
    """Print and write the figures of simple nodes."""
    rows, report = [], []
    kinds = tuple(UNLIKE) if args.unlike else (MACHINES[args.machine],)
    for num_nodes in args.nodes or [10]:
        machines = list(islice(cycle(kinds), num_nodes))
        for load, fault in product(args.load or LOADS, args.fault or [""]):
            found = [simple_figures(machines, load, fault, seed) for seed in args.seeds]
            rows.append(simple_line(found))
            report += found
            print(*rows[-1], f"CPU {sum(each['cpu_s'] for each in found):.0f} s", sep="  ", file=sys.stderr)
    name = "unlike nodes" if args.unlike else args.machine
    print(heading(f"nodes_sim --simple, {name}, seeds {args.seeds}, virtual seconds"))
    print(table(SIMPLE_COLUMNS, rows))
    print(table(placement_timing.COLUMNS, [placement_timing.timing(num) for num in TIMED_NODES]))
    write_json(args.json, report)


def write_json(path: Path | None, report: list[dict[str, Any]]) -> None:
    if path is not None:
        path.write_text(json.dumps({"provenance": provenance(), "figures": report}, indent=1))


def seeds_of(text: str) -> list[int]:
    first, _, last = text.partition("-")
    return list(range(int(first), int(last or first) + 1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", choices=list(MACHINES), default="27B-4bit/64GB")
    parser.add_argument(
        "--nodes", type=int, action="append", help="default: 2; several with --agents of the same number"
    )
    parser.add_argument("--agents", type=int, action="append", help="default: 8")
    parser.add_argument("--arm", choices=ARMS, action="append", help="default: all")
    parser.add_argument("--seeds", type=seeds_of, default=[0], help="such as 0-2")
    parser.add_argument("--turns", type=int, default=12, help="of each agent's conversation")
    parser.add_argument("--unlike", action="store_true", help="a 16, a 64 and a 512 GB Mac: each alone, then together")
    parser.add_argument("--one-node", type=float, help="turns/h of one node with its share of the agents")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--simple", action="store_true", help="simple nodes, with --load and --fault")
    parser.add_argument("--load", choices=list(LOADS), action="append", help="default: all")
    parser.add_argument("--fault", choices=[fault for fault in FAULTS if fault], action="append", help="default: none")
    args = parser.parse_args()
    if args.simple:
        run_simple(args)
        return 0
    rows, report, machine = [], [], MACHINES[args.machine]
    if args.unlike:
        print(heading(f"nodes_sim --unlike, {args.turns} turns, seeds {args.seeds}, virtual seconds"))
        print(table(SHARE_COLUMNS, shares(args.arm or list(ARMS), args.seeds, args.turns)))
        return 0
    for num_nodes, num_agents in zip(args.nodes or [2], args.agents or [8], strict=True):
        for arm in args.arm or ARMS:
            scenario = Scenario((machine,) * num_nodes, num_agents, args.turns)
            found = [figures(scenario, arm, seed) for seed in args.seeds]
            rows.append(line(machine.name, found, args.one_node or 1.0))
            report += found
            print(*rows[-1], f"CPU {sum(each['cpu_s'] for each in found):.0f} s", sep="  ", file=sys.stderr)
    print(heading(f"nodes_sim, {args.turns} turns, seeds {args.seeds}, virtual seconds"))
    print(table(COLUMNS, rows))
    write_json(args.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
