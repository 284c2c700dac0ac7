"""PrefixCache: the stored snapshots, whose index, tree and conversations it keeps in agreement. Pure.

It decides nothing: snapshot_memory.py says which snapshots are stored and which are evicted for them.
"""

import time
from bisect import insort
from collections import deque
from collections.abc import Callable

from engine.core.prefix_cache.index import PrefixIndex
from engine.core.prefix_cache.lineages import Lineages
from engine.core.prefix_cache.node import CacheEntry, Snapshot, SnapshotNode
from engine.core.prefix_cache.tree import SnapshotTree
from engine.protocol import CacheCounters, CacheMiss

MAX_RECENT_MISSES = 32


class PrefixCache:
    """Stores, uses and removes entries.

    Args:
        clock: Returns monotonic seconds.
        file_parent: Returns None if a snapshot cannot be read from disk, else the digest of its parent there ('' for
            none).

    Attributes:
        index: Finds entries by prefix.
        tree: The snapshots in memory.
        lineages: The conversations that the entries belong to.
        counters: Counters to update.
        recent_misses: Explanations of the last misses, the newest first.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        file_parent: Callable[[str], str | None] = lambda digest: None,
    ):
        self.clock = clock
        self.file_parent = file_parent
        self.index = PrefixIndex()
        self.tree = SnapshotTree()
        self.lineages = Lineages()
        self.counters = CacheCounters()
        self.recent_misses: deque[CacheMiss] = deque(maxlen=MAX_RECENT_MISSES)

    @property
    def num_bytes(self) -> int:
        """Bytes of all snapshots in memory."""
        return self.tree.num_bytes

    def use(self, entry: CacheEntry) -> SnapshotNode:
        """Record a use by a prompt that continues the entry, and hold its node, see `SnapshotTree.hold`."""
        self.lineages.used(entry, self.clock())
        entry.num_hits += 1
        entry.is_resume_point = False
        self.touch(entry)
        return self.tree.hold(entry)

    def touch(self, entry: CacheEntry) -> None:
        """Mark an entry and its ancestors as used now."""
        now = self.clock()
        for one in self.index.path(entry):
            one.used_s = one.lineage.seen_s = now
            self.index.touch(one)
            self.tree.touch(one)

    def add(self, entry: CacheEntry) -> None:
        """Add an entry whose snapshot is only on disk."""
        assert entry.node is None
        entry.lineage = self.lineages.started(entry.kind, entry.used_s)
        self._insert(entry)

    def put(self, entry: CacheEntry, snapshot: Snapshot, parent: SnapshotNode | None, segment_bytes: int) -> None:
        """Store a snapshot, for which there must be memory.

        Args:
            entry: A new entry with its lineage, or one that was only on disk.
            snapshot: The snapshot.
            parent: The node before the snapshot's own KV segment.
            segment_bytes: Bytes of the KV segment that count as the cache's.
        """
        self.tree.add(entry, snapshot, parent, segment_bytes)
        insort(entry.lineage.entries, entry, key=lambda one: one.num_tokens)
        self.counters.num_stored += 1
        if self.index.get(entry.digest) is None:
            self._insert(entry)
        self.touch(entry)

    def evict(self, entry: CacheEntry) -> None:
        """Remove an entry from memory, and remember it as a ghost unless it stays on disk."""
        self.counters.num_evicted += 1
        self.lineages.evicted(entry)
        parent = self.file_parent(entry.digest)
        if parent is not None:
            self.forget_memory(entry)
            entry.parent = parent or None
            return
        self.lineages.remember(entry, "evicted")
        self.forget(entry)

    def evict_behind(self, node: SnapshotNode) -> None:
        """Evict all entries that need the node's KV segment, which is lost."""
        for entry in sorted(self.tree.entries_behind(node), key=lambda entry: -entry.num_tokens):
            self.evict(entry)

    def forget(self, entry: CacheEntry) -> None:
        """Remove an entry without remembering it as a ghost."""
        self.index.remove(entry)
        self.forget_memory(entry)

    def forget_memory(self, entry: CacheEntry) -> None:
        """Drop the snapshot of an entry from memory; its file may remain."""
        if entry.node is not None:
            entry.lineage.entries.remove(entry)
            self.tree.remove(entry)

    def prune(self) -> None:
        """Remove entries that were only on disk and whose files have been removed."""
        for entry in [e for e in self.index.entries() if e.node is None and self.file_parent(e.digest) is None][::-1]:
            self.lineages.remember(entry, "evicted")
            self.forget(entry)

    def clear(self) -> tuple[int, int]:
        """Remove everything but pinned entries and their ancestors. Return the entries and bytes freed."""
        pinned = self.tree.pinned.values()
        kept = {one.digest for entry in pinned for one in self.index.path(entry) if one.node is not None}
        removed, before = [entry for entry in self.index.entries() if entry.digest not in kept][::-1], self.num_bytes
        for entry in removed:
            self.lineages.remember(entry, "cleared")
            self.forget(entry)
        return len(removed), before - self.num_bytes

    def reset(self) -> None:
        """Drop everything, including state that an integrity error has made inconsistent."""
        self.tree.clear()
        self.index.clear()
        self.lineages.clear()

    def integrity_error(self) -> str | None:
        """Return the first inconsistency found while no prompt is being prefilled; None without one."""
        entries = list(self.index.entries())
        if (error := self.tree.integrity_error(entries)) is not None:
            return error
        in_lineages = sum(len(lineage.entries) for lineage in {entry.lineage for entry in entries})
        if in_lineages != self.tree.num_in_memory:
            return f"the lineages have {in_lineages} snapshots, but {self.tree.num_in_memory} are in memory"
        return self.index.integrity_error()

    def _insert(self, entry: CacheEntry) -> None:
        self.index.insert(entry)
        self.lineages.stored(entry.digest)
