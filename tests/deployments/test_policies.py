from typing import Any

import pytest

from deployments import policies
from deployments.policies import OnePerOfferingNode, nodes_offering


def node(name: str, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"NodeID": name, "Alive": alive, "Resources": resources}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = []
    monkeypatch.setattr(policies.ray, "nodes", lambda: nodes)
    return nodes


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(policies.time, "monotonic", lambda: now[0])
    return now


def test_only_living_nodes_with_a_whole_mlx_count(cluster: list):
    cluster += [node("a", mlx=1), node("b", CPU=8), node("c", alive=False, mlx=1), node("d", mlx=0.5), node("e", mlx=2)]
    assert nodes_offering("mlx") == ["a", "e"]


def test_each_resource_has_its_own_nodes(cluster: list):
    cluster += [node("a", mlx=1), node("b", mlx=1, mlx_scorer=1), node("c", mlx_scorer=1), node("d", mlx_scorer=0.5)]
    assert (nodes_offering("mlx"), nodes_offering("mlx_scorer")) == (["a", "b"], ["b", "c"])
    cluster += [node("e", mlx_scorer=1)]
    assert (OnePerOfferingNode("mlx")(None), OnePerOfferingNode("mlx_scorer")(None)) == ((2, {}), (3, {}))


def test_there_are_as_many_replicas_as_nodes_and_at_least_one(cluster: list):
    assert OnePerOfferingNode("mlx")(None) == (1, {})
    cluster += [node("a", mlx=1), node("b", mlx=1), node("c")]
    assert OnePerOfferingNode("mlx")(None) == (2, {})


def test_the_nodes_are_asked_for_again_only_after_a_while(cluster: list, clock: list[float]):
    policy = OnePerOfferingNode("mlx")
    cluster += [node("a", mlx=1)]
    assert policy(None) == (1, {})
    cluster += [node("b", mlx=1)]
    assert policy(None) == (1, {})
    clock[0] += policies.NODES_CACHED_S + 0.1
    assert policy(None) == (2, {})
