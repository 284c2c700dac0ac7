"""Ray's node is started once more when its processes were too slow."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray._private.node

from deployments.serve_run import node_start
from deployments.serve_run.node_start import TIMED_OUT, PatientNode, prepare_node

NODE = PatientNode.__base__
"""Ray's own class."""

SLOW_AGENTS = """
import os, sys, time
if any(word.endswith(("dashboard/agent.py", "runtime_env/agent/main.py")) for word in sys.orig_argv):
    try:
        os.mkdir(os.environ["SLOW_ONCE"] + os.path.basename(os.path.dirname(sys.orig_argv[1])))
    except FileExistsError:
        pass
    else:
        time.sleep(22)
"""
"""A start-up file of Python: each agent of Ray is slow once, and the raylet waits 15 s."""

START = """
from deployments.serve_run.node_start import prepare_node
import ray
prepare_node()
ray.init(address="local", num_cpus=1, object_store_memory=100 * 2**20, include_dashboard=False)
print(ray.get(ray.remote(lambda: 41 + 1).remote()))
"""


class Starts:
    """Takes the place of Ray's own start of a node: fails once, after it has stored a port in the parameters."""

    def __init__(self, message: str):
        self.message = message
        self.ports: list[int] = []
        self.num_ended = 0

    def start(self, node: Any, ray_params: Any, head: bool = False, **options: Any) -> None:
        assert not vars(node), "nothing of the first start is left"
        self.ports.append(ray_params.port)
        ray_params.port = node.port = 7
        if len(self.ports) == 1:
            raise Exception(self.message)

    def end(self, node: Any, **how: Any) -> None:
        self.num_ended += 1


def starts(monkeypatch: pytest.MonkeyPatch, message: str) -> Starts:
    made = Starts(message)
    monkeypatch.setattr(NODE, "__init__", lambda node, *args, **options: made.start(node, *args, **options))
    monkeypatch.setattr(PatientNode, "kill_all_processes", lambda node, **how: made.end(node, **how))
    return made


def test_a_node_that_timed_out_is_ended_and_started_once_more_from_the_given_parameters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    made = starts(monkeypatch, f"{TIMED_OUT}. This could happen")
    PatientNode(SimpleNamespace(port=0), head=True)
    assert (made.ports, made.num_ended) == ([0, 0], 1)
    assert "did not start in time" in capsys.readouterr().err


@pytest.mark.parametrize("message, head", [("the port is in use", True), (TIMED_OUT, False)])
def test_other_failures_and_nodes_of_other_clusters_are_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, message: str, head: bool
):
    made = starts(monkeypatch, message)
    with pytest.raises(Exception, match=message):
        PatientNode(SimpleNamespace(port=0), head=head)
    assert (made.ports, made.num_ended) == ([0], 0)


def test_ray_init_uses_the_patient_node_and_a_mac_loads_the_agents_before(monkeypatch: pytest.MonkeyPatch):
    warmed: list[bool] = []
    monkeypatch.setattr(ray._private.node, "Node", NODE)
    monkeypatch.setattr(node_start, "warm_agents", lambda: warmed.append(True))
    prepare_node("linux")
    assert ray._private.node.Node is PatientNode and not warmed
    prepare_node("darwin")
    assert warmed


def test_the_libraries_of_the_agents_are_loaded_in_a_child_process():
    done = subprocess.run([sys.executable, "-c", node_start.AGENTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.night("it takes a minute; the second start is tested above, and Ray's agents are slow on no fast machine")
def test_a_cluster_starts_with_agents_that_are_slow_once(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(SLOW_AGENTS)
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])])
    temp = Path(f"/tmp/orc-{os.getpid()}")
    env = {**os.environ, "PYTHONPATH": path, "SLOW_ONCE": f"{tmp_path}/once-", "RAY_TMPDIR": str(temp)}
    temp.mkdir()
    try:
        done = subprocess.run([sys.executable, "-c", START], env=env, capture_output=True, text=True, timeout=300)
    finally:
        subprocess.run(["rm", "-r", str(temp)], check=False)
    assert done.returncode == 0, done.stderr
    assert "they are started once more" in done.stderr and done.stdout.strip().endswith("42")
