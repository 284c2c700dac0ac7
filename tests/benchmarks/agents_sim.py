"""The cost of the engine's policy: the real EngineCore under loads of agents, with a virtual clock instead of a model.

    uv run python -m tests.benchmarks.agents_sim --machine 27B-4bit/64GB --load circle --turns 12

Scheduler, memory budget, prefix cache and draft controller are the engine's own. Only the runner is a clock
(sim_runner.py): hours take seconds, and two runs give the same figures. Prompts are token ids: an agent's prompt is a
system part of 20,000 tokens that all agents share, then its own conversation. Each turn appends the very tokens of the
last answer (500) and 2,000 new ones. The columns:

computed/new: prompt tokens that the device computed, per prompt token that is new. New are the tokens of a prompt
  behind the prompt of the turn before, so the last answer is new (today it is prefilled again; an engine that keeps
  answers gets below 1). The system part is new once for all agents. Later turns only, where there are any; else all
  requests that got a token.
again: prompt tokens that a request had computed, restored or decoded already when it lost its place (preempted, or its
  prefill was given up) or expired, in per cent of the new tokens of all requests.
lost: device seconds spent on tokens that the same conversation had computed as prompt tokens before, or, of the system
  part, any conversation, or the same request before it lost its place.
expired: attempts that ended with a 503. Agents send the request again; its TTFT counts from the first attempt.
TTFT: seconds from the time at which the client sends the request to its first token.
"""

import argparse
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.protocol import FinishReason
from tests.benchmarks.measure import heading, percentile, provenance, table
from tests.benchmarks.sim_runner import GIB, MACHINES, Ask, Chunk, Machine, Simulation

SYSTEM_TOKENS, OPEN_TOKENS, ANSWER_TOKENS, NEW_TOKENS = 20_000, 60_000, 500, 2_000
MAX_RETRIES = 10
SIDE_TOKENS, SIDE_ANSWER_TOKENS, SIDE_PERIOD_S = (50, 500), 100, 10.0


class Agents:
    """Agents that share a system part and take turns with their tools."""

    def __init__(self, sim: Simulation, turns: int, think_s: float):
        self._sim = sim
        self._turns = turns
        self._think_s = think_s
        self._system = sim.tokens(SYSTEM_TOKENS)
        self._is_system_sent = False

    def open(self, name: str) -> Ask:
        """Return the first request of a conversation."""
        own = self._sim.tokens(OPEN_TOKENS - SYSTEM_TOKENS)
        ask = self._ask(name, np.concatenate([self._system, own]), SYSTEM_TOKENS if self._is_system_sent else 0, 0)
        self._is_system_sent = True
        return ask

    def next(self, ask: Ask) -> Ask | None:
        """Return the conversation's next request, None behind its last turn or where the last one failed."""
        if not ask.is_answered or ask.turn + 1 >= self._turns:
            return None
        answer = np.array(ask.output, np.int32)
        token_ids = np.concatenate([ask.token_ids, answer, self._sim.tokens(NEW_TOKENS)])
        return self._ask(ask.conversation, token_ids, len(ask.token_ids), ask.turn + 1)

    def think(self, ask: Ask) -> None:
        """Send the conversation's next request after a while."""
        after = self.next(ask)
        if after is not None:
            self._sim.ask_at(self._sim.clock.now_s + self._think_s, after, self.think)

    def _ask(self, name: str, token_ids: np.ndarray, num_before: int, turn: int) -> Ask:
        return Ask(
            "turn" if turn else "open",
            name,
            token_ids,
            self._sim.tokens(ANSWER_TOKENS).tolist(),
            num_before,
            SYSTEM_TOKENS,
            turn,
            client=name,
            retries=MAX_RETRIES,
        )


def short(sim: Simulation, kind: str, number: int, num_prompt: int, num_answer: int, **fields: Any) -> Ask:
    """Return a request that has nothing in common with others."""
    answer = sim.tokens(num_answer).tolist()
    return Ask(kind, f"{kind}{number}", sim.tokens(num_prompt), answer, max_tokens=num_answer, **fields)


