"""Three Ray nodes in processes of this machine, each with `mlx`, and the whole app on them with real engines."""

import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # before Ray is imported; nodes inherit it

import ray
from ray import serve
from ray.cluster_utils import Cluster

from deployments.app import AppArgs, build_app
from tests.e2e.server import free_port

APP = "orchard"
DEPLOYMENTS = ("ModelReplica", "TextMTP", "MLLM", "Ingress")
NODE: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 100 * 2**20, "resources": {"mlx": 1}}


class OrchardCluster:
    def __init__(self, temp_dir: str):
        # Ray tries the dashboard's port even so, and leaks a socket if another cluster has it
        head = {**NODE, "include_dashboard": False, "dashboard_port": free_port(), "temp_dir": temp_dir}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._workers = [self._cluster.add_node(**NODE) for _ in range(2)]
        ray.init(address=self._cluster.address, log_to_driver=False, configure_logging=False)
        serve.start(proxy_location="Disabled")
        serve.run(build_app(AppArgs()), name=APP, route_prefix=None, blocking=False)

    def handle(self, deployment: str) -> Any:
        return serve.get_deployment_handle(deployment, APP)

    def replicas(self, deployment: str) -> list[dict[str, Any]]:
        """Return the status of a deployment's replicas, as in /v1/status."""
        answers = self.handle(deployment).broadcast("status").results(timeout_s=10)
        return [answer["ingress"][0] if "ingress" in answer else answer for answer in answers]

    def nodes(self, deployment: str) -> list[str]:
        return sorted(replica["node_id"] for replica in self.replicas(deployment))

    def living_nodes(self) -> list[str]:
        return sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])

    def worker_pids(self) -> dict[str, list[int]]:
        """Node id -> the processes of its replicas, of every node but the head."""
        replicas = [replica for deployment in DEPLOYMENTS for replica in self.replicas(deployment)]
        return {
            node.node_id: [replica["pid"] for replica in replicas if replica["node_id"] == node.node_id]
            for node in self._workers
        }

    def kill_worker(self, node_id: str, pids: list[int]) -> None:
        """As when the plug is pulled: the processes of one node die at once, and Ray finds out by itself."""
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        node = next(node for node in self._workers if node.node_id == node_id)
        self._workers.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def add_worker(self) -> str:
        self._workers.append(self._cluster.add_node(**NODE))
        return self._workers[-1].node_id

    def wait_settled(self, num_nodes: int, timeout_s: float = 120.0) -> None:
        """Until there is one replica of each deployment on each of so many nodes, and none elsewhere."""

        def settled() -> bool:
            nodes = self.living_nodes()
            return len(nodes) == num_nodes and all(self.nodes(deployment) == nodes for deployment in DEPLOYMENTS)

        wait_until(settled, timeout_s, lambda: f"{serve.status().applications[APP]}")

    def shutdown(self) -> None:
        serve.shutdown()
        ray.shutdown()
        self._cluster.shutdown()


def wait_until(condition: Callable[[], bool], timeout_s: float, explain: Callable[[], str] = lambda: "") -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if condition():
                return
        except Exception:  # replicas that are going or coming
            if time.monotonic() > deadline:
                raise
        assert time.monotonic() < deadline, f"not after {timeout_s} s: {explain()}"
        time.sleep(0.3)


@pytest.fixture(scope="module")  # tests of other files that run in this process afterwards need one without Ray
def cluster() -> Iterator[OrchardCluster]:
    Path("/tmp/ray").mkdir(exist_ok=True)  # Ray keeps a note there, whatever the temp_dir, and does not make it
    temp_dir = tempfile.mkdtemp(prefix="orc-", dir="/tmp")
    try:
        cluster = OrchardCluster(temp_dir)
        try:
            cluster.wait_settled(3, timeout_s=240)
            yield cluster
        finally:
            cluster.shutdown()
    finally:
        shutil.rmtree(temp_dir, ignore_errors=True)
