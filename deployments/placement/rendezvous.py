"""Weighted rendezvous hashing: the order of nodes for a key, equal at every ingress. Pure."""

from collections.abc import Mapping
from hashlib import blake2b

import numpy as np

ALL = slice(None)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class Rendezvous:
    """Ranks nodes for 64-bit keys.

    A node is the first of a share of all keys that is proportional to its weight, and a node that joins or leaves
    changes the order of no others (Thaler and Ravishankar 1998; weights as in Schindelhauer and Schomaker 2005).

    Args:
        weights: Node id -> weight > 0.

    Attributes:
        node_ids: The nodes.
    """

    def __init__(self, weights: Mapping[str, float]):
        self.node_ids = sorted(weights)
        hashes = [blake2b(node_id.encode(), digest_size=8).digest() for node_id in self.node_ids]
        self._hashes = np.frombuffer(b"".join(hashes), np.uint64)
        self._weights = np.array([weights[node_id] for node_id in self.node_ids])

    def ranked(self, key: int, num_nodes: int) -> list[str]:
        """Return the first `num_nodes` nodes for a key; fewer if there are fewer."""
        return self._named(self._first(self._scores(key), num_nodes))

    def ranked_among(self, key: int, group_key: int, group_size: int) -> list[str]:
        """Return the first `group_size` nodes for another key, in their order for a key."""
        group = self._first(self._scores(group_key), group_size)
        return self._named(group[np.argsort(-self._scores(key, group))])

    def _first(self, scores: np.ndarray, num_nodes: int) -> np.ndarray:
        """Return the indices of the nodes with the highest scores, the highest first."""
        if not (num_nodes := min(num_nodes, len(scores))):
            return np.empty(0, np.intp)
        first = np.argpartition(scores, -num_nodes)[-num_nodes:]
        return first[np.argsort(-scores[first])]

    def _named(self, indices: np.ndarray) -> list[str]:
        return [self.node_ids[index] for index in indices]

    def _scores(self, key: int, nodes: np.ndarray | slice = ALL) -> np.ndarray:
        """Return the nodes' scores: -1 / the weighted score, whose order is the same. The highest is the first."""
        uniform = (_mixed(self._hashes[nodes] ^ np.uint64(key % 2**64)) >> np.uint64(11)) * 2.0**-53
        return np.log(uniform + 2.0**-54) / self._weights[nodes]


def _mixed(values: np.ndarray) -> np.ndarray:
    """Return uint64 values whose bits all depend on all bits of the input (the finalizer of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    return values ^ (values >> np.uint64(31))
