"""Autoscaling policy: replicas by the living nodes that offer a resource, `mlx` or `mlx_scorer`, not by load."""

import time
from typing import Any, Literal, get_args

import ray

from deployments import policy_state
from engine.gpus import MAX_ENGINES

Resource = Literal["mlx", "mlx_scorer"]
"""`mlx`: the node holds as many engines. `mlx_scorer`: the node holds a scorer for sparse prefill."""

NODES_CACHED_S = 2.0

HEAD_NODE = "node:__internal_head__"
"""Ray's own resource of the head node of every cluster."""

HEAD_SHARE = 0.001


def nodes_offering(resource: Resource) -> list[str]:
    """Return the ids of the living nodes with at least 1.0 of the resource, enough for one replica.

    In a cluster without any of these resources, such as one started by `serve run`, the head node counts for both.
    """
    nodes = _living_nodes()
    if _offer_nothing(nodes):
        return [node["NodeID"] for node in nodes if HEAD_NODE in node["Resources"]]
    return [node["NodeID"] for node in nodes if node["Resources"].get(resource, 0) >= 1]


def engines_by_node(num_without_resources: int) -> dict[str, int]:
    """Return the number of engines of each living node that holds any: as much as it offers of `mlx`, at most 16.

    Args:
        num_without_resources: Number of engines of the head node in a cluster without any of these resources.
    """
    nodes = _living_nodes()
    if _offer_nothing(nodes):
        return {node["NodeID"]: num_without_resources for node in nodes if HEAD_NODE in node["Resources"]}
    offered = {node["NodeID"]: int(node["Resources"].get("mlx", 0)) for node in nodes}
    return {node_id: min(num, MAX_ENGINES) for node_id, num in offered.items() if num}


def offers_nothing() -> bool:
    """Tell whether no node of the cluster offers `mlx` or `mlx_scorer`."""
    return _offer_nothing(_living_nodes())


def num_living_nodes() -> int:
    """Return the number of living nodes of the cluster."""
    return len(_living_nodes())


def _living_nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _offer_nothing(nodes: list[dict[str, Any]]) -> bool:
    return not any(node["Resources"].get(resource, 0) > 0 for node in nodes for resource in get_args(Resource))


class OnePerOfferingNode:
    """Autoscaling policy of every deployment, independent of load: one replica per node, or all its engines.

    A deployment that waits for another one gets no replica before the other has one: the first answer does not need the
    scorer, which therefore does not compete for CPU with the start of those that it needs.
    """

    def __init__(
        self, resource: Resource, waits_for: str | None = None, num_without_resources: int | None = None
    ) -> None:
        """Create the policy of one deployment.

        Args:
            resource: Resource that a node must offer.
            waits_for: Name of a deployment of the same application that must start first; None: none.
            num_without_resources: Of the engines' deployment, see engines_by_node; None: one replica per node.
        """
        self._resource: Resource = resource
        self._waits_for = waits_for
        self._num_without_resources = num_without_resources
        self._num_replicas = 1
        self._counted_at = float("-inf")

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas. Serve calls this every 0.1 s, so the node list is cached."""
        application = str(context.app_name)
        if context.current_num_replicas > 0:
            policy_state.STARTED.add((application, context.deployment_name))
        if self._waits_for is not None and (application, self._waits_for) not in policy_state.STARTED:
            return 0, {}
        if time.monotonic() - self._counted_at > NODES_CACHED_S:
            self._counted_at = time.monotonic()
            self._num_replicas = max(1, self._count())
        return self._num_replicas, {}

    def _count(self) -> int:
        if self._num_without_resources is None:
            return len(nodes_offering(self._resource))
        return sum(engines_by_node(self._num_without_resources).values())
