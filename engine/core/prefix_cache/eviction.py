"""The order in which snapshots are evicted, the bytes that this frees, and the cost of computing them again. Pure."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from engine.core.prefix_cache.node import Lineage, SnapshotNode
from engine.core.prefix_cache.reuse_forecast import ReuseForecast, odds_key_of


@dataclass(frozen=True, slots=True)
class PlannedEviction:
    """A snapshot to evict, given that all those before it in the order are evicted."""

    node: SnapshotNode
    freed_bytes: int
    lost_s: float
    """Seconds to recompute or read the snapshot again, from the nearest one before it that is in memory."""
    rate: float
    """Expected uses per second."""
    probability: float
    """Probability that it is used again at all."""


class EvictionOrder:
    """Iterates over snapshots by lost_s * rate / freed_bytes, the smallest first; ties keep the given order.

    Nothing is evicted here: the effects of planned evictions are tracked separately. A heap holds each node's density
    at the time when it was pushed. Most planned evictions raise the density of other nodes, which is corrected
    lazily: a node whose density has grown is pushed back when it is popped. The density of the node before a victim
    may fall, as its eviction may now free more KV segments: it is pushed again at once.

    Args:
        nodes: Snapshots in memory that are not pinned.
        forecast: Predicts reuse.
        cost: Returns the seconds to restore a snapshot, given the tokens in memory before it.
        now: Monotonic seconds.
        growing: A lineage that is about to get a longer snapshot, so that no node of it is the leaf (see Stage in
            reuse_forecast.py).
    """

    def __init__(
        self,
        nodes: Iterable[SnapshotNode],
        forecast: ReuseForecast,
        cost: Callable[[SnapshotNode, int], float],
        now: float,
        growing: Lineage | None = None,
    ):
        self._forecast = forecast
        self._cost = cost
        self._now = now
        self._growing = growing
        self._planned: set[SnapshotNode] = set()
        self._num_freed_dependents: dict[SnapshotNode, int] = {}
        self._rank = {node: i for i, node in enumerate(nodes)}
        self._heap = [(self._density(node), i, node) for node, i in self._rank.items()]
        heapify(self._heap)

    def __iter__(self) -> Iterator[PlannedEviction]:
        while self._heap:
            density, rank, node = heappop(self._heap)
            if node in self._planned:
                continue
            victim = self._victim(node)
            if (changed := _density(victim)) > density:
                heappush(self._heap, (changed, rank, node))
                continue
            before = self._plan(node)
            if before is not None and before in self._rank:  # pinned ones are not
                heappush(self._heap, (self._density(before), self._rank[before], before))
            yield victim

    def _density(self, node: SnapshotNode) -> float:
        return _density(self._victim(node))

    def _victim(self, node: SnapshotNode) -> PlannedEviction:
        before = self._nearest_before(node)
        lost_s = self._cost(node, before.num_tokens if before is not None else 0)
        lineage, key = node.lineage, odds_key_of(node, self._leaf(node))
        rate = self._forecast.rate(lineage, key, self._now)
        probability = self._forecast.probability(lineage, key, self._now)
        return PlannedEviction(node, self._freed_bytes(node), lost_s, rate, probability)

    def _leaf(self, node: SnapshotNode) -> SnapshotNode | None:
        if node.lineage is self._growing:
            return None
        return next((one for one in reversed(node.lineage.nodes) if one not in self._planned), None)

    def _nearest_before(self, node: SnapshotNode) -> SnapshotNode | None:
        parent = node.parent
        while parent is not None and self._is_freed(parent):
            parent = parent.parent
        return parent

    def _is_freed(self, node: SnapshotNode) -> bool:
        return node.snapshot is None or node in self._planned

    def _num_dependents(self, node: SnapshotNode) -> int:
        return node.num_dependents - self._num_freed_dependents.get(node, 0)

    def _freed_bytes(self, node: SnapshotNode) -> int:
        num_bytes, at, num_dependents = node.state_bytes, node, self._num_dependents(node)
        while num_dependents == 0:
            num_bytes += at.segment_bytes
            if at.parent is None or not self._is_freed(at.parent):
                break
            at = at.parent
            num_dependents = self._num_dependents(at) - 1
        return num_bytes

    def _plan(self, victim: SnapshotNode) -> SnapshotNode | None:
        """Mark a node as evicted and return the nearest one before it whose freed bytes may have changed."""
        self._planned.add(victim)
        node: SnapshotNode | None = victim
        while node is not None and self._is_freed(node) and self._num_dependents(node) == 0:
            node = node.parent
            if node is not None:
                self._num_freed_dependents[node] = self._num_freed_dependents.get(node, 0) + 1
        return node if node is not None and not self._is_freed(node) else None


def _density(victim: PlannedEviction) -> float:
    return victim.lost_s * victim.rate / max(victim.freed_bytes, 1)