@dataclass(frozen=True)
class Load:
    """The behaviour of the clients."""

    turns: int = 12
    """Turns of each agent; loads without agents last longer with more turns."""
    think_s: float = 2.0
    """Seconds between an agent's answer and its next request."""
    has_disk: bool = False
    """Whether the prefix cache has a disk tier."""

    def config(self, machine: Machine) -> dict[str, Any]:
        """Return the fields of EngineConfig that are not the default."""
        return {}

    def start(self, sim: Simulation) -> None:
        """Send the first requests; all others follow from them."""
        raise NotImplementedError

    def own_figures(self, sim: Simulation) -> dict[str, float]:
        """Return figures of this load alone; the simulation is over."""
        return {}


@dataclass(frozen=True)
class Circle(Load):
    """Four agents one after the other: a turn begins when another agent's has ended."""

    num_agents: int = 4

    def start(self, sim: Simulation) -> None:
        agents = Agents(sim, self.turns, self.think_s)
        waiting = [agents.open(f"agent{i}") for i in range(self.num_agents)]

        def turn(ended: Ask | None = None) -> None:
            after = agents.next(ended) if ended is not None else None
            waiting.extend([after] if after is not None else [])
            if waiting:
                sim.ask_at(sim.clock.now_s + self.think_s, waiting.pop(0), turn)

        turn()


@dataclass(frozen=True)
class Together(Load):
    """Agents that work at the same time."""

    num_agents: int = 4
    is_staggered: bool = True
    """Each agent begins when the one before it has had time for its first prompt; else all begin at once."""

    def start(self, sim: Simulation) -> None:
        agents = Agents(sim, self.turns, self.think_s)
        stagger_s = 1.1 * sim.machine.prompt_seconds(OPEN_TOKENS) if self.is_staggered else 0.0
        for i in range(self.num_agents):
            sim.ask_at(i * stagger_s, agents.open(f"agent{i}"), agents.think)


@dataclass(frozen=True)
class Side(Load):
    """Prompts of 60k tokens, the next one when the last has its answer, and a small request every 10 s meanwhile."""

    with_sides: bool = True

    @property
    def end_s(self) -> float:
        return 60.0 * self.turns

    def start(self, sim: Simulation) -> None:
        self._long(sim)
        if self.with_sides:
            sim.at(SIDE_PERIOD_S / 2, lambda: self._side(sim))

    def _long(self, sim: Simulation) -> None:
        if sim.clock.now_s < self.end_s:
            ask = short(sim, "long", len(sim.asks), OPEN_TOKENS, ANSWER_TOKENS)
            sim.ask_at(sim.clock.now_s, ask, lambda ask: self._long(sim))

    def _side(self, sim: Simulation) -> None:
        if any(ask.kind == "long" and ask.reason is None for ask in sim.asks):
            num_tokens = int(sim.random.integers(*SIDE_TOKENS))
            sim.ask_at(sim.clock.now_s, short(sim, "side", len(sim.asks), num_tokens, SIDE_ANSWER_TOKENS))
            sim.after(SIDE_PERIOD_S, lambda: self._side(sim))

    def own_figures(self, sim: Simulation) -> dict[str, float]:
        """Return long_slowdown: the long prompts' mean TTFT, over what it is without small requests plus their work."""
        alone = run(sim.machine, replace(self, with_sides=False))
        (with_s, num_long), (alone_s, num_alone) = (_ttft_s(each, "long") for each in (sim, alone))
        side_s = sum(chunk.seconds for chunk in sim.runner.chunks if sim.ask_of(chunk).kind == "side") / num_long
        side_s += sim.runner.decode_s / num_long - alone.runner.decode_s / num_alone
        return {"long_slowdown": with_s / (alone_s + side_s)}


def _ttft_s(sim: Simulation, kind: str) -> tuple[float, int]:
    """Return the mean, and of how many."""
    waits = [ask.first_s - ask.arrived_s for ask in sim.asks if ask.kind == kind]
    return float(np.mean(waits)), len(waits)


