"""The cost of a token's way from the engine to the client: the real graph around a step that computes nothing.

    uv run python -m tests.benchmarks.publish_bench

Starts its own Ray on loopback. Every stream gets one token per step, 50 steps a second. Two figures come out:
CPU time of the engine's process per published item, and the time from the step's end to the client's read, per token.
`together` is as in a real step: the tokens of all streams come at once, so the last one waits for the others at every
hop. `spread` has the same number of tokens evenly in time, which shows what the graph itself adds to one token.

gross is all that the process used. From it are taken what the idle process uses and what the step itself costs (the
same rows in an EngineCore whose publish does nothing): that leaves net, the price of publishing.
"""

import argparse
import json
import logging
import math
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
from ray import serve

from deployments.app import AppArgs
from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.protocol import EngineRequest, SamplingParams
from tests.benchmarks.measure import ROOT, CpuMeter, CpuTrace, Spread, heading, percentile, provenance, table
from tests.benchmarks.publish_figures import engine_cost, latencies_ms
from tests.benchmarks.serve_bench import engine_pids
from tests.benchmarks.synthetic import STEPS_PER_S, build_synthetic_app, make_paced_runner

APP = "default"
IDLE_S = 5.0


@dataclass(frozen=True)
class Arm:
    num_streams: int
    num_tokens: int  # of each stream
    spread: bool = False

    @property
    def pace(self) -> str:
        return "spread" if self.spread else "together"


@contextmanager
def serving(args: AppArgs) -> Iterator[str]:
    """The graph on a Ray of its own. Gives the base URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="opub", dir="/tmp") as temp:  # Ray's socket paths must stay short
        ray.init(
            address="local",
            num_cpus=4,
            resources={"mlx": 1},
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=128 * 2**20,
            _temp_dir=temp,
            _node_ip_address="127.0.0.1",
        )
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            quiet = {"enable_access_log": False, "log_level": "ERROR"}
            serve.run(build_synthetic_app(args), name=APP, logging_config=quiet)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            ray.shutdown()


def client(base: str, arm: Arm) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.benchmarks.publish_client", base]
    command += [str(arm.num_streams), str(arm.num_tokens), str(STEPS_PER_S)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    return json.loads(done.stdout)


def step_cost_us(rows: int, seconds: float = 3.0) -> float:
    """CPU time of one paced step of a core with `rows` rows whose publish does nothing. Of this process."""
    config = EngineConfig.model_validate({"max_running": rows, "prefix_cache": {"enabled": False}})
    core = EngineCore(config, make_paced_runner(config, lambda _: None), publish=lambda _: None)
    for number in range(rows):
        sampling = SamplingParams(max_tokens=1 << 16, seed=number)
        core.add_request(EngineRequest(f"synthetic-{number}", np.zeros(8, np.int32), sampling, stop_token_ids=()))
    while core.scheduler.num_waiting:
        core.step()
    began_s, steps = time.process_time(), round(seconds * STEPS_PER_S)
    for _ in range(steps):
        core.step()
    return (time.process_time() - began_s) / steps * 1e6


def step_cost_elsewhere_us(rows: int) -> float:
    """In a fresh process: this one has Ray's threads."""
    command = [sys.executable, "-m", "tests.benchmarks.publish_bench", "--step-cost", str(rows)]
    return float(subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=60).stdout)


def idle_cores(base: str) -> float:
    engine = CpuMeter(engine_pids(base))
    time.sleep(IDLE_S)
    return engine.cpu_s() / engine.wall_s()


class RayProcesses:
    """CPU time of every actor of this Ray, by the name in its title (which also tells the method that is running)."""

    def __init__(self) -> None:
        self._before = self._now()

    def since(self) -> dict[str, float]:
        return {name: cpu_s - self._before.get(name, 0.0) for name, cpu_s in self._now().items()}

    def _now(self) -> dict[str, float]:
        cpu_s: dict[str, float] = {}
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                title, times = (process.cmdline() or [""])[0], process.cpu_times()
                if title.startswith("ray::"):
                    name = title.split()[0].split(":")[-1].split(".")[0]
                    cpu_s[name] = cpu_s.get(name, 0.0) + times.user + times.system
        return cpu_s


