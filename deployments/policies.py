"""How many replicas a deployment has: one per living node that offers the resource `mlx`."""

import time
from typing import Any

import ray

MLX_NODES_CACHED_S = 2.0


def mlx_node_ids() -> list[str]:
    """The living nodes on which one engine fits."""
    return [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("mlx", 0) >= 1]


class OnePerMlxNode:
    """Serve's controller calls it every 0.1 s, so it remembers the nodes for a while. Load plays no part."""

    def __init__(self) -> None:
        self._num_nodes = 1
        self._counted_at = float("-inf")

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        if time.monotonic() - self._counted_at > MLX_NODES_CACHED_S:
            self._counted_at = time.monotonic()
            self._num_nodes = max(1, len(mlx_node_ids()))
        return self._num_nodes, {}
