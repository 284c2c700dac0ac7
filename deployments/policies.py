"""How many replicas a deployment has: one per living node that offers a resource, `mlx` or `mlx_scorer`."""

import time
from typing import Any, Literal, get_args

import ray

from deployments import started

Resource = Literal["mlx", "mlx_scorer"]
"""`mlx`: the node is to hold an engine. `mlx_scorer`: it is to hold a scorer of long prompts."""

NODES_CACHED_S = 2.0

HEAD_NODE = "node:__internal_head__"
"""Ray's own resource of the head node of every cluster."""

HEAD_SHARE = 0.001


def nodes_offering(resource: Resource) -> list[str]:
    """The ids of the living nodes that offer a whole one: room for one replica that takes most of it.

    In a cluster in which no node offers any of our resources, as one that `serve run` starts, the head offers both.
    """
    nodes = _living_nodes()
    if _offer_nothing(nodes):
        return [node["NodeID"] for node in nodes if HEAD_NODE in node["Resources"]]
    return [node["NodeID"] for node in nodes if node["Resources"].get(resource, 0) >= 1]


def offers_nothing() -> bool:
    """Whether no node of the cluster offers any of our resources."""
    return _offer_nothing(_living_nodes())


def num_living_nodes() -> int:
    return len(_living_nodes())


def _living_nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _offer_nothing(nodes: list[dict[str, Any]]) -> bool:
    return not any(node["Resources"].get(resource, 0) > 0 for node in nodes for resource in get_args(Resource))


class OnePerOfferingNode:
    """The autoscaling policy of every deployment; load plays no part.

    A deployment that waits for another one has no replica until the other has its first. The first answer needs only
    the ingress, the text planner and an engine, so their processes start before those of the image planner and the
    scorer compete with them for the processor.
    """

    def __init__(self, resource: Resource, waits_for: str | None = None) -> None:
        """waits_for: name of a deployment of the same application."""
        self._resource: Resource = resource
        self._waits_for = waits_for
        self._num_nodes = 1
        self._counted_at = float("-inf")

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas; Serve calls this every 0.1 s, so the nodes are remembered for a while."""
        application = str(context.app_name)
        if context.current_num_replicas > 0:
            started.STARTED.add((application, context.deployment_name))
        if self._waits_for is not None and (application, self._waits_for) not in started.STARTED:
            return 0, {}
        if time.monotonic() - self._counted_at > NODES_CACHED_S:
            self._counted_at = time.monotonic()
            self._num_nodes = max(1, len(nodes_offering(self._resource)))
        return self._num_nodes, {}
