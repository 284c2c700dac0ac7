"""SnapshotMemory: how much memory snapshots may take, which are stored, and which are evicted for others. Pure.

Memory goes to the snapshots that save the most seconds of computing per second and byte: the seconds to recompute one
after the nearest snapshot in memory before it, times the predicted rate of its reuse (reuse_forecast.py), divided by
the bytes that its eviction frees (eviction.py). This is GDSF (Cherkasova, 1998) with a forecast in place of a use
count. A snapshot worth less than those it would evict is not stored, as in TinyLFU (Einziger et al., 2017), but its
conversation is remembered and gains value when it comes back.
"""

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import inf

from engine.config import SnapshotKind
from engine.core.prefix_cache.cache import PrefixCache
from engine.core.prefix_cache.eviction import EvictionOrder, Victim
from engine.core.prefix_cache.node import CacheEntry, Lineage, Snapshot, SnapshotNode
from engine.core.prefix_cache.prompt_key import PromptKey

MARGIN = 1.5
"""Factor by which a new snapshot must be worth more than those evicted for it."""

READ_BYTES_PER_SECOND = 1e9
"""Assumed rate of reading from disk where nothing predicts it."""


@dataclass(frozen=True, slots=True)
class NewBoundary:
    """A snapshot that is about to be stored if it is worth more than others."""

    key: PromptKey
    kind: SnapshotKind
    lineage: Lineage
    prompt: str
    """Id of the row whose prompt it belongs to; '' if unknown."""


