"""SnapshotTree: the snapshots in memory, the KV segments that they share, and their bytes. Pure.

Each snapshot has the KV segment after its parent and the recurrent state at its own end. Removing one frees its state
at once; its KV segment stays, and counts, while a descendant or a prompt in progress needs it.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from engine.core.prefix_cache.node import CacheEntry, Snapshot, SnapshotNode


class SnapshotTree:
    """Holds the nodes of the entries in memory and counts their bytes.

    Attributes:
        num_bytes: Bytes of all snapshots, including KV segments that outlive their entries.
        evictable: Entries in memory that are not pinned, by digest, the least recently used first.
        pinned: Pinned entries, by digest.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self.evictable: OrderedDict[str, CacheEntry] = OrderedDict()
        self.pinned: dict[str, CacheEntry] = {}
        self._loose: set[SnapshotNode] = set()  # nodes that have outlived their entries
        self._in_use: Counter[SnapshotNode] = Counter()  # nodes referenced by prompts in progress

    @property
    def num_in_memory(self) -> int:
        return len(self.evictable) + len(self.pinned)

    @property
    def num_nodes(self) -> int:
        """Nodes that have arrays: those of the entries, and those whose KV segments outlive their entries."""
        return self.num_in_memory + len(self._loose)

    def add(self, entry: CacheEntry, snapshot: Snapshot, parent: SnapshotNode | None, segment_bytes: int) -> None:
        """Add an entry's snapshot.

        Args:
            entry: The entry.
            snapshot: Its snapshot.
            parent: The node before the snapshot's own KV segment.
            segment_bytes: Bytes of the KV segment that count as the cache's.
        """
        assert entry.node is None
        if parent is not None:
            parent.num_dependents += 1
        entry.node = SnapshotNode(snapshot, snapshot.segment, parent, segment_bytes, snapshot.state_bytes, entry)
        self.num_bytes += segment_bytes + snapshot.state_bytes
        (self.pinned if entry.pinned else self.evictable)[entry.digest] = entry

    def remove(self, entry: CacheEntry) -> None:
        """Remove the snapshot of an entry that is in memory."""
        node, entry.node = entry.node, None
        assert node is not None
        self.evictable.pop(entry.digest, None)
        self.pinned.pop(entry.digest, None)
        node.snapshot = None
        self.num_bytes -= node.state_bytes
        self._loose.add(node)
        self._drop_if_unneeded(node)

    def pin(self, entry: CacheEntry) -> None:
        """Never evict an entry from now on."""
        if not entry.pinned and entry.node is not None:
            entry.pinned = True
            self.pinned[entry.digest] = self.evictable.pop(entry.digest)

    def touch(self, entry: CacheEntry) -> None:
        """Make an entry the most recently used one, if it is evictable."""
        if entry.digest in self.evictable:
            self.evictable.move_to_end(entry.digest)

    def hold(self, entry: CacheEntry) -> SnapshotNode:
        """Keep the KV segment of an entry in memory, even if it is evicted, until `release`; return its node."""
        assert entry.node is not None
        self._hold(entry.node)
        return entry.node

    def release(self, node: SnapshotNode) -> None:
        """Undo `hold`."""
        self._in_use[node] -= 1
        if self._in_use[node] <= 0:
            del self._in_use[node]
        node.num_dependents -= 1
        self._drop_if_unneeded(node)

    @contextmanager
    def holding(self, node: SnapshotNode | None) -> Iterator[None]:
        """Keep a node's KV segment until the end of the block."""
        if node is None:
            yield
            return
        self._hold(node)
        try:
            yield
        finally:
            self.release(node)

    def lend(self, node: SnapshotNode, row_id: str, num_bytes: int) -> None:
        """Count a KV segment of `num_bytes` as the row's memory, see loans.py."""
        self.num_bytes -= node.segment_bytes
        node.lent_to, node.lent_bytes, node.segment_bytes = row_id, num_bytes, 0

    def take_back(self, node: SnapshotNode) -> None:
        """Count a KV segment as the cache's memory again.

        Its bytes are the actual ones or, while it is lent, those expected once it is copied back.
        """
        num_bytes = node.lent_bytes if node.segment.is_lent else node.segment.num_bytes
        self.num_bytes += num_bytes - node.segment_bytes
        node.lent_to, node.segment_bytes = None, num_bytes

    def is_stored(self, node: SnapshotNode) -> bool:
        """Return whether an entry or a descendant still needs the node's KV segment."""
        digest = node.entry.digest
        stored = self.evictable.get(digest) or self.pinned.get(digest)
        return node in self._loose or (stored is node.entry and node.entry.node is node)

    def entries_behind(self, node: SnapshotNode) -> set[CacheEntry]:
        """Return the entries in memory that need a node's KV segment, its own included."""
        needs, behind = {node: True}, set[CacheEntry]()
        for entry in (*self.evictable.values(), *self.pinned.values()):
            seen, at = list[SnapshotNode](), entry.node
            while at is not None and at not in needs:
                seen.append(at)
                at = at.parent
            is_behind = at is not None and needs[at]
            needs.update(dict.fromkeys(seen, is_behind))
            if is_behind:
                behind.add(entry)
        return behind

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned snapshots and the KV segments before them."""
        return self._num_bytes_that_stay(())

    def unevictable_bytes(self, parent: SnapshotNode | None = None) -> int:
        """Return the bytes of pinned snapshots, and of the KV segments that prompts in progress depend on.

        Args:
            parent: A further node that a new snapshot depends on.
        """
        return self._num_bytes_that_stay(self._in_use if parent is None else (parent, *self._in_use))

    def clear(self) -> None:
        """Drop everything, including state that an integrity error has made inconsistent."""
        self.num_bytes = 0
        for nodes in (self.evictable, self.pinned, self._loose, self._in_use):
            nodes.clear()

    def integrity_error(self, entries: Iterable[CacheEntry]) -> str | None:
        """Return the first inconsistency found while no prompt is being prefilled; None without one.

        Args:
            entries: All entries, in memory or only on disk.
        """
        in_memory = {entry.digest: entry for entry in entries if entry.node is not None}
        nodes = [*(entry.node for entry in in_memory.values() if entry.node is not None), *self._loose]
        num_bytes = sum(n.segment_bytes + (n.state_bytes if n.snapshot is not None else 0) for n in nodes)
        if num_bytes != self.num_bytes:
            return f"the snapshots take {num_bytes} bytes, but {self.num_bytes} are accounted for"
        if any(node.lent_to is not None or node.segment.is_lent for node in nodes):
            return "a snapshot is still lent to a row"
        dependents = Counter(id(node.parent) for node in nodes if node.parent is not None)
        if any(node.num_dependents != dependents[id(node)] for node in nodes):
            return "the number of dependents of a snapshot is wrong"
        if any(node.snapshot is not None or not node.num_dependents for node in self._loose):
            return "a removed entry has a snapshot or no dependents"
        if self._in_use:
            return "a snapshot is still used by a prompt"
        if {**self.evictable, **self.pinned} != in_memory:
            return "the evictable and pinned snapshots are not those in memory"
        return None

    def _num_bytes_that_stay(self, in_use: Iterable[SnapshotNode]) -> int:
        """Return the bytes that no eviction frees.

        They are pinned snapshots, and the KV segments of pinned snapshots, of nodes in use, and of all their ancestors.
        """
        pinned = [entry.node for entry in self.pinned.values() if entry.node is not None]
        num_bytes, seen = sum(node.state_bytes for node in pinned), set[int]()
        for node in (*pinned, *in_use):
            at: SnapshotNode | None = node
            while at is not None and id(at) not in seen:
                seen.add(id(at))
                num_bytes += at.segment_bytes
                at = at.parent
        return num_bytes

    def _hold(self, node: SnapshotNode) -> None:
        node.num_dependents += 1
        self._in_use[node] += 1

    def _drop_if_unneeded(self, node: SnapshotNode | None) -> None:
        while node is not None and node in self._loose and not node.num_dependents:
            self._loose.remove(node)
            self.num_bytes -= node.segment_bytes
            node = node.parent
            if node is not None:
                node.num_dependents -= 1
