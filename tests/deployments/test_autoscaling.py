import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ray import cloudpickle

from deployments import autoscaling, policy_state
from deployments.autoscaling import OnePerOfferingNode, engines_by_node, nodes_offering

ROOT = Path(__file__).parents[2]


def node(name: str, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"NodeID": name, "Alive": alive, "Resources": resources}


@dataclass
class Context:
    """The facts that Serve gives a policy about its own deployment."""

    deployment_name: str = "ModelReplica"
    app_name: str = "orchard"
    current_num_replicas: int = 0


@pytest.fixture(autouse=True)
def nothing_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_state, "STARTED", set())


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = []
    monkeypatch.setattr(autoscaling.ray, "nodes", lambda: nodes)
    return nodes


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(autoscaling.time, "monotonic", lambda: now[0])
    return now


def test_nodes_offering_mlx_are_living_nodes_with_a_whole_mlx_resource(cluster: list):
    cluster += [node("a", mlx=1), node("b", CPU=8), node("c", alive=False, mlx=1), node("d", mlx=0.5), node("e", mlx=2)]
    assert nodes_offering("mlx") == ["a", "e"]


def test_nodes_are_counted_separately_for_each_resource(cluster: list):
    cluster += [node("a", mlx=1), node("b", mlx=1, mlx_scorer=1), node("c", mlx_scorer=1), node("d", mlx_scorer=0.5)]
    assert (nodes_offering("mlx"), nodes_offering("mlx_scorer")) == (["a", "b"], ["b", "c"])
    cluster += [node("e", mlx_scorer=1)]
    assert (OnePerOfferingNode("mlx")(Context()), OnePerOfferingNode("mlx_scorer")(Context())) == ((2, {}), (3, {}))


def test_number_of_replicas_is_the_number_of_offering_nodes_and_at_least_one(cluster: list):
    assert OnePerOfferingNode("mlx")(Context()) == (1, {})
    cluster += [node("a", mlx=1), node("b", mlx=1), node("c")]
    assert OnePerOfferingNode("mlx")(Context()) == (2, {})


def test_engines_are_counted_by_the_resource_of_each_node(cluster: list):
    cluster += [node("a", mlx=2), node("b", mlx=1), node("c", mlx_scorer=1), node("d", alive=False, mlx=4)]
    assert engines_by_node(7) == {"a": 2, "b": 1}
    assert OnePerOfferingNode("mlx", num_without_resources=7)(Context()) == (3, {})


def test_a_node_that_offers_more_than_the_most_engines_has_the_most(cluster: list):
    cluster += [node("a", mlx=64), node("b", mlx=0.5)]
    assert engines_by_node(1) == {"a": 16}


def test_a_cluster_without_resources_has_the_engines_of_its_head(cluster: list):
    cluster += [{**node("a"), "Resources": {"CPU": 2, autoscaling.HEAD_NODE: 1}}]
    assert engines_by_node(2) == {"a": 2}
    assert OnePerOfferingNode("mlx", num_without_resources=2)(Context()) == (2, {})


def test_list_of_nodes_is_cached_for_a_while(cluster: list, clock: list[float]):
    policy = OnePerOfferingNode("mlx")
    cluster += [node("a", mlx=1)]
    assert policy(Context()) == (1, {})
    cluster += [node("b", mlx=1)]
    assert policy(Context()) == (1, {})
    clock[0] += autoscaling.NODES_CACHED_S + 0.1
    assert policy(Context()) == (2, {})


def test_waiting_deployment_starts_when_its_awaited_deployment_runs(cluster: list):
    cluster += [node("a", mlx=1), node("b", mlx=1)]
    engine, images = OnePerOfferingNode("mlx"), OnePerOfferingNode("mlx", waits_for="ModelReplica")
    assert engine(Context()) == (2, {})
    assert images(Context("MLLM")) == (0, {})
    engine(Context(current_num_replicas=1))
    assert images(Context("MLLM")) == (2, {})
    engine(Context(current_num_replicas=0))
    assert images(Context("MLLM", current_num_replicas=2)) == (2, {}), "an engine that restarts stops nothing"


def test_deployment_does_not_wait_for_a_deployment_of_another_application(cluster: list):
    cluster += [node("a", mlx=1)]
    OnePerOfferingNode("mlx")(Context(app_name="other", current_num_replicas=1))
    assert OnePerOfferingNode("mlx", waits_for="ModelReplica")(Context("MLLM")) == (0, {})


PICKLED = """
import sys
from ray.serve.config import AutoscalingPolicy
policy = AutoscalingPolicy(policy_function="deployments.autoscaling:OnePerOfferingNode")
sys.stdout.write(policy._serialized_policy_def.hex())
"""


def test_policies_pickled_in_different_processes_share_their_state(cluster: list):
    """Serve pickles the module of each policy by value, some where the app is built and some in its controller."""
    cluster += [node("a", mlx=1)]
    command = [sys.executable, "-W", "ignore", "-c", PICKLED]
    pickled = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    theirs = cloudpickle.loads(bytes.fromhex(pickled))
    assert theirs is not OnePerOfferingNode
    context = Context("MLLM")
    waiting = theirs("mlx", waits_for="ModelReplica")
    assert waiting(context) == (0, {})
    OnePerOfferingNode("mlx")(Context(current_num_replicas=1))
    assert waiting(context) == (1, {})