class SnapshotMemory:
    """Stores snapshots in the cache's memory and evicts the least valuable ones.

    Args:
        cache: The stored snapshots.
        max_bytes: Upper bound of their memory.
        seconds: Predicts the seconds of computing the tokens from start to end of a prompt.
        read_seconds: Predicts the seconds of reading a number of bytes from disk.
        room: Returns the bytes that the engine has for snapshots now, at most max_bytes of which are used.
        max_snapshots: See MemoryCosts.
    """

    def __init__(
        self,
        cache: PrefixCache,
        max_bytes: int,
        seconds: Callable[[int, int], float] = lambda start, end: float(end - start),
        read_seconds: Callable[[int], float] = lambda num_bytes: num_bytes / READ_BYTES_PER_SECOND,
        room: Callable[[], int] = lambda: sys.maxsize,
        max_snapshots: int = sys.maxsize,
    ):
        self.cache = cache
        self.max_bytes = max_bytes
        self.seconds = seconds
        self._read_seconds = read_seconds
        self._room = room
        self._max_snapshots = max_snapshots

    @property
    def limit_bytes(self) -> int:
        """Bytes that all snapshots may take now."""
        return min(self.max_bytes, self._room())

    @property
    def missing_bytes(self) -> int:
        """Bytes by which the snapshots exceed their memory; negative if they fit."""
        return self.cache.num_bytes - self.limit_bytes

    def can_hold(self, num_bytes: int) -> bool:
        """Return whether `num_bytes` more would fit if everything evictable were evicted."""
        return self.cache.tree.unevictable_bytes() + num_bytes <= self.limit_bytes

    def store(
        self,
        entry: CacheEntry,
        snapshot: Snapshot,
        parent: SnapshotNode | None,
        prompt: str = "",
        is_for_row: bool = False,
    ) -> bool:
        """Store a snapshot, evicting less valuable ones; return False if it is rejected.

        Args:
            entry: A new entry, or one that was only on disk; the latter is never rejected for its value.
            snapshot: The snapshot.
            parent: The node before the snapshot's own KV segment.
            prompt: See `evict_for`.
            is_for_row: Whether the snapshot moves to a row that is about to continue it: the KV segment counts as the
                row's memory, to which it is lent next, and the state is stored even if it does not fit.
        """
        known = self.cache.index.get(entry.digest)
        assert entry.node is None and known in (None, entry)
        segment_bytes, new = 0 if is_for_row else snapshot.segment_bytes, None
        if known is None:
            boundary = self._new_boundary(entry.key, entry.kind, parent, prompt)
            entry.lineage, new = boundary.lineage, None if entry.pinned else boundary
        with self.cache.tree.holding(parent):  # the parent must not be evicted for its child
            has_room = self._evict_for(segment_bytes + snapshot.state_bytes, parent, new)
            if not (has_room and self._evict_for_arrays()) and not is_for_row:
                return False
            self.cache.put(entry, snapshot, parent, segment_bytes)
        return True

    def evict_for(
        self,
        num_bytes: int,
        parent: SnapshotNode | None,
        key: PromptKey | None = None,
        kind: SnapshotKind = "turn",
        prompt: str = "",
    ) -> bool:
        """Evict what is worth less than a snapshot that is about to be taken.

        Args:
            num_bytes: Bytes of the snapshot.
            parent: The node before its KV segment.
            key: The tokens before its boundary; None if anything evictable may be evicted for it, whatever its worth.
            kind: Kind of its boundary.
            prompt: Id of the row whose prompt it belongs to. A rejected snapshot that the same prompt asks for again
                does not count as reuse.

        Returns:
            False, with nothing evicted, if its memory cannot be freed or is not worth it.
        """
        new = None if key is None else self._new_boundary(key, kind, parent, prompt)
        return self._evict_for(num_bytes, parent, new)

    def evict_for_return(self, lent: Sequence[SnapshotNode]) -> bool:
        """Evict snapshots to copy lent KV segments of one chain back, if the snapshots that need them are worth more.

        Args:
            lent: Nodes of one chain, the first one first.

        Returns:
            False, with nothing evicted, if their memory cannot be freed or is not worth it.
        """
        behind = self.cache.tree.entries_behind(lent[0])
        if not behind:
            return False
        last = max(behind, key=lambda entry: entry.num_tokens)
        is_needed = any(entry.pinned or entry.is_resume_point for entry in behind)
        new = None if is_needed else NewBoundary(last.key, last.kind, last.lineage, "")
        return self._evict_for(sum(node.lent_bytes for node in lent), lent[0].parent, new, behind)

    def evict(self, num_bytes: int = 1, overhead_bytes: int = 0) -> bool:
        """Evict the least valuable entries until `num_bytes` are free; return False if nothing can be evicted.

        Ordering a thousand entries takes 7 ms, and evicting all of them 20 ms more, on one core of a server.

        Args:
            num_bytes: Bytes to free.
            overhead_bytes: Bytes that each snapshot takes beside its own.
        """
        victims, _ = self._plan(num_bytes, overhead_bytes)
        self._evict(victims)
        return bool(victims)

    def fit(self, spared: Collection[CacheEntry] = ()) -> None:
        """Evict the least valuable entries, except `spared`, until the cache fits into its memory."""
        if (missing := self.missing_bytes) > 0:
            self._evict(self._plan(missing, spared=spared)[0])

    def price(self, num_bytes: int, overhead_bytes: int = 0) -> float:
        """Return the expected seconds of recomputation that `evict` would cause; inf if `num_bytes` cannot be freed.

        Each snapshot counts with its probability of reuse.
        """
        victims, freed_bytes = self._plan(num_bytes, overhead_bytes)
        return sum(victim.lost_s * victim.probability for victim in victims) if freed_bytes >= num_bytes else inf

    def _new_boundary(
        self, key: PromptKey, kind: SnapshotKind, parent: SnapshotNode | None, prompt: str
    ) -> NewBoundary:
        in_front = parent.entry if parent is not None else None
        lineage = self.cache.lineages.of_new(key, kind, in_front, prompt, self.cache.clock())
        return NewBoundary(key, kind, lineage, prompt)

    def _evict_for(
        self, num_bytes: int, parent: SnapshotNode | None, new: NewBoundary | None, behind: Collection[CacheEntry] = ()
    ) -> bool:
        """Implement `evict_for`.

        Args:
            num_bytes: Bytes to free.
            parent: The node before the new KV segment.
            new: The snapshot whose value is compared; None if anything evictable may be evicted, whatever its worth.
            behind: Entries in memory whose lent KV segments the bytes are for; none of them is evicted.
        """
        counters, limit = self.cache.counters, self.limit_bytes
        if self.cache.tree.unevictable_bytes(parent) + num_bytes > limit:
            counters.num_rejected += 1
            return False
        missing = self.cache.num_bytes + num_bytes - limit
        if missing <= 0:
            return True
        in_front = parent.nearest_entry() if parent is not None else None
        passed = new.lineage if new is not None and not behind else None
        victims, freed_bytes = self._plan(missing, passed=passed, spared=behind)
        if behind and freed_bytes < missing:
            counters.num_rejected += 1
            return False
        worth = sum(victim.lost_s * victim.rate for victim in victims)
        if new is not None and MARGIN * worth > self._value(new, in_front):
            counters.num_rejected += 1
            counters.num_outvalued += 1
            self.cache.lineages.rejected(new.key, new.kind, new.lineage, new.prompt)
            return False
        self._evict(victims)
        return True

    def _evict_for_arrays(self) -> bool:
        """Evict the least valuable entries until the device allows the arrays of one more snapshot.

        A sixteenth is evicted at a time, as their order takes long.

        Returns:
            False if nothing more can be evicted.
        """
        tree = self.cache.tree
        while tree.num_nodes >= self._max_snapshots and tree.evictable:
            victims, _ = self._plan(sys.maxsize)
            self._evict(victims[: max(1, len(victims) // 16)])
        return tree.num_nodes < self._max_snapshots

    def _evict(self, victims: Sequence[Victim]) -> None:
        for victim in victims:
            self.cache.evict(victim.entry)

    def _plan(
        self,
        num_bytes: int,
        overhead_bytes: int = 0,
        passed: Lineage | None = None,
        spared: Collection[CacheEntry] = (),
    ) -> tuple[list[Victim], int]:
        """Return the least valuable entries, except `spared`, that free `num_bytes`, and the bytes freed.

        All entries except `spared` are returned if together they free fewer bytes.
        """
        candidates = [entry for entry in self.cache.tree.evictable.values() if entry not in spared]
        forecast, now = self.cache.lineages.forecast, self.cache.clock()
        order = iter(EvictionOrder(candidates, forecast, self._cost, now, passed))
        victims, freed_bytes = list[Victim](), 0
        while freed_bytes < num_bytes and (victim := next(order, None)) is not None:
            victims.append(victim)
            freed_bytes += victim.freed_bytes + overhead_bytes
        return victims, freed_bytes

    def _value(self, new: NewBoundary, in_front: CacheEntry | None) -> float:
        """Return the seconds of computing per second that a new snapshot is expected to save."""
        start = in_front.num_tokens if in_front is not None else 0
        rate = self.cache.lineages.rate_of_new(new.lineage, new.kind, self.cache.clock())
        return self.seconds(start, len(new.key)) * rate

    def _cost(self, entry: CacheEntry, start: int) -> float:
        """Return the seconds to recompute or read back an entry's snapshot after one of `start` tokens."""
        computed_s = self.seconds(start, entry.num_tokens)
        if entry.node is None or self.cache.file_parent(entry.digest) is None:
            return computed_s
        return min(computed_s, self._read_seconds(entry.node.segment_bytes + entry.node.state_bytes))
