"""SnapshotMemory: how much memory snapshots may take, which are stored, and which are evicted for others. Pure.

Memory goes to the snapshots that save the most seconds of computing per second and byte: the seconds to recompute one
after the nearest snapshot in memory before it, times the predicted rate of its reuse (reuse_forecast.py), divided by
the bytes that its eviction frees (eviction.py). This is GDSF (Cherkasova, 1998) with a forecast in place of a use
count. A snapshot worth less than those it would evict is not stored, as in TinyLFU (Einziger et al., 2017), but its
conversation is remembered and gains value when it comes back.
"""

import sys
from collections.abc import Callable, Collection, Sequence
from math import inf

from engine.core.prefix_cache.eviction import EvictionOrder, PlannedEviction
from engine.core.prefix_cache.node import Lineage, Snapshot, SnapshotNode
from engine.core.prefix_cache.store import SnapshotStore

MARGIN = 1.5
"""Factor by which a new snapshot must be worth more than those evicted for it."""

READ_BYTES_PER_SECOND = 1e9
"""Assumed rate of reading from disk where nothing predicts it."""


class SnapshotMemory:
    """Adds snapshots to the store, and evicts the least valuable ones for them.

    Args:
        store: The stored snapshots.
        max_bytes: Upper bound of their memory.
        seconds: Predicts the seconds of computing the tokens from start to end of a prompt.
        read_seconds: Predicts the seconds of reading a number of bytes from disk.
        room: Returns the bytes that the engine has for snapshots now, at most max_bytes of which are used.
        max_snapshots: See MemoryCosts.
    """

    def __init__(
        self,
        store: SnapshotStore,
        max_bytes: int,
        seconds: Callable[[int, int], float] = lambda start, end: float(end - start),
        read_seconds: Callable[[int], float] = lambda num_bytes: num_bytes / READ_BYTES_PER_SECOND,
        room: Callable[[], int] = lambda: sys.maxsize,
        max_snapshots: int = sys.maxsize,
    ):
        self.store = store
        self.max_bytes = max_bytes
        self.seconds = seconds
        self.read_seconds = read_seconds
        self._room = room
        self._max_snapshots = max_snapshots

    @property
    def limit_bytes(self) -> int:
        """Bytes that all snapshots may take now."""
        return min(self.max_bytes, self._room())

    @property
    def missing_bytes(self) -> int:
        """Bytes by which the snapshots exceed their memory; negative if they fit."""
        return self.store.num_bytes - self.limit_bytes

    def can_hold(self, num_bytes: int, node: SnapshotNode | None = None) -> bool:
        """Return whether `num_bytes` more would fit if everything evictable were evicted.

        Args:
            num_bytes: Bytes to add.
            node: A node whose KV segments stay, as if a prompt in progress held it.
        """
        return self.store.unevictable_bytes(node) + num_bytes <= self.limit_bytes

    def add(
        self,
        node: SnapshotNode,
        snapshot: Snapshot,
        parent: SnapshotNode | None,
        row_id: str = "",
        is_for_row: bool = False,
    ) -> SnapshotNode | None:
        """Add a snapshot to memory, evicting less valuable ones; return its node, see `SnapshotStore.add`.

        Args:
            node: A new node, or one that was only on disk; the latter is never rejected for its value.
            snapshot: The snapshot.
            parent: The node before the snapshot's own KV segment.
            row_id: See `evict_for`.
            is_for_row: Whether the snapshot moves to a row that is about to continue it: the KV segment counts as the
                row's memory, to which it is lent next, and the state is stored even if it does not fit.

        Returns:
            None if the snapshot is rejected.
        """
        known = self.store.get(node.digest)
        assert node.snapshot is None and known in (None, node)
        segment_bytes, new = 0 if is_for_row else snapshot.segment_bytes, None
        if known is None:
            self._find_lineage(node, parent, row_id)
            new = None if node.pinned else node
        with self.store.holding(parent):  # the parent must not be evicted for its child
            has_room = self._evict_for(segment_bytes + snapshot.state_bytes, parent, new, row_id)
            if not (has_room and self._evict_for_arrays()) and not is_for_row:
                return None
            return self.store.add(node, snapshot, parent, segment_bytes)

    def evict_for(
        self, num_bytes: int, parent: SnapshotNode | None, new: SnapshotNode | None = None, row_id: str = ""
    ) -> bool:
        """Evict what is worth less than a snapshot that is about to be taken.

        Args:
            num_bytes: Bytes of the snapshot.
            parent: The node before its KV segment.
            new: Its node; None if anything evictable may be evicted for it, whatever its worth.
            row_id: The row whose tokens it has, see `Lineages.of_new`.

        Returns:
            False, with nothing evicted, if its memory cannot be freed or is not worth it.
        """
        if new is not None:
            self._find_lineage(new, parent, row_id)
        return self._evict_for(num_bytes, parent, new, row_id)

    def evict_for_return(self, lent: Sequence[SnapshotNode]) -> bool:
        """Evict snapshots to copy lent KV segments of one chain back, if the snapshots that need them are worth more.

        Args:
            lent: Nodes of one chain, the first one first.

        Returns:
            False, with nothing evicted, if their memory cannot be freed or is not worth it.
        """
        needing = self.store.nodes_that_need(lent[0])
        if not needing:
            return False
        last = max(needing, key=lambda node: node.num_tokens)
        is_needed = any(node.pinned or node.is_resume_point for node in needing)
        num_bytes = sum(node.owned_bytes for node in lent)
        return self._evict_for(num_bytes, lent[0].parent, None if is_needed else last, needing=needing)

    def evict(self, num_bytes: int = 1, overhead_bytes: int = 0) -> bool:
        """Evict the least valuable snapshots until `num_bytes` are free; return False if nothing can be evicted.

        Ordering a thousand snapshots takes 7 ms, and evicting all of them 20 ms more, on one core of a server.

        Args:
            num_bytes: Bytes to free.
            overhead_bytes: Bytes that each snapshot takes beside its own.
        """
        victims, _ = self._plan(num_bytes, overhead_bytes)
        self._evict(victims)
        return bool(victims)

    def fit(self, kept: Collection[SnapshotNode] = ()) -> None:
        """Evict the least valuable snapshots, except `kept`, until the cache fits into its memory."""
        if (missing := self.missing_bytes) > 0:
            self._evict(self._plan(missing, kept=kept)[0])

    def price(self, num_bytes: int, overhead_bytes: int = 0) -> float:
        """Return the expected seconds of recomputation that `evict` would cause; inf if `num_bytes` cannot be freed.

        Each snapshot counts with its probability of reuse.
        """
        victims, freed_bytes = self._plan(num_bytes, overhead_bytes)
        return sum(victim.lost_s * victim.probability for victim in victims) if freed_bytes >= num_bytes else inf

    def _find_lineage(self, new: SnapshotNode, parent: SnapshotNode | None, row_id: str) -> None:
        new.lineage = self.store.lineages.of_new(new.key, new.kind, parent, row_id, self.store.clock())

    def _evict_for(
        self,
        num_bytes: int,
        parent: SnapshotNode | None,
        new: SnapshotNode | None,
        row_id: str = "",
        needing: Collection[SnapshotNode] = (),
    ) -> bool:
        """Implement `evict_for`.

        Args:
            num_bytes: Bytes to free.
            parent: The node before the new KV segment.
            new: The snapshot whose value is compared; None if anything evictable may be evicted, whatever its worth.
            row_id: See `evict_for`.
            needing: Snapshots in memory whose lent KV segments the bytes are for; none of them is evicted.
        """
        counters, limit = self.store.counters, self.limit_bytes
        if self.store.unevictable_bytes(parent) + num_bytes > limit:
            counters.num_rejected += 1
            return False
        missing = self.store.num_bytes + num_bytes - limit
        if missing <= 0:
            return True
        before = parent.nearest_in_memory() if parent is not None else None
        growing = new.lineage if new is not None and not needing else None
        victims, freed_bytes = self._plan(missing, growing=growing, kept=needing)
        if needing and freed_bytes < missing:
            counters.num_rejected += 1
            return False
        worth = sum(victim.lost_s * victim.rate for victim in victims)
        if new is not None and MARGIN * worth > self._value(new, before):
            counters.num_rejected += 1
            counters.num_outvalued += 1
            self.store.lineages.rejected(new, row_id)
            return False
        self._evict(victims)
        return True

    def _evict_for_arrays(self) -> bool:
        """Evict the least valuable snapshots until the device allows the arrays of one more snapshot.

        A sixteenth is evicted at a time, as their order takes long.

        Returns:
            False if nothing more can be evicted.
        """
        store = self.store
        while store.num_segments >= self._max_snapshots and store.num_in_memory > len(store.pinned):
            victims, _ = self._plan(sys.maxsize)
            self._evict(victims[: max(1, len(victims) // 16)])
        return store.num_segments < self._max_snapshots

    def _evict(self, victims: Sequence[PlannedEviction]) -> None:
        for victim in victims:
            self.store.evict(victim.node)

    def _plan(
        self,
        num_bytes: int,
        overhead_bytes: int = 0,
        growing: Lineage | None = None,
        kept: Collection[SnapshotNode] = (),
    ) -> tuple[list[PlannedEviction], int]:
        """Return the least valuable snapshots, except `kept`, that free `num_bytes`, and the bytes freed.

        All except `kept` are returned if together they free fewer bytes.
        """
        candidates = [node for node in self.store.evictable if node not in kept]
        forecast, now = self.store.lineages.forecast, self.store.clock()
        order = iter(EvictionOrder(candidates, forecast, self._cost, now, growing))
        victims, freed_bytes = list[PlannedEviction](), 0
        while freed_bytes < num_bytes and (victim := next(order, None)) is not None:
            victims.append(victim)
            freed_bytes += victim.freed_bytes + overhead_bytes
        return victims, freed_bytes

    def _value(self, new: SnapshotNode, before: SnapshotNode | None) -> float:
        """Return the seconds of computing per second that a new snapshot is expected to save."""
        start = before.num_tokens if before is not None else 0
        rate = self.store.lineages.rate_of_new(new.lineage, new.kind, self.store.clock())
        return self.seconds(start, len(new.key)) * rate

    def _cost(self, node: SnapshotNode, start: int) -> float:
        """Return the seconds to recompute or read back a snapshot in memory after one of `start` tokens."""
        computed_s = self.seconds(start, node.num_tokens)
        if not self.store.has_file(node):
            return computed_s
        return min(computed_s, self.read_seconds(node.segment_bytes + node.state_bytes))
