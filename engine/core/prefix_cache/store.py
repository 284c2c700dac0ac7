"""SnapshotStore: the stored snapshots, the KV segments that they share, and the order of their last use. Pure.

A snapshot in memory has the KV segment after its parent and the recurrent state at its own end. Evicting it frees its
state at once; its KV segment stays, and counts, while a longer snapshot or a prompt in progress needs it. A KV segment
with an owner, a row whose reservation covers it, counts 0 bytes here (loans.py).

The store decides nothing: snapshot_memory.py says which snapshots are added and which are evicted for them.
"""

import time
from bisect import insort
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from engine.cache_miss import CacheMiss
from engine.core.prefix_cache.lineages import Lineages
from engine.core.prefix_cache.node import Snapshot, SnapshotNode
from engine.core.prefix_cache.prompt_key import PromptKey
from engine.snapshot_store.files import SnapshotMeta
from engine.status import CacheCounters

MAX_RECENT_MISSES = 32


class SnapshotStore:
    """Finds, adds, uses and removes snapshots, and counts their bytes.

    Args:
        clock: Returns monotonic seconds.
        file_of: Returns what a snapshot's file on disk says of it, by digest; None if it cannot be read from disk.

    Attributes:
        num_bytes: Bytes of all snapshots in memory, including KV segments that outlive their snapshots.
        num_in_memory: Snapshots in memory.
        pinned: Those of them that are pinned, by digest.
        lineages: The conversations that the snapshots belong to.
        counters: Counters to update.
        recent_misses: Explanations of the last misses, the newest first.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        file_of: Callable[[str], SnapshotMeta | None] = lambda digest: None,
    ):
        self.clock = clock
        self.file_of = file_of
        self.num_bytes = 0
        self.num_in_memory = 0
        self.pinned: dict[str, SnapshotNode] = {}
        self.lineages = Lineages()
        self.counters = CacheCounters()
        self.recent_misses: deque[CacheMiss] = deque(maxlen=MAX_RECENT_MISSES)
        self._nodes: OrderedDict[str, SnapshotNode] = OrderedDict()  # by digest, least recently used first
        self._lengths: dict[str, Counter[int]] = {}  # tenant -> lengths of its nodes
        self._stateless: set[SnapshotNode] = set()  # nodes whose KV segments outlive their snapshots
        self._in_use: Counter[SnapshotNode] = Counter()  # nodes held by prompts in progress
        self._owned: dict[str, list[SnapshotNode]] = {}  # by row id, in the order of the tokens

    def __len__(self) -> int:
        """Return the number of snapshots, in memory or only on disk."""
        return len(self._nodes)

    @property
    def num_segments(self) -> int:
        """KV segments in memory, with or without snapshots."""
        return self.num_in_memory + len(self._stateless)

    @property
    def evictable(self) -> list[SnapshotNode]:
        """Snapshots in memory that are not pinned, the least recently used first."""
        return [node for node in self._nodes.values() if node.snapshot is not None and not node.pinned]

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

    # Find

    def nodes(self) -> Iterator[SnapshotNode]:
        """Return all snapshots, in memory or only on disk, the most recently used first."""
        return reversed(self._nodes.values())

    def get(self, digest: str | None) -> SnapshotNode | None:
        return None if digest is None else self._nodes.get(digest)

    def match(self, key: PromptKey, max_tokens: int, in_memory: bool = False) -> SnapshotNode | None:
        """Return the longest stored prefix of at most `max_tokens` tokens; None without one.

        Tokens, images and tenant are compared, not only digests.

        Args:
            key: The prompt.
            max_tokens: Largest number of tokens of the prefix.
            in_memory: Whether to ignore snapshots that are only on disk.
        """
        lengths = sorted(length for length in self._lengths.get(key.tenant, ()) if length <= max_tokens)
        found = [self._nodes[digest] for _, digest in key.digests(lengths) if digest in self._nodes]
        for node in reversed(found):
            is_there = node.snapshot is not None or not in_memory
            if is_there and node.key.tenant == key.tenant and key.starts_with(node.key):
                return node
        return None

    def path(self, node: SnapshotNode) -> list[SnapshotNode]:
        """Return the node and its stored ancestors, nearest first, up to the first that is missing."""
        path = []
        at: SnapshotNode | None = node
        while at is not None:
            path.append(at)
            at = self.get(at.parent_digest)
        return path

    def has_file(self, node: SnapshotNode) -> bool:
        """Return whether a snapshot can be read from disk."""
        return self.file_of(node.digest) is not None

    def nodes_that_need(self, node: SnapshotNode) -> set[SnapshotNode]:
        """Return the snapshots in memory that need a node's KV segment, its own included."""
        needs, needing = {node: True}, set[SnapshotNode]()
        for one in self._nodes.values():
            if one.snapshot is None:
                continue
            seen, at = list[SnapshotNode](), one
            while at is not None and at not in needs:
                seen.append(at)
                at = at.parent
            is_needing = at is not None and needs[at]
            needs.update(dict.fromkeys(seen, is_needing))
            if is_needing:
                needing.add(one)
        return needing

    # Add and use

    def add_file(self, node: SnapshotNode) -> None:
        """Add a snapshot that is only on disk."""
        node.lineage = self.lineages.started(node.kind, node.used_s)
        self._insert(node)

    def add(
        self, node: SnapshotNode, snapshot: Snapshot, parent: SnapshotNode | None, segment_bytes: int
    ) -> SnapshotNode:
        """Add a snapshot to memory, which must have room for it.

        Args:
            node: A new node with its lineage, or one that was only on disk.
            snapshot: Its snapshot.
            parent: The node before the snapshot's own KV segment.
            segment_bytes: Bytes of the KV segment that count as the cache's.

        Returns:
            The node that has the snapshot: a new one if others still need an earlier KV segment of the given one.
        """
        assert node.snapshot is None
        if node.segment is not None:
            node = self._nodes[node.digest] = node.without_segment()
        if parent is not None:
            parent.num_dependents += 1
        node.snapshot, node.segment, node.parent = snapshot, snapshot.segment, parent
        node.segment_bytes, node.state_bytes = segment_bytes, snapshot.state_bytes
        self.num_bytes += node.segment_bytes + node.state_bytes
        self.num_in_memory += 1
        if node.pinned:
            self.pinned[node.digest] = node
        insort(node.lineage.nodes, node, key=lambda one: one.num_tokens)
        self.counters.num_stored += 1
        if node.digest not in self._nodes:
            self._insert(node)
        self.touch(node)
        return node

    def use(self, node: SnapshotNode) -> None:
        """Record a use by a prompt that continues the snapshot, and hold its KV segment until `release`."""
        self.lineages.used(node, self.clock())
        node.num_hits += 1
        node.is_resume_point = False
        self.touch(node)
        self.hold(node)

    def touch(self, node: SnapshotNode) -> None:
        """Mark a snapshot and its ancestors as used now."""
        now = self.clock()
        for one in self.path(node):
            one.used_s = one.lineage.seen_s = now
            self._nodes.move_to_end(one.digest)

    def pin(self, node: SnapshotNode) -> None:
        """Never evict a snapshot in memory from now on."""
        if node.snapshot is not None:
            node.pinned = True
            self.pinned[node.digest] = node

    def hold(self, node: SnapshotNode) -> None:
        """Keep a KV segment in memory, even if its snapshot is evicted, until `release`."""
        node.num_dependents += 1
        self._in_use[node] += 1

    def release(self, node: SnapshotNode) -> None:
        """Undo `hold`."""
        self._in_use[node] -= 1
        if self._in_use[node] <= 0:
            del self._in_use[node]
        node.num_dependents -= 1
        self._free_unneeded(node)

    @contextmanager
    def holding(self, node: SnapshotNode | None) -> Iterator[None]:
        """Keep a node's KV segment until the end of the block."""
        if node is None:
            yield
            return
        self.hold(node)
        try:
            yield
        finally:
            self.release(node)

    # Owners

    @property
    def owners(self) -> list[str]:
        """Ids of the rows that own KV segments."""
        return list(self._owned)

    def owned_by(self, row_id: str) -> list[SnapshotNode]:
        """Return the nodes whose KV segments a row owns, the first one first."""
        return list(self._owned.get(row_id, ()))

    def assign(self, node: SnapshotNode, row_id: str, num_bytes: int) -> None:
        """Make a row the owner of a KV segment of `num_bytes`, which then counts as the row's memory, see loans.py.

        Args:
            node: The node of the KV segment; it continues those that the row owns already.
            row_id: The row.
            num_bytes: Bytes of the KV segment; may be an estimate.
        """
        self._set_owner(node, row_id, 0)
        node.owned_bytes = num_bytes

    def take_back(self, node: SnapshotNode) -> None:
        """Count a KV segment as the cache's memory again.

        Its bytes are the actual ones or, while it is lent, those expected once it is copied back.
        """
        self._set_owner(node, None, node.owned_bytes if node.kv_segment.is_lent else node.kv_segment.num_bytes)

    def lose(self, node: SnapshotNode) -> None:
        """Evict all snapshots that need a KV segment which its row does not return."""
        for one in sorted(self.nodes_that_need(node), key=lambda one: -one.num_tokens):
            self.evict(one)
        if node.segment is not None:  # a prompt in progress holds it
            self._set_owner(node, None, node.segment.num_bytes)

    # Remove

    def evict(self, node: SnapshotNode) -> None:
        """Remove a snapshot from memory, and remember it as a ghost unless it stays on disk."""
        self.counters.num_evicted += 1
        self.lineages.count_unused(node)
        file = self.file_of(node.digest)
        if file is None:
            self.lineages.remember(node, "evicted")
            self.forget(node)
        else:
            self.forget_memory(node)
            node.parent_digest = file.parent or None

    def forget(self, node: SnapshotNode) -> None:
        """Remove a snapshot without remembering it as a ghost."""
        del self._nodes[node.digest]
        lengths = self._lengths[node.key.tenant]
        lengths[node.num_tokens] -= 1
        if not lengths[node.num_tokens]:
            del lengths[node.num_tokens]
        if not lengths:
            del self._lengths[node.key.tenant]
        self.forget_memory(node)

    def forget_memory(self, node: SnapshotNode) -> None:
        """Drop a snapshot from memory; its file may remain."""
        if node.snapshot is None:
            return
        node.lineage.nodes.remove(node)
        self.pinned.pop(node.digest, None)
        self.num_in_memory -= 1
        self.num_bytes -= node.state_bytes
        node.snapshot = None
        self._stateless.add(node)
        self._free_unneeded(node)

    def prune(self) -> None:
        """Remove snapshots that were only on disk and whose files have been removed."""
        for node in [n for n in self._nodes.values() if n.snapshot is None and not self.has_file(n)]:
            self.lineages.remember(node, "evicted")
            self.forget(node)

    def clear(self) -> tuple[int, int]:
        """Remove everything but pinned snapshots and their ancestors. Return the snapshots and bytes freed."""
        kept = {one.digest for node in self.pinned.values() for one in self.path(node) if one.snapshot is not None}
        removed, before = [node for node in self._nodes.values() if node.digest not in kept], self.num_bytes
        for node in removed:
            self.lineages.remember(node, "cleared")
            self.forget(node)
        return len(removed), before - self.num_bytes

    def reset(self) -> None:
        """Drop everything, including state that an integrity error has made inconsistent; lent KV segments are lost."""
        for node in (node for owned in self._owned.values() for node in owned):
            node.owner = None
        self.num_bytes = self.num_in_memory = 0
        self.lineages.clear()
        for nodes in (self._nodes, self._lengths, self.pinned, self._stateless, self._in_use, self._owned):
            nodes.clear()

    def integrity_error(self) -> str | None:
        """Return the first inconsistency found while no prompt is being prefilled; None without one."""
        in_memory = [node for node in self._nodes.values() if node.snapshot is not None]
        segments, lengths = [*in_memory, *self._stateless], {tenant: Counter[int]() for tenant in self._lengths}
        num_bytes = sum(n.segment_bytes + (n.state_bytes if n.snapshot is not None else 0) for n in segments)
        dependents = Counter(node.parent for node in segments if node.parent is not None)
        in_lineages = sum(len(lineage.nodes) for lineage in {node.lineage for node in self._nodes.values()})
        for node in self._nodes.values():
            lengths[node.key.tenant][node.num_tokens] += 1
        if num_bytes != self.num_bytes:
            return f"the snapshots take {num_bytes} bytes, but {self.num_bytes} are accounted for"
        if any(node.owner is not None or node.kv_segment.is_lent for node in segments):
            return "a snapshot is still lent to a row"
        if any(node.num_dependents != dependents[node] for node in segments):
            return "the number of dependents of a snapshot is wrong"
        if any(node.snapshot is not None or not node.num_dependents for node in self._stateless):
            return "a KV segment that outlives its snapshot has a snapshot or no dependents"
        if self._in_use:
            return "a snapshot is still used by a prompt"
        if len(in_memory) != self.num_in_memory or {n.digest: n for n in in_memory if n.pinned} != self.pinned:
            return "the snapshots in memory, or the pinned ones, are not those that are counted"
        if in_lineages != self.num_in_memory:
            return f"the lineages have {in_lineages} snapshots, but {self.num_in_memory} are in memory"
        return None if lengths == self._lengths else "the index by length does not match the snapshots"

    def _insert(self, node: SnapshotNode) -> None:
        """Make a node findable, as the most recently used one."""
        assert node.digest not in self._nodes
        self._nodes[node.digest] = node
        self._lengths.setdefault(node.key.tenant, Counter())[node.num_tokens] += 1
        self.lineages.discard_ghost(node.digest)

    def _set_owner(self, node: SnapshotNode, row_id: str | None, num_bytes: int) -> None:
        """Count `num_bytes` of a KV segment as the cache's, and the rest as the row's."""
        if node.owner is not None:
            owned = self._owned[node.owner]
            owned.remove(node)
            if not owned:
                del self._owned[node.owner]
        if row_id is not None:
            self._owned.setdefault(row_id, []).append(node)
        self.num_bytes += num_bytes - node.segment_bytes
        node.owner, node.segment_bytes = row_id, num_bytes

    def _num_bytes_that_stay(self, in_use: Iterable[SnapshotNode]) -> int:
        """Return the bytes that no eviction frees.

        They are pinned snapshots, and the KV segments of pinned snapshots, of nodes in use, and of all their ancestors.
        """
        num_bytes, seen = sum(node.state_bytes for node in self.pinned.values()), set[SnapshotNode]()
        for node in (*self.pinned.values(), *in_use):
            at: SnapshotNode | None = node
            while at is not None and at not in seen:
                seen.add(at)
                num_bytes += at.segment_bytes
                at = at.parent
        return num_bytes

    def _free_unneeded(self, node: SnapshotNode | None) -> None:
        """Free the KV segments of a node and its ancestors, up to the first that is still needed."""
        while node is not None and node in self._stateless and not node.num_dependents:
            self._stateless.remove(node)
            self._set_owner(node, None, 0)
            parent, node.parent, node.segment = node.parent, None, None
            node = parent
            if node is not None:
                node.num_dependents -= 1
