"""Measures what single decisions of the engine's policy are worth, by changing one at a time in agents_sim's loads.

    uv run python -m tests.benchmarks.policy_arms OUT.json --arms now silent --processes 16
    uv run python -m tests.benchmarks.policy_arms OUT.json --report

A cell is a load on a machine, with a pause of the agents and with or without a disk. Each arm runs all cells, and the
report compares every arm with `now`, cell by cell: virtual seconds, computed tokens per new one, first tokens.
"""

import argparse
import json
import math
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from engine.core import admission, prefill_scheduler
from engine.core.prefix_cache import eviction, lineages, reuse_forecast, snapshot_memory, snapshot_taker
from engine.core.prompt import Prompt
from tests.benchmarks.agents_sim import LOADS, Load, Together, figures
from tests.benchmarks.measure import heading, table
from tests.benchmarks.sim_runner import MACHINES

PAUSES_S = (1.0, 2.0, 3.0, 5.0)
"""Seconds between an agent's answer and its next turn; the spread of what chance alone does."""
AGENT_LOADS = ("circle", "agents4", "agents8")
OTHER_LOADS = tuple(load for load in LOADS if load not in AGENT_LOADS)
TURNS = 12
IDLE_S = 60.0
"""Seconds of idle time from which a snapshot loses value under the rules without learning."""


@dataclass(frozen=True)
class Cell:
    """A load on a machine."""

    machine: str
    load: str
    think_s: float = 2.0
    has_disk: bool = False
    is_at_once: bool = False

    @property
    def name(self) -> str:
        words = [self.machine, self.load, f"{self.think_s:g} s"]
        return " ".join([*words, *(["disk"] if self.has_disk else []), *(["at once"] if self.is_at_once else [])])

    def changed_load(self) -> Load:
        load = replace(LOADS[self.load], turns=TURNS, think_s=self.think_s, has_disk=self.has_disk)
        return replace(load, is_staggered=False) if self.is_at_once and isinstance(load, Together) else load


def cells(machines: Sequence[str], pauses_s: Sequence[float]) -> list[Cell]:
    """Return all cells, those that take longest first."""
    agents = [
        Cell(machine, load, think_s, has_disk)
        for load in reversed(AGENT_LOADS)
        for machine in machines
        for think_s in pauses_s
        for has_disk in (False, True)
    ]
    at_once = [Cell(machine, "agents4", 2.0, is_at_once=True) for machine in machines]
    return agents + at_once + [Cell(machine, load) for machine in machines for load in OTHER_LOADS]


# The arms


