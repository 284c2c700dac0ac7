"""Processes of a node are killed, one kind after the other, while streams run and new requests arrive at both nodes.

The streams have come in at the near node, and the engine of the far node answers them: what is killed there, but the
engine itself, is not on their way. See test_partition.py for a killed engine, and test_head.py for a lost head.
"""

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import psutil
import pytest

from tests.cluster.conftest import wait_until
from tests.cluster.test_partition import (
    ANSWER_TIMEOUT_S,
    Answer,
    Node,
    TwoNodes,
    check_whole,
    running_streams,
)
from tests.cluster.test_partition import nodes as nodes  # the fixture

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.night("test_partition.py keeps the killed engine; Serve replaces each other process in its own tests"),
]

HEAL_TIMEOUT_S = 120.0
WATCHED_S = 8.0
"""How long new requests are sent after a kill."""


def replica_of(deployment: str) -> Callable[[TwoNodes], int]:
    def pid(nodes: TwoNodes) -> int:
        status = nodes.near.get("/v1/status")
        return next(one["pid"] for one in status[deployment] if one["node_id"] == nodes.far.node_id)

    return pid


def actor(name: str, node: Callable[[TwoNodes], Node]) -> Callable[[TwoNodes], int]:
    def pid(nodes: TwoNodes) -> int:
        titles = {pid: title_of(pid) for pid in node(nodes).machine.pids()}
        return next(pid for pid, title in titles.items() if title.startswith(f"ray::{name}"))

    return pid


def title_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


KINDS: dict[str, Callable[[TwoNodes], int]] = {
    "planner": replica_of("text"),
    "ingress": replica_of("ingress"),
    "proxy": actor("ProxyActor", lambda nodes: nodes.far),
    "controller": actor("ServeController", lambda nodes: nodes.near),
}


def pids_of_replicas(nodes: TwoNodes) -> set[int]:
    status = nodes.near.get("/v1/status")
    return {one["pid"] for name in ("ingress", "engines", "text", "mllm") for one in status[name]}


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_process_costs_no_stream_of_another_node_and_is_replaced(
    nodes: TwoNodes, kind: str, capsys: pytest.CaptureFixture[str]
):
    before, victim = pids_of_replicas(nodes), KINDS[kind](nodes)
    streams = running_streams(nodes)
    os.kill(victim, signal.SIGKILL)
    began = time.monotonic()
    said: dict[str, list[Future[Answer]]] = {"near": [], "far": []}
    refused = 0
    while time.monotonic() - began < WATCHED_S:
        said["near"].append(nodes.near.ask([{"role": "user", "content": f"{len(said['near'])}?"}], max_tokens=4))
        said["far"].append(nodes.far.ask([{"role": "user", "content": f"{len(said['far'])}?"}], max_tokens=4))
        time.sleep(1.0)
    near = [future.result(timeout=ANSWER_TIMEOUT_S) for future in said["near"]]
    assert {answer.status for answer in near} == {200}, [answer.error for answer in near]
    for future in said["far"]:
        failed = future.exception(timeout=ANSWER_TIMEOUT_S)
        refused += failed is not None
        assert kind == "proxy" or (failed is None and future.result().status == 200), failed or future.result().error
    check_whole(nodes, streams)

    def is_healed() -> bool:
        if psutil.pid_exists(victim):
            return False
        try:
            answer = nodes.far.ask([{"role": "user", "content": "Healed?"}], max_tokens=4).result(timeout=5.0)
            return answer.status == 200 and len(pids_of_replicas(nodes)) == len(before)
        except Exception:
            return False

    wait_until(is_healed, HEAL_TIMEOUT_S)
    with capsys.disabled():
        print(f"{kind}: healed after {time.monotonic() - began:.0f} s; {refused} of {len(said['far'])} refused")  # noqa: T201
    assert pids_of_replicas(nodes) >= before - {victim}, "all other replicas keep their processes"
