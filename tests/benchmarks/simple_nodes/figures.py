"""The figures of a simple simulation, and their table."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.benchmarks.measure import percentile
from tests.benchmarks.sim_runner import Machine
from tests.benchmarks.simple_nodes.cluster import FAULTS, Cluster
from tests.benchmarks.simple_nodes.loads import LOADS, Turn

COLUMNS = (
    "nodes", "load", "fault", "cached of what could be (later turns)", "busiest / mean", "computed/new",
    "TTFT p50 / mean / p99, s", "messages", "most asked / mean", "moved", "requests", "unanswered",
)  # fmt: skip


def figures(machines: Sequence[Machine], load: str, fault: str, seed: int) -> dict[str, Any]:
    """Run a load and return its figures; see nodes_sim.py."""
    began_s = time.process_time()
    cluster = Cluster(machines, LOADS[load], FAULTS[fault], seed)
    cluster.run()
    turns, nodes, now = cluster.turns, cluster.nodes.values(), cluster.clock.now_s
    waits = [turn.first_s - turn.arrived_s for turn in turns if turn.first_s is not None and _is_short(turn)]
    lives = [(node, (now if node.ended_s is None else node.ended_s) - node.began_s) for node in nodes]
    busy = [node.busy_s / seconds for node, seconds in lives if seconds > 0]
    asked = [node.num_asked / seconds for node, seconds in lives if seconds > 0]
    return {
        "num_nodes": len(machines),
        "load": load,
        "fault": fault,
        "seed": seed,
        "cached": _cached(turns),
        "cached_later": _cached([turn for turn in turns if turn.index]),
        "busiest": max(busy) / float(np.mean(busy)),
        "busy": float(np.mean(busy)),
        "computed_per_new": sum(node.num_computed for node in nodes) / sum(turn.num_new for turn in turns),
        "ttft_p50_s": percentile(waits, 50),
        "ttft_mean_s": float(np.mean(waits)),
        "ttft_p99_s": percentile(waits, 99),
        "messages": sum(turn.num_messages for turn in turns) / len(turns),
        "most_asked": max(asked) / float(np.mean(asked)),
        "most_asked_per_s": max(asked),
        "num_moved": cluster.num_moved,
        "num_requests": len(turns),
        "num_unanswered": sum(not turn.is_ended for turn in turns),
        "elapsed_s": now,
        "cpu_s": time.process_time() - began_s,
    }


def line(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return a row of the table: the means over seeds."""
    mean = {
        name: float(np.mean([each[name] for each in found])) for name, value in found[0].items() if _is_number(value)
    }
    worst = max(each["busiest"] for each in found)
    later = mean["cached_later"]
    return [
        str(found[0]["num_nodes"]),
        found[0]["load"],
        found[0]["fault"] or "–",
        f"{100 * mean['cached']:.1f} %" + ("" if np.isnan(later) else f" ({100 * later:.1f} %)"),
        f"{mean['busiest']:.2f}" + (f" [{worst:.2f}]" if len(found) > 1 else ""),
        f"{mean['computed_per_new']:.2f}",
        f"{mean['ttft_p50_s']:.1f} / {mean['ttft_mean_s']:.1f} / {mean['ttft_p99_s']:.0f}",
        f"{mean['messages']:.1f}",
        f"{mean['most_asked']:.1f}",
        f"{mean['num_moved']:.1f}",
        f"{mean['num_requests']:.0f}",
        f"{mean['num_unanswered']:.0f}",
    ]


def _cached(turns: Sequence[Turn]) -> float:
    """Return the cached part of the prompt tokens that could be cached; nan if none could."""
    could = sum(turn.could for turn in turns)
    return sum(min(turn.cached, turn.could) for turn in turns) / could if could else float("nan")


def _is_short(turn: Turn) -> bool:
    """Return whether it is a later turn or a chat of one turn; else all of a long prompt is computed."""
    return turn.index > 0 or turn.conversation.kind == "chat"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)