@dataclass(frozen=True)
class Burst(Load):
    """Sixteen short prompts at once, into an engine that has nothing to do; and again when all have their answers."""

    num_requests: int = 16

    def start(self, sim: Simulation) -> None:
        for _ in range(self.num_requests):
            ask = short(sim, "burst", len(sim.asks), int(sim.random.integers(30, 200)), 100)
            sim.ask_at(sim.clock.now_s, ask, lambda ask: self._ended(sim))

    def _ended(self, sim: Simulation) -> None:
        is_idle = all(ask.reason is not None for ask in sim.asks)
        if is_idle and len(sim.asks) < self.num_requests * max(1, self.turns // 2):
            self.start(sim)


@dataclass(frozen=True)
class Clients(Load):
    """Two clients think for 30,000 tokens each, a third one sends a prompt of 60k for which there is no memory beside
    both, a fourth one small requests."""

    answer_tokens: int = 30_000

    def config(self, machine: Machine) -> dict[str, Any]:
        return with_room(machine, 1.6 * machine.row_bytes(OPEN_TOKENS))

    def start(self, sim: Simulation) -> None:
        for i in range(2):
            sim.ask_at(0.0, short(sim, "thinker", i, 20_000, self.answer_tokens, client=f"thinker{i}"))
        sim.ask_at(60.0, short(sim, "long", 0, OPEN_TOKENS, ANSWER_TOKENS, client="long"))
        for i in range(12):
            sim.ask_at(90.0 + 60.0 * i, short(sim, "small", i, 200, 100, client="small"))


@dataclass(frozen=True)
class Head(Load):
    """Two thinkers have half of the memory, a prompt of 60k does not fit into the other half, twelve requests of 512
    tokens come behind it."""

    answer_tokens: int = 20_000
    small_tokens: int = 512

    def config(self, machine: Machine) -> dict[str, Any]:
        return with_room(machine, self._room(machine))

    def start(self, sim: Simulation) -> None:
        costs = sim.machine.costs
        num_slots = (self._room(sim.machine) / 4 - costs.rows(1, 0)) / (costs.rows(1, 1) - costs.rows(1, 0))
        for i in range(2):
            sim.ask_at(0.0, short(sim, "thinker", i, int(num_slots) - self.answer_tokens, self.answer_tokens))
        head_s = 2 * sim.machine.prompt_seconds(int(num_slots)) + 10
        sim.ask_at(head_s, short(sim, "head", 0, OPEN_TOKENS, ANSWER_TOKENS))
        for i in range(12):
            small = short(sim, "small", i, self.small_tokens - SIDE_ANSWER_TOKENS, SIDE_ANSWER_TOKENS)
            sim.ask_at(head_s + 9.0 * (i + 1), small)

    def _room(self, machine: Machine) -> float:
        return machine.row_bytes(OPEN_TOKENS) / 0.6


@dataclass(frozen=True)
class Priorities(Load):
    """A long answer of low priority, long ones of high priority one after the other, for which there is memory until
    both have grown, and a small urgent request every 30 s."""

    low_tokens: int = 24_000
    high_tokens: int = 16_000

    def config(self, machine: Machine) -> dict[str, Any]:
        room = 1.5 * (machine.row_bytes(40_000) + machine.row_bytes(20_000))
        return with_room(machine, room) | {"scheduler": {"policy": "priority"}}

    def start(self, sim: Simulation) -> None:
        low = short(sim, "low", 0, 40_000, self.low_tokens, priority=5)
        sim.ask_at(0.0, low)
        sim.at(1.2 * sim.machine.prompt_seconds(40_000), lambda: self._high(sim, max(1, self.turns // 6)))
        sim.at(30.0, lambda: self._urgent(sim))

    def _high(self, sim: Simulation, num_left: int) -> None:
        if num_left:
            high = short(sim, "high", num_left, 20_000, self.high_tokens, priority=-5)
            sim.ask_at(sim.clock.now_s, high, lambda ask: self._high(sim, num_left - 1))

    def _urgent(self, sim: Simulation) -> None:
        if any(ask.reason is None for ask in sim.asks):
            sim.ask_at(sim.clock.now_s, short(sim, "urgent", len(sim.asks), 500, 100, priority=-10))
            sim.after(30.0, lambda: self._urgent(sim))

    def own_figures(self, sim: Simulation) -> dict[str, float]:
        """Return high_again: prompt tokens that requests of high priority computed again."""
        work = work_of(sim, lambda ask: ask.kind)
        return {"high_again": work["high"].num_again}


@dataclass(frozen=True)
class SlowChunk(Load):
    """One chunk of a prompt of 60k takes twenty times as long as it should, while a row decodes."""

    factor: float = 20.0

    def start(self, sim: Simulation) -> None:
        decoding = short(sim, "decoding", 0, 1_000, 30_000)
        sim.ask_at(0.0, decoding)
        sim.ask_at(10.0, short(sim, "long", 0, OPEN_TOKENS, 10), lambda ask: sim.abort(decoding))
        sim.at(10.0 + sim.machine.prompt_seconds(OPEN_TOKENS) / 10, lambda: self._slow_down(sim))

    def _slow_down(self, sim: Simulation) -> None:
        sim.runner.slow_factor = self.factor

    def own_figures(self, sim: Simulation) -> dict[str, float]:
        """Return chunks_to_recover: how many chunks follow before all are within 10 % of what they are without a slow
        one."""
        steady, chunks = self._chunks(run(sim.machine, replace(self, factor=1.0))), self._chunks(sim)
        slow = max(range(len(chunks)), key=lambda i: chunks[i].seconds)
        behind = chunks[slow + 1 : -2]  # the last two end at the turn's boundary and at the end
        sizes = [_size_at(steady, chunk.start) for chunk in behind]
        too_small = [i for i, chunk in enumerate(behind) if abs(chunk.num_tokens - sizes[i]) > 0.1 * sizes[i]]
        num_chunks = too_small[-1] + 1 if too_small else 0
        return {
            "chunks_to_recover": math.inf if behind and num_chunks == len(behind) else num_chunks,
            "steady_tokens": sizes[0] if sizes else math.nan,
            "smallest": min((chunk.num_tokens for chunk in behind), default=math.nan),
        }

    def _chunks(self, sim: Simulation) -> list[Chunk]:
        return [chunk for chunk in sim.runner.chunks if sim.ask_of(chunk).kind == "long"]


def _size_at(chunks: Sequence[Chunk], position: int) -> int:
    return next(chunk.num_tokens for chunk in chunks if chunk.start + chunk.num_tokens > position)


def with_room(machine: Machine, num_bytes: float) -> dict[str, Any]:
    """Return the configuration of an engine that has so many bytes for requests."""
    return {"memory": {"limit_gb": (machine.costs.base_bytes + num_bytes) / GIB, "headroom_gb": 0}}


LOADS: dict[str, Load] = {
    "circle": Circle(),
    "agents4": Together(),
    "agents8": Together(num_agents=8),
    "side": Side(),
    "burst": Burst(),
    "clients": Clients(),
    "head": Head(),
    "priorities": Priorities(),
    "slow_chunk": SlowChunk(),
}


@dataclass(slots=True)
class Work:
    """Prompt tokens and seconds of the device, summed over chunks."""

    num_computed: int = 0
    num_again: int = 0
    lost_s: float = 0.0


def work_of(sim: Simulation, group_of: Callable[[Ask], str]) -> dict[str, Work]:
    """Return what was computed for the requests of each group."""
    work = defaultdict[str, Work](Work)
    num_system = 0
    computed: dict[str, int] = {}  # by conversation: tokens from the first on
    attempted: dict[Ask, int] = {}  # the same over all attempts of a request
    for chunk in sim.runner.chunks:
        ask, end = sim.ask_of(chunk), chunk.start + chunk.num_tokens
        reached = max(chunk.reached, attempted.get(ask, 0))
        known = max(computed.get(ask.conversation, 0), min(num_system, ask.num_system), reached)
        one = work[group_of(ask)]
        one.num_computed += chunk.num_tokens
        one.num_again += max(0, min(end, reached) - chunk.start)
        one.lost_s += chunk.seconds * max(0, min(end, known) - chunk.start) / chunk.num_tokens
        attempted[ask] = max(attempted.get(ask, 0), end)
        computed[ask.conversation] = max(computed.get(ask.conversation, 0), min(end, len(ask.token_ids)))
        num_system = max(num_system, min(end, ask.num_system))
    return work


def run(machine: Machine, load: Load) -> Simulation:
    sim = Simulation(machine, load.config(machine), has_disk=load.has_disk)
    load.start(sim)
    sim.run()
    return sim


def figures(machine: Machine, load: Load) -> dict[str, float]:
    """Run a load on a machine and return what its policy cost; see the head of the file."""
    began_s = time.process_time()
    sim = run(machine, load)
    work = work_of(sim, lambda ask: "later" if ask.turn else "first")
    stats, answered = sim.core.stats, [ask for ask in sim.asks if ask.output]
    later = [ask for ask in answered if ask.turn]
    all_work = Work(*(sum(getattr(one, name) for one in work.values()) for name in Work.__slots__))
    distinct = sum(ask.num_new for ask in sim.asks)
    cached = sim.core.budget.status()["prefix_cache_bytes"]
    found = {
        "computed_per_new": work["later"].num_computed / sum(ask.num_new for ask in later) if later else math.nan,
        "computed_per_new_all": all_work.num_computed / max(1, sum(ask.num_new for ask in answered)),
        "again_percent": 100 * all_work.num_again / distinct,
        "lost_s": all_work.lost_s,
        "tokens_per_s": stats.num_output_tokens / sim.clock.now_s,
        "num_preempted": stats.num_preempted,
        "num_expired": stats.num_expired,
        "num_failed": stats.num_failed,
        "num_unanswered": sum(ask.reason in (FinishReason.ERROR, FinishReason.EXPIRED) for ask in sim.asks),
        "num_unended": sum(ask.reason is None for ask in sim.asks),
        "elapsed_s": sim.clock.now_s,
        "longest_step_s": sim.longest_step_s,
        "num_running": sim.core.scheduler.num_running,
        "num_underestimates": sim.core.budget.num_underestimates,
        "unaccounted_bytes": sim.core.budget.unaccounted_bytes,
        "leaked_bytes": sim.runner.active_bytes - machine.costs.base_bytes - cached,
        "cpu_s": time.process_time() - began_s,
    }
    for kind in dict.fromkeys(ask.kind for ask in sim.asks):
        waits = [ask.first_s - ask.arrived_s for ask in sim.asks if ask.kind == kind and ask.output]
        found |= {f"ttft_{name}_s.{kind}": percentile(waits, q) for name, q in (("p50", 50), ("p99", 99), ("max", 100))}
    return found | {f"own.{name}": value for name, value in load.own_figures(sim).items()}


COLUMNS = (
    "machine", "load", "computed/new", "again", "lost", "output", "preempted", "expired", "elapsed", "CPU",
    "TTFT p50/p99 by kind, s", "other",
)  # fmt: skip


def line(machine: str, load: str, found: dict[str, float]) -> list[str]:
    """Return a row of the table."""
    later = found["computed_per_new"]
    kinds = [name.partition(".")[2] for name in found if name.startswith("ttft_p50_s.")]
    ttft = [
        f"{kind} {found[f'ttft_p50_s.{kind}']:.1f}/{found[f'ttft_p99_s.{kind}']:.1f}"
        for kind in kinds
        if not math.isnan(found[f"ttft_p50_s.{kind}"])
    ]
    own = {name.removeprefix("own."): value for name, value in found.items() if name.startswith("own.")}
    return [
        machine,
        load,
        f"{found['computed_per_new_all'] if math.isnan(later) else later:.2f}",
        f"{found['again_percent']:.0f} %",
        f"{found['lost_s']:.0f} s",
        f"{found['tokens_per_s']:.1f}/s",
        f"{found['num_preempted']:.0f}",
        f"{found['num_expired']:.0f}",
        f"{found['elapsed_s']:.0f} s",
        f"{found['cpu_s']:.1f} s",
        ", ".join(ttft),
        ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in own.items()),
    ]


def chosen(load: Load, args: argparse.Namespace) -> Load:
    """Return the load as the command line asks for it."""
    load = replace(load, turns=args.turns, think_s=args.think, has_disk=args.disk)
    return replace(load, is_staggered=False) if args.at_once and isinstance(load, Together) else load


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", choices=list(MACHINES), action="append", help="default: all")
    parser.add_argument("--load", choices=list(LOADS), action="append", help="default: all")
    parser.add_argument("--turns", type=int, default=12, help="of each agent's conversation")
    parser.add_argument("--think", type=float, default=2.0, help="seconds between an agent's answer and its next turn")
    parser.add_argument("--at-once", action="store_true", help="all agents begin at the same time")
    parser.add_argument("--disk", action="store_true", help="the prefix cache has a disk tier")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    rows, report = [], []
    for machine in args.machine or MACHINES:
        for load in args.load or LOADS:
            found = figures(MACHINES[machine], chosen(LOADS[load], args))
            rows.append(line(machine, load, found))
            report.append({"machine": machine, "load": load, **found})
    print(heading(f"agents_sim, {args.turns} turns, virtual seconds"))
    print(table(COLUMNS, rows))
    if args.json:
        args.json.write_text(json.dumps({"provenance": provenance(), "figures": report}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
