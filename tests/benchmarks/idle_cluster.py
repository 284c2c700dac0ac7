"""Measures an idle cluster of three machines: bytes on the wire and CPU time of each machine.

Three clusters, one after the other, in network namespaces of this machine (root and iproute2): Ray alone, Ray with a
Serve application that does nothing on each node, and Orchard as `orchard serve --cluster` and `orchard join` make it.

Usage: python -m tests.benchmarks.idle_cluster [--seconds 60] [--settle 30] [--only ray serve orchard]
"""

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from deployments.cluster import ports
from deployments.cluster.ray_node import STARTED, NodeOptions, set_variables
from tests.cluster.conftest import wait_until
from tests.cluster.members import READY_S, Command, Member, members, serve, token_of
from tests.cluster.namespaces import ip
from tests.cluster.test_partition import PORT

NUM_MACHINES = 3
OBJECT_STORE_BYTES = 512 * 2**20
EMPTY_APPLICATION = f"""\
import sys
import ray
from ray import serve

ray.init(address=sys.argv[1], log_to_driver=False)
serve.start(proxy_location="EveryNode", http_options={{"host": "127.0.0.1", "port": {PORT}}})


@serve.deployment(num_replicas={NUM_MACHINES}, max_replicas_per_node=1, ray_actor_options={{"num_cpus": 0}})
class Empty:
    def __call__(self) -> str:
        return ""


serve.run(Empty.bind())
print("the application runs", flush=True)
sys.stdin.read()
"""


@dataclass
class Reading:
    """Counters of a machine."""

    received: int
    """Bytes."""
    sent: int
    """Bytes."""
    cpu_s: float
    """CPU time of all processes that live."""
    num_processes: int


def read(member: Member) -> Reading:
    """Read the counters of a machine's interface and processes."""
    stats = json.loads(ip("-n", member.machine.name, "-s", "-j", "link", "show", "eth0"))[0]["stats64"]
    cpu_s, num_processes = 0.0, 0
    for pid in set(member.machine.pids()) - {os.getpid()}:
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(pid).cpu_times()
            cpu_s += times.user + times.system
            num_processes += 1
    return Reading(stats["rx"]["bytes"], stats["tx"]["bytes"], cpu_s, num_processes)


def start_ray(made: list[Member]) -> None:
    """Start Ray with the options and variables with which Orchard starts it."""
    head = made[0]
    token = head.home / "token"
    token.write_text("0" * 64)
    token.chmod(0o600)
    for member in made:
        set_variables(member.env, token)
        address = None if member is head else f"{head.machine.address}:{ports.GCS}"
        node = NodeOptions(member.machine.address, {"mlx": 1.0, "mlx_scorer": 1.0}, OBJECT_STORE_BYTES, address)
        member.start(node.command()).wait_for(STARTED)


def start_empty_application(made: list[Member]) -> None:
    """Start Ray, and Serve with one replica on each machine."""
    start_ray(made)
    address = f"{made[0].machine.address}:{ports.GCS}"
    made[0].start([sys.executable, "-c", EMPTY_APPLICATION, address]).wait_for("the application runs")


def start_orchard(made: list[Member]) -> None:
    """Start Orchard as an operator does."""
    head, *others = made
    serve(head).wait_for("orchard join")
    for other in others:
        joined: Command = other.orchard("join", head.machine.address, "--token", token_of(head))
        assert joined.wait() == 0, joined.output
    wait_until(lambda: head.num_engines() == NUM_MACHINES, READY_S)


CLUSTERS: dict[str, Callable[[list[Member]], None]] = {
    "ray": start_ray,
    "serve": start_empty_application,
    "orchard": start_orchard,
}


def measure(name: str, settle_s: float, seconds: float) -> None:
    """Start a cluster, wait, and print what each machine has received, sent and computed per second."""
    with members(NUM_MACHINES) as made:
        CLUSTERS[name](made)
        time.sleep(settle_s)
        before, began = [read(member) for member in made], time.monotonic()
        time.sleep(seconds)
        after, elapsed = [read(member) for member in made], time.monotonic() - began
    for place, old, new in zip(("head", *["member"] * (NUM_MACHINES - 1)), before, after, strict=True):
        rates = {
            "received_bytes_per_s": (new.received - old.received) / elapsed,
            "sent_bytes_per_s": (new.sent - old.sent) / elapsed,
            "cpu_percent_of_a_core": 100 * (new.cpu_s - old.cpu_s) / elapsed,
        }
        shown = {key: round(value, 1) for key, value in rates.items()}
        print(json.dumps({"cluster": name, "machine": place, **shown, "processes": new.num_processes}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--settle", type=float, default=30.0, help="seconds between the start and the measurement")
    parser.add_argument("--only", nargs="+", choices=list(CLUSTERS), default=list(CLUSTERS))
    options = parser.parse_args()
    Path("/tmp/ray").mkdir(exist_ok=True)
    for name in options.only:
        measure(name, options.settle, options.seconds)


if __name__ == "__main__":
    main()
