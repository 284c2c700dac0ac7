"""What the engine's policy costs: the real EngineCore under loads of agents, over a virtual clock instead of a model.

    uv run python -m tests.benchmarks.agents_sim --machine 27B-4bit/64GB --load circle --turns 12

Scheduler, memory budget, prefix cache and draft controller are the engine's own; only the runner is a clock
(sim_runner.py), so that hours take seconds and two runs give the same figures. Prompts are token ids: an agent's turn is
a system part of 20,000 tokens that all agents share, then its own conversation; each turn adds the very tokens of the
last answer (500) and 2,000 new ones.

computed/new: prompt tokens that were computed, over those that are new to the conversation: its prompt without the
prompt of the turn before, so the last answer counts as new (today it is prefilled again; an engine that keeps answers
gets below 1). Of later turns alone where there are any, else of all requests; a request that never ends well has
nothing new. again: prompt tokens that a request had already computed, restored or decoded before it lost its place, in
per cent of the distinct tokens of all prompts. lost: device seconds of tokens that the conversation, or for the system
part any other one, had computed before. TTFT: from the first attempt on; agents send a request that has expired again.
expired: attempts that ended with 503.
"""

import argparse
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.core.scheduler import Chunks
from engine.protocol import Boundary, EngineRequest, FinishReason, SamplingParams
from tests.benchmarks.measure import heading, percentile, provenance, table
from tests.benchmarks.sim_runner import GIB, MACHINES, STOP, VOCAB_SIZE, Chunk, ClockRunner, Machine, VirtualClock

SYSTEM_TOKENS, OPEN_TOKENS, ANSWER_TOKENS, NEW_TOKENS = 20_000, 60_000, 500, 2_000
MAX_TOKENS = 32_000
"""The ceiling that coding agents send with each request."""

GENERATION_TOKENS = 5
"""Of the generation prompt, which the next turn's prompt has in the same place, behind the turn's boundary."""

THINK_S = 2.0
MAX_RETRIES = 10
MAX_S = 200_000.0
"""Virtual seconds after which a load that does not end is given up."""


@dataclass(slots=True, eq=False)
class Ask:
    """One request of a client, over all of its attempts."""

    kind: str
    """Under which its TTFT is shown."""
    conversation: str
    token_ids: np.ndarray
    answer: list[int]
    """The tokens that the model gives, without STOP."""
    num_before: int = 0
    """Tokens of the prompt that are not new: the prompt of the turn before, or a system part that others have sent."""
    num_system: int = 0
    turn: int = 0
    client: str = ""
    priority: int = 0
    max_tokens: int = MAX_TOKENS
    retries: int = 0
    """How often it is sent again when it expires."""
    arrived_s: float = math.nan
    first_s: float = math.nan
    ended_s: float = math.nan
    output: list[int] = field(default_factory=list)
    reason: FinishReason | None = None

    @property
    def is_answered(self) -> bool:
        return self.reason in (FinishReason.STOP, FinishReason.LENGTH)

    @property
    def num_new(self) -> int:
        return len(self.token_ids) - self.num_before

    @property
    def boundaries(self) -> tuple[Boundary, ...]:
        """As processing/boundaries.py finds them: the system part, and the prompt without its generation prompt."""
        turn = Boundary("turn", len(self.token_ids) - GENERATION_TOKENS)
        return (Boundary("system", self.num_system), turn) if self.num_system else (turn,)


