"""Start of Ray's node on this machine: a second try when its processes were too slow, and their libraries read before.

The raylet waits 15 s for its Python agents and then aborts, and Ray reports a node that timed out. On a busy machine
that is too short, and on a Mac at the first start, as macOS scans each library when it is first loaded.
"""

import copy
import subprocess
import sys
from typing import Any

import ray._private.node

from deployments.serve_run.stop import say

TIMED_OUT = "The current node timed out during startup"
"""Beginning of Ray's message (ray 2.60.0, _private/node.py)."""

AGENTS = (
    "import ray.dashboard.agent, ray._private.runtime_env.agent.main; from ray.dashboard import utils; "
    "utils.get_all_modules(utils.DashboardAgentModule)"
)
"""Program that loads what the agents load and starts nothing."""

SCAN_S, MAX_WARM_S = 5.0, 180.0
"""Seconds after which the operator is told why it takes so long, and after which the start goes on without."""


class PatientNode(ray._private.node.Node):
    """Ray's node, which `ray.init` starts. A new cluster whose processes were too slow is started once more."""

    def __init__(self, ray_params: Any, head: bool = False, **options: Any):
        if not head:
            super().__init__(ray_params, head=head, **options)
            return
        again = copy.deepcopy(ray_params)  # the first start stores its ports in them
        try:
            super().__init__(ray_params, head=head, **options)
        except Exception as error:
            if TIMED_OUT not in str(error):
                raise
            say("Ray's processes did not start in time, as on a busy machine: they are started once more.")
            self.kill_all_processes(check_alive=False, wait=True)
            vars(self).clear()
            super().__init__(again, head=head, **options)


def prepare_node(platform: str = sys.platform) -> None:
    """Make `ray.init` start a node patiently; on macOS also load the agents' libraries, in a child process."""
    ray._private.node.Node = PatientNode  # type: ignore[misc]
    if platform == "darwin":
        warm_agents()


def warm_agents() -> None:
    """Load the libraries of Ray's agents, so that macOS has scanned them when the agents must start in time."""
    child = subprocess.Popen(
        [sys.executable, "-c", AGENTS], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        child.wait(SCAN_S)
    except subprocess.TimeoutExpired:
        say(
            "Ray's libraries are being loaded; at the first start macOS scans each of them, which takes up to a minute."
        )
        try:
            child.wait(MAX_WARM_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
