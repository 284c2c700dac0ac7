"""How many replicas a deployment has: one per living node that offers a resource, `mlx` or `mlx_scorer`."""

import time
from typing import Any, Literal

import ray

Resource = Literal["mlx", "mlx_scorer"]
"""`mlx`: the node is to hold an engine. `mlx_scorer`: it is to hold a scorer of long prompts."""

NODES_CACHED_S = 2.0


def nodes_offering(resource: Resource) -> list[str]:
    """The ids of the living nodes that offer a whole one: room for one replica that takes most of it."""
    return [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get(resource, 0) >= 1]


class OnePerOfferingNode:
    """Serve's controller calls it every 0.1 s, so it remembers the nodes for a while. Load plays no part."""

    def __init__(self, resource: Resource) -> None:
        self._resource: Resource = resource
        self._num_nodes = 1
        self._counted_at = float("-inf")

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        if time.monotonic() - self._counted_at > NODES_CACHED_S:
            self._counted_at = time.monotonic()
            self._num_nodes = max(1, len(nodes_offering(self._resource)))
        return self._num_nodes, {}