class Simulation:
    """An engine core, its clients, and what happened."""

    def __init__(self, machine: Machine, config: dict[str, Any], seed: int = 0):
        self.machine = machine
        self.clock = VirtualClock()
        self.runner = ClockRunner(machine, self.clock)
        self.core = EngineCore(EngineConfig.model_validate(config), self.runner, self._published, self.clock)
        self.asks: list[Ask] = []
        self.longest_step_s = 0.0
        self.random = np.random.default_rng(seed)
        self._open: dict[str, tuple[Ask, Callable[[Ask], None]]] = {}
        self._by_request: dict[str, Ask] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = count()

    def tokens(self, num_tokens: int) -> np.ndarray:
        """Return token ids that nobody has seen, none of them STOP."""
        return self.random.integers(STOP + 1, VOCAB_SIZE, num_tokens, dtype=np.int32)

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        heappush(self._events, (time_s, next(self._serial), action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.at(self.clock.now_s + seconds, action)

    def ask_at(self, time_s: float, ask: Ask, then: Callable[[Ask], None] = lambda ask: None) -> None:
        """Send the request at this time; `then` is called when it has ended for good."""
        self.asks.append(ask)

        def send() -> None:
            ask.arrived_s = time_s  # even if the device was busy then
            self._send(ask, then)

        self.at(time_s, send)

    def run(self) -> None:
        """Until no request is open and none will come."""
        while (self._events or self.core.has_work) and self.clock.now_s < MAX_S:
            while self._events and self._events[0][0] <= self.clock.now_s:
                heappop(self._events)[2]()
            if self.core.has_work:
                self._step()
            elif self._events:
                self.clock.now_s = max(self.clock.now_s, self._events[0][0])

    def ask_of(self, chunk: Chunk) -> Ask:
        return self._by_request[chunk.request_id]

    def _step(self) -> None:
        began_s = self.clock.now_s
        self.core.step()
        if self.clock.now_s == began_s:
            self.clock.advance(0.001)  # the device thread's own
        self.longest_step_s = max(self.longest_step_s, self.clock.now_s - began_s)

    def _send(self, ask: Ask, then: Callable[[Ask], None]) -> None:
        request_id = f"{ask.kind}-{next(self._serial)}"
        request = EngineRequest(
            request_id,
            ask.token_ids,
            SamplingParams(ask.max_tokens),
            (STOP,),
            boundaries=ask.boundaries,
            client=ask.client,
            priority=ask.priority,
        )
        self._open[request_id], self._by_request[request_id] = (ask, then), ask
        self.runner.answers[request_id] = [*ask.answer, STOP]
        self.core.add_request(self.core.fitted(request))

    def _published(self, chunks: Chunks) -> None:
        for row_id, chunk in chunks.items():
            request_id = row_id.rpartition("/")[0]
            ask, then = self._open[request_id]
            if chunk.token_ids and not ask.output:
                ask.first_s = self.clock.now_s
            ask.output += chunk.token_ids
            if chunk.finish_reason is None:
                continue
            del self._open[request_id]
            if chunk.finish_reason is FinishReason.EXPIRED and ask.retries:
                ask.retries -= 1
                self.after(chunk.retry_after_s or 1.0, lambda ask=ask, then=then: self._send(ask, then))
                continue
            ask.reason, ask.ended_s = chunk.finish_reason, self.clock.now_s
            then(ask)


class Agents:
    """Agents that share a system part and take turns with their tools."""

    def __init__(self, sim: Simulation, turns: int, kind: str = "turn", retries: int = MAX_RETRIES):
        self._sim = sim
        self._turns = turns
        self._kind = kind
        self._retries = retries
        self._system = sim.tokens(SYSTEM_TOKENS)
        self._is_system_sent = False

    def open(self, name: str, at_s: float, num_tokens: int = OPEN_TOKENS) -> Ask:
        """Return the first request of a conversation, which begins with so many tokens."""
        own = self._sim.tokens(num_tokens - SYSTEM_TOKENS)
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
        """The conversation goes on after a while."""
        after = self.next(ask)
        if after is not None:
            self._sim.ask_at(self._sim.clock.now_s + THINK_S, after, self.think)

    def _ask(self, name: str, token_ids: np.ndarray, num_before: int, turn: int) -> Ask:
        return Ask(
            self._kind if turn else "open",
            name,
            token_ids,
            self._sim.tokens(ANSWER_TOKENS).tolist(),
            num_before,
            SYSTEM_TOKENS,
            turn,
            client=name,
            retries=self._retries,
        )


def short(sim: Simulation, kind: str, number: int, num_prompt: int, num_answer: int, **fields: Any) -> Ask:
    """Return a request that has nothing in common with others."""
    answer = sim.tokens(num_answer).tolist()
    return Ask(kind, f"{kind}{number}", sim.tokens(num_prompt), answer, max_tokens=num_answer, **fields)


class Load(Protocol):
    """What clients do."""

    def config(self, machine: Machine) -> dict[str, Any]:
        """Return the fields of EngineConfig that are not the default."""
        ...

    def start(self, sim: Simulation) -> None:
        """Make the first events."""
        ...

    def more(self, sim: Simulation) -> dict[str, float]:
        """Return figures of this load alone; the simulation is over."""
        ...


@dataclass(frozen=True)
class Plain:
    """A load with the default configuration and no figures of its own."""

    turns: int

    def config(self, machine: Machine) -> dict[str, Any]:
        return {}

    def more(self, sim: Simulation) -> dict[str, float]:
        return {}


@dataclass(frozen=True)
class Circle(Plain):
    """Four agents one after the other: a turn begins when another agent's has ended."""

    num_agents: int = 4

    def start(self, sim: Simulation) -> None:
        agents = Agents(sim, self.turns)
        waiting = [agents.open(f"agent{i}", 0.0) for i in range(self.num_agents)]

        def turn(ended: Ask | None = None) -> None:
            after = agents.next(ended) if ended is not None else None
            waiting.extend([after] if after is not None else [])
            if waiting:
                sim.ask_at(sim.clock.now_s + THINK_S, waiting.pop(0), turn)

        turn()


@dataclass(frozen=True)
class Together(Plain):
    """Agents that work at the same time, each opened when the one before it has had time for its prompt."""

    num_agents: int = 4

    def start(self, sim: Simulation) -> None:
        agents, at_s = Agents(sim, self.turns), 0.0
        for i in range(self.num_agents):
            ask = agents.open(f"agent{i}", at_s)
            sim.ask_at(at_s, ask, agents.think)
            at_s += 1.1 * sim.machine.prompt_seconds(OPEN_TOKENS)


LOADS: dict[str, Callable[[int], Load]] = {
    "circle": Circle,
    "agents4": Together,
    "agents8": lambda turns: Together(turns, 8),
}


@dataclass(slots=True)
class Work:
    """Prompt tokens and seconds of the device, summed over chunks."""

    num_computed: int = 0
    num_again: int = 0
    lost_s: float = 0.0


def work_of(sim: Simulation) -> dict[str, Work]:
    """Return what was computed for later turns and for other requests."""
    work = defaultdict[str, Work](Work)
    computed: dict[str, int] = {}  # by conversation: tokens from the first on
    num_system = 0
    for chunk in sim.runner.chunks:
        ask, end = sim.ask_of(chunk), chunk.start + chunk.num_tokens
        known = max(computed.get(ask.conversation, 0), min(num_system, ask.num_system), chunk.reached)
        one = work["later" if ask.turn else "first"]
        one.num_computed += chunk.num_tokens
        one.num_again += max(0, min(end, chunk.reached) - chunk.start)
        one.lost_s += chunk.seconds * max(0, min(end, known) - chunk.start) / chunk.num_tokens
        computed[ask.conversation] = max(computed.get(ask.conversation, 0), min(end, len(ask.token_ids)))
        num_system = max(num_system, min(end, ask.num_system))
    return work


def run(machine: Machine, load: Load) -> Simulation:
    sim = Simulation(machine, load.config(machine))
    load.start(sim)
    sim.run()
    return sim


def figures(machine: Machine, load: Load) -> dict[str, float]:
    """Run a load on a machine and return what its policy cost; see the head of the file."""
    began_s = time.process_time()
    sim = run(machine, load)
    work, stats, answered = work_of(sim), sim.core.stats, [ask for ask in sim.asks if ask.is_answered]
    later = [ask for ask in answered if ask.turn]
    all_work = Work(*(sum(getattr(one, name) for one in work.values()) for name in Work.__slots__))
    distinct = sum(ask.num_new for ask in sim.asks)
    cached = sim.core.budget.status()["cached_bytes"]
    found = {
        "computed_per_new": work["later"].num_computed / sum(ask.num_new for ask in later) if later else math.nan,
        "computed_per_new_all": all_work.num_computed / max(1, sum(ask.num_new for ask in answered)),
        "again_percent": 100 * all_work.num_again / distinct,
        "lost_s": all_work.lost_s,
        "tokens_per_s": stats.num_output_tokens / sim.clock.now_s,
        "num_preempted": stats.num_preempted,
        "num_expired": stats.num_expired,
        "num_failed": stats.num_failed,
        "num_unanswered": len(sim.asks) - len(answered),
        "num_unended": sum(ask.reason is None for ask in sim.asks),
        "elapsed_s": sim.clock.now_s,
        "longest_step_s": sim.longest_step_s,
        "num_running": sim.core.scheduler.num_running,
        "unaccounted_bytes": sim.core.budget.unaccounted_bytes,
        "leaked_bytes": sim.runner.active_bytes - machine.costs.base_bytes - cached,
        "cpu_s": time.process_time() - began_s,
    }
    for kind in dict.fromkeys(ask.kind for ask in sim.asks):
        waits = [ask.first_s - ask.arrived_s for ask in sim.asks if ask.kind == kind and ask.output]
        found |= {f"ttft_{name}_s.{kind}": percentile(waits, q) for name, q in (("p50", 50), ("p99", 99), ("max", 100))}
    return found | load.more(sim)


COLUMNS = (
    "machine", "load", "computed/new", "again", "lost", "output", "preempted", "expired", "elapsed", "CPU",
    "TTFT p50/p99 by kind, s", "other",
)  # fmt: skip


def line(machine: str, load: str, found: dict[str, float]) -> list[str]:
    """Return a row of the table."""
    later = found["computed_per_new"]
    kinds = [name.partition(".")[2] for name in found if name.startswith("ttft_p50_s.")]
    ttft = [f"{kind} {found[f'ttft_p50_s.{kind}']:.1f}/{found[f'ttft_p99_s.{kind}']:.1f}" for kind in kinds]
    other = [f"{name.replace('_', ' ')} {value:.4g}" for name, value in found.items() if name.startswith("of_")]
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
        ", ".join(other).removeprefix("of "),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", choices=list(MACHINES), action="append", help="default: all")
    parser.add_argument("--load", choices=list(LOADS), action="append", help="default: all")
    parser.add_argument("--turns", type=int, default=12, help="of each agent's conversation")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    rows, report = [], []
    for machine in args.machine or MACHINES:
        for load in args.load or LOADS:
            found = figures(MACHINES[machine], LOADS[load](args.turns))
            rows.append(line(machine, load, found))
            report.append({"machine": machine, "load": load, **found})
    print(heading(f"agents_sim, {args.turns} turns, virtual seconds"))
    print(table(COLUMNS, rows))
    if args.json:
        args.json.write_text(json.dumps({"provenance": provenance(), "figures": report}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