def round_of(base: str, arm: Arm, replica: Any, idle: float, step_us: float) -> dict[str, Any]:
    replica.take_emissions.remote().result()
    replica.set_spread.remote(arm.spread).result()
    actors = RayProcesses()
    with CpuTrace(engine_pids(base)) as engine:
        report = client(base, arm)
    by_actor = actors.since()
    num_tokens = sum(len(times) for times in report["arrivals"].values()) or math.nan
    emitted = replica.take_emissions.remote().result()
    return {
        **engine_cost(engine, emitted, idle, step_us),
        "client_us": report["cpu_s"] / num_tokens * 1e6,
        "tokens_per_piece": num_tokens / max(report["num_pieces"], 1),
        "by_actor_us": {name: cpu_s / num_tokens * 1e6 for name, cpu_s in by_actor.items()},
        "latencies_ms": [] if report["errors"] else latencies_ms(emitted, report["arrivals"]),
        "errors": report["errors"],
    }


def summary(arm: Arm, rounds: Sequence[Mapping[str, Any]], step_us: float) -> dict[str, Any]:
    def spread(name: str) -> Spread:
        return Spread.of([r[name] for r in rounds])

    latencies = [r["latencies_ms"] for r in rounds if r["latencies_ms"]]
    return {
        "streams": str(arm.num_streams),
        "pace": arm.pace,
        "items": f"{spread('items').median:.0f}",
        "gross_us": f"{spread('gross_us'):.0f}",
        "step_us": "" if arm.spread else f"{step_us / arm.num_streams:.1f}",
        "net_us": "" if arm.spread else f"{spread('net_us'):.0f}",  # its many steps would have to be taken off as well
        "cores": f"{spread('engine_cores').median:.3f}",
        **{f"p{q}_ms": f"{Spread.of([percentile(values, q) for values in latencies]):.2f}" for q in (50, 99)},
        "tokens/piece": f"{spread('tokens_per_piece').median:.2f}",
        "client_us": f"{spread('client_us').median:.0f}",
    }


def measure(arms: Sequence[Arm], rounds: int) -> dict[str, Any]:
    steps_us = {arm: step_cost_elsewhere_us(arm.num_streams) for arm in arms}
    app_args = AppArgs.model_validate({"engine": {"max_running": max(arm.num_streams for arm in arms)}})
    collected: dict[Arm, list[dict[str, Any]]] = {arm: [] for arm in arms}
    with serving(app_args) as base:
        replica = serve.get_deployment_handle("SyntheticReplica", APP)
        client(base, Arm(2, 100))  # warms up
        idle = idle_cores(base)
        for _ in range(rounds):
            for arm in arms:
                collected[arm].append(round_of(base, arm, replica, idle, steps_us[arm]))
    return {
        "provenance": provenance(),
        "idle_cores": idle,
        "arms": [summary(arm, collected[arm], steps_us[arm]) for arm in arms],
        "by_actor_us": {f"{arm.num_streams} {arm.pace}": collected[arm][-1]["by_actor_us"] for arm in arms},
        "errors": sorted({error for of_arm in collected.values() for r in of_arm for error in r["errors"]}),
    }


def print_report(report: dict[str, Any], rounds: int) -> None:
    print(heading(f"publish_bench, {STEPS_PER_S:.0f} steps/s, one token per stream and step"))
    print(f"{rounds} rounds: median [lowest highest]; us: CPU time per token; the idle engine process: ", end="")
    print(f"{report['idle_cores']:.4f} cores\n")
    print(table(list(report["arms"][0]), [list(row.values()) for row in report["arms"]]))
    print("step_us: the paced step alone, per row; net_us: gross without step and idle; p50, p99: step to client")
    for arm, actors in report["by_actor_us"].items():
        costs = ", ".join(f"{name} {cost:.0f}" for name, cost in sorted(actors.items(), key=lambda item: -item[1]))
        print(f"us per token of all processes, {arm}, last round: {costs}")
    for error in report["errors"]:
        print(f"error: {error}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,8,32")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of a stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    parser.add_argument("--step-cost", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step_cost:
        print(step_cost_us(args.step_cost))
        return 0
    num_tokens = round(args.seconds * STEPS_PER_S)
    arms = [Arm(int(n), num_tokens, spread) for n in args.streams.split(",") for spread in (False, True)]
    report = measure(arms, args.rounds)
    print_report(report, args.rounds)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))
    return 1 if report["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