def _set(owner: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(owner, name, value)


def _together(*changes: Callable[[], None]) -> Callable[[], None]:
    def change() -> None:
        for one in changes:
            one()

    return change


def _first_come(part: prefill_scheduler.PrefillScheduler, prompts: Sequence[Prompt], chunk_s: float) -> Prompt:
    return prompts[0]


def _shortest(part: prefill_scheduler.PrefillScheduler, prompts: Sequence[Prompt], chunk_s: float) -> Prompt:
    return min(prompts, key=part.remaining_s)


def _backfill_until_aged(part: admission.Admission, head: Any) -> Any:
    """Let any request that fits pass, until the head has not fitted for ageing_s."""
    if len(head.rows) > part._prefills.num_free_rows:
        return None
    now = part._clock()
    head.blocked_s = now if head.blocked_s is None else head.blocked_s
    if now - head.blocked_s >= part._config.scheduler.ageing_s:
        return None
    for prompt in part._queue.order()[: 1 + admission.MAX_PASSING]:
        if prompt is not head and part.reserve(prompt):
            return prompt
    return None


def _rule(weight_of: Callable[[eviction.EvictionOrder, Any], float], margin: float = 0.0) -> Callable[[], None]:
    """Return a rule without learning: seconds * weight / max(IDLE_S, idle) per byte.

    Args:
        weight_of: Returns the weight of a snapshot.
        margin: A new snapshot must be worth this many times those evicted for it; 0: all are stored.
    """

    def victim(order: eviction.EvictionOrder, node: Any) -> eviction.PlannedEviction:
        before = order._nearest_before(node)
        lost_s = order._cost(node, before.num_tokens if before is not None else 0)
        weight = weight_of(order, node)
        rate = weight / max(IDLE_S, order._now - node.used_s)
        return eviction.PlannedEviction(node, order._freed_bytes(node), lost_s, rate, 0.5 * weight)

    def change() -> None:
        setattr(eviction.EvictionOrder, "_victim", victim)  # noqa: B010 (its parameters have other names)
        snapshot_memory.MARGIN = margin
        lineages.Lineages.rate_of_new = lambda self, lineage, kind, now: 1 / IDLE_S

    return change


def _by_stage(order: eviction.EvictionOrder, node: Any) -> float:
    return 1.0 if node.lineage.is_shared or node.lineage.nodes[-1] is node else 0.1


def _by_leaf(order: eviction.EvictionOrder, node: Any) -> float:
    num = node.num_dependents - order._num_freed_dependents.get(node, 0)
    return 1.0 if num != 1 or node.kind == "system" else 0.1


NO_GROWTH = _set(admission.Admission, "_growth_tokens", lambda self, prompt_s, num_prompt_tokens: 0)
NO_GROUP_EVICTION = _set(admission.Admission, "_evict_for_group", lambda self, prompt: None)
NO_EASY = _set(admission.Admission, "choose_backfill", _backfill_until_aged)
SHORTEST = _set(prefill_scheduler.PrefillScheduler, "_shortest_or_oldest", _shortest)
FIRST_COME = _set(prefill_scheduler.PrefillScheduler, "_shortest_or_oldest", _first_come)
NO_PATIENCE = _set(admission.Admission, "_may_evict", lambda self, prompt, num_bytes: True)
NO_BURSTS = _set(prefill_scheduler.PrefillScheduler, "_may_burst", lambda self, prompt: False)

ARMS: dict[str, tuple[str, Callable[[], None]]] = {
    "now": ("nothing changed", _together()),
    "no growth": ("admission does not foresee the growth of decoding rows", NO_GROWTH),
    "no eviction for a group": ("no snapshot is evicted so that rows share a decode group", NO_GROUP_EVICTION),
    "no EASY": ("behind a head that has not fitted for ageing_s nothing is admitted", NO_EASY),
    "silent": ("the three above together", _together(NO_GROWTH, NO_GROUP_EVICTION, NO_EASY)),
    "shortest first": ("the oldest prompt has no share of its own", SHORTEST),
    "first come": ("prompts in progress advance in the order of their arrival", FIRST_COME),
    "no short admission": (
        "no short prompt is admitted beside long ones",
        _set(admission, "SHORT_PART", 0.0),
    ),
    "no patience": ("valuable snapshots are evicted for a request at once", NO_PATIENCE),
    "no bursts": ("no two prompts share a forward", NO_BURSTS),
    "no loans": ("keys and values are copied, not lent", _set(Prompt, "may_lend", property(lambda prompt: False))),
    "no answers": ("answers are not stored", _set(snapshot_taker.SnapshotTaker, "take_answer", lambda *a: None)),
    "lru": (
        "the least recently used snapshot is evicted, and every new one stored",
        _together(_set(eviction, "_density", lambda victim: victim.node.used_s), _set(snapshot_memory, "MARGIN", 0)),
    ),
    "one line": ("seconds / bytes / idle time, every new one stored", _rule(lambda order, node: 1.0)),
    "by stage": ("the same, times 0.1 unless it is the last of its conversation or shared", _rule(_by_stage)),
    "by leaf": ("the same, read off the tree", _rule(_by_leaf)),
    "by leaf, 1.0": ("the same; a new one must be worth as much as those evicted for it", _rule(_by_leaf, 1.0)),
    "by leaf, 1.5": ("the same, half as much again", _rule(_by_leaf, 1.5)),
    "prior": ("the forecast learns no odds", _set(reuse_forecast.Odds, "add", lambda *a: None)),
}  # fmt: skip


def _run(job: tuple[str, Cell]) -> dict[str, Any]:
    arm, cell = job
    ARMS[arm][1]()  # this process computes this cell only
    return {"arm": arm, "cell": cell.name, **figures(MACHINES[cell.machine], cell.changed_load())}


def _compared(found: list[dict[str, Any]]) -> list[list[str]]:
    """Return a row per arm: ratios to `now` over the cells that both have."""
    by_arm: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for one in found:
        by_arm[one["arm"]][one["cell"]] = one
    base, rows = by_arm["now"], []
    for arm, of_arm in by_arm.items():
        shared = [name for name in of_arm if name in base]
        total, total_before = (sum(one[name]["elapsed_s"] for name in shared) for one in (of_arm, base))
        worst = max(shared, key=lambda name: of_arm[name]["elapsed_s"] / base[name]["elapsed_s"])
        num_changed = sum(of_arm[name]["elapsed_s"] != base[name]["elapsed_s"] for name in shared)
        computed = _ratios(of_arm, base, shared, "computed_per_new_all")
        waits = {
            q: statistics.geometric_mean(values) if (values := _kinds(of_arm, base, shared, q)) else math.nan
            for q in ("p50", "p99")
        }
        lost = sum(of_arm[name]["lost_s"] for name in shared) / sum(base[name]["lost_s"] for name in shared)
        expired = [sum(int(one[name]["num_expired"]) for name in shared) for one in (base, of_arm)]
        rows.append(
            [
                arm,
                f"{len(shared)}, {num_changed}",
                f"{total / total_before:.3f}",
                f"{of_arm[worst]['elapsed_s'] / base[worst]['elapsed_s']:.2f} ({worst})",
                f"{statistics.geometric_mean(computed):.3f} [{min(computed):.2f} {max(computed):.2f}]",
                f"{lost:.2f}",
                f"{expired[0]} to {expired[1]}",
                f"{waits['p50']:.3f}",
                f"{waits['p99']:.3f}",
            ]
        )
    return rows


def _ratios(one: Any, other: Any, names: Sequence[str], figure: str) -> list[float]:
    pairs = [(one[name][figure], other[name][figure]) for name in names]
    return [a / b for a, b in pairs if a and b and not math.isnan(a / b)] or [math.nan]


def _kinds(one: Any, other: Any, names: Sequence[str], q: str) -> list[float]:
    """Return the ratios of first tokens, for each kind of request in each cell."""
    found: list[float] = []
    for name in names:
        figures_of = [key for key in one[name] if key.startswith(f"ttft_{q}_s.") and key in other[name]]
        pairs = [(one[name][key], other[name][key]) for key in figures_of]
        found += [a / b for a, b in pairs if a > 0 and b > 0]
    return found


COLUMNS = (
    "arm", "cells, changed", "virtual s", "worst cell", "computed/new", "lost", "expired", "TTFT p50", "TTFT p99",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="JSON file of all figures; what it has is not run again")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--machine", nargs="+", choices=list(MACHINES), default=list(MACHINES))
    parser.add_argument("--pauses", nargs="+", type=float, default=PAUSES_S, metavar="SECONDS")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--report", action="store_true", help="only print what the file has")
    args = parser.parse_args()
    found: list[dict[str, Any]] = json.loads(args.out.read_text()) if args.out.exists() else []
    have = {(one["arm"], one["cell"]) for one in found}
    wanted = [(arm, cell) for cell in cells(args.machine, args.pauses) for arm in args.arms]
    jobs = [] if args.report else [(arm, cell) for arm, cell in wanted if (arm, cell.name) not in have]
    with get_context("spawn").Pool(args.processes, maxtasksperchild=1) as pool:
        for one in pool.imap_unordered(_run, jobs):
            found.append(one)
            args.out.write_text(json.dumps(found))
    print(heading(f"policy_arms, {TURNS} turns, virtual seconds, ratios to `now`"))
    print(table(COLUMNS, _compared(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
