"""The order in which snapshots are evicted, the bytes that this frees, and the cost of computing them again. Pure."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from engine.core.prefix_cache.node import CacheEntry, Lineage, SnapshotNode
from engine.core.prefix_cache.reuse_forecast import ReuseForecast, odds_key_of


@dataclass(frozen=True, slots=True)
class Victim:
    """An entry to evict, given that all entries before it in the order are evicted."""

    entry: CacheEntry
    freed_bytes: int
    lost_s: float
    """Seconds to recompute or read the snapshot again, from the nearest one before it that is in memory."""
    rate: float
    """Expected uses per second."""
    probability: float
    """Probability that it is used again at all."""


class EvictionOrder:
    """Iterates over entries by lost_s * rate / freed_bytes, the smallest first; ties keep the given order.

    Nothing is evicted here: the effects of planned evictions are tracked separately. A heap holds each entry's density
    at the time when it was pushed. Most planned evictions raise the density of other entries, which is corrected
    lazily: an entry whose density has grown is pushed back when it is popped. The density of the entry before a victim
    may fall, as its eviction may now free more KV segments: it is pushed again at once.

    Args:
        entries: Entries with snapshots in memory that are not pinned.
        forecast: Predicts reuse.
        cost: Returns the seconds to restore an entry's snapshot, given the tokens in memory before it.
        now: Monotonic seconds.
        passed: A lineage that is about to get a longer snapshot, so that no entry of it is the tip (see Stage in
            reuse_forecast.py).
    """

    def __init__(
        self,
        entries: Iterable[CacheEntry],
        forecast: ReuseForecast,
        cost: Callable[[CacheEntry, int], float],
        now: float,
        passed: Lineage | None = None,
    ):
        self._forecast = forecast
        self._cost = cost
        self._now = now
        self._passed = passed
        self._planned: set[CacheEntry] = set()
        self._num_freed_dependents: dict[SnapshotNode, int] = {}
        self._rank = {entry: i for i, entry in enumerate(entries)}
        self._heap = [(self._density(entry), i, entry) for entry, i in self._rank.items()]
        heapify(self._heap)

    def __iter__(self) -> Iterator[Victim]:
        while self._heap:
            density, rank, entry = heappop(self._heap)
            if entry in self._planned:
                continue
            victim = self._victim(entry)
            if (changed := _density(victim)) > density:
                heappush(self._heap, (changed, rank, entry))
                continue
            in_front = self._plan(entry)
            if in_front is not None and in_front in self._rank:  # pinned entries are not
                heappush(self._heap, (self._density(in_front), self._rank[in_front], in_front))
            yield victim

    def _density(self, entry: CacheEntry) -> float:
        return _density(self._victim(entry))

    def _victim(self, entry: CacheEntry) -> Victim:
        node, lineage = entry.node, entry.lineage
        assert node is not None
        in_front = self._in_front_of(node)
        lost_s = self._cost(entry, in_front.num_tokens if in_front is not None else 0)
        key = odds_key_of(entry, self._tip(entry))
        rate = self._forecast.rate(lineage, key, self._now)
        return Victim(entry, self._freed_bytes(node), lost_s, rate, self._forecast.probability(lineage, key, self._now))

    def _tip(self, entry: CacheEntry) -> CacheEntry | None:
        if entry.lineage is self._passed:
            return None
        return next((e for e in reversed(entry.lineage.entries) if e not in self._planned), None)

    def _in_front_of(self, node: SnapshotNode) -> CacheEntry | None:
        parent = node.parent
        while parent is not None and self._is_freed(parent):
            parent = parent.parent
        return parent.entry if parent is not None else None

    def _is_freed(self, node: SnapshotNode) -> bool:
        return node.snapshot is None or node.entry in self._planned

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

    def _plan(self, entry: CacheEntry) -> CacheEntry | None:
        """Mark an entry as evicted and return the nearest entry before it whose freed bytes may have changed."""
        self._planned.add(entry)
        node = entry.node
        while node is not None and self._is_freed(node) and self._num_dependents(node) == 0:
            node = node.parent
            if node is not None:
                self._num_freed_dependents[node] = self._num_freed_dependents.get(node, 0) + 1
        return node.entry if node is not None and not self._is_freed(node) else None


def _density(victim: Victim) -> float:
    return victim.lost_s * victim.rate / max(victim.freed_bytes, 1)
