"""Loans: a loan moves a snapshot's KV segment into the cache of the row that continues it; no copy stays behind.

A row that continues a conversation needs all its keys and values in its own cache. KV segments at the end of the
snapshot that nothing else needs move there, and are copied back when the row finishes, is aborted or is preempted:
they exist once. KV segments that other prompts need as well, such as system prompts, are copied and stay.

A loan begins with the admission of the row, whose reservation covers all of its tokens: from then on the lent bytes
count as the row's (`promise`). The arrays move when the prompt begins (`lend`). Snapshots that the row stores at its
boundaries are lent from the beginning (`add`). A prompt that continues a lent snapshot gets a copy from the row
(`copy_back`).

When a snapshot with a lent segment is evicted, only its recurrent state is freed. If longer snapshots or prompts in
progress need the segment, it stays lent and is copied back for them; otherwise the loan ends without a copy.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from engine.core.batch import ModelRunner
from engine.core.prefix_cache.node import CacheEntry, KVSegment, SnapshotNode
from engine.core.prefix_cache.snapshot_memory import SnapshotMemory


class Loans:
    """Tracks which KV segments are lent to which row; the tree counts their bytes."""

    def __init__(self, memory: SnapshotMemory, runner: ModelRunner):
        self._memory = memory
        self._tree = memory.cache.tree
        self._runner = runner
        self._of_row: dict[str, list[SnapshotNode]] = {}  # by row id, in the order of the tokens
        self._leaving: list[
            tuple[SnapshotNode, list[SnapshotNode]]
        ] = []  # a chain's first node, and nodes to write first

    @property
    def row_ids(self) -> list[str]:
        """Ids of the rows with lent or promised KV segments."""
        return list(self._of_row)

    def promise(self, row_id: str, entry: CacheEntry) -> bool:
        """Count the KV segments that the row will probably continue as the row's memory.

        Returns whether there are any.
        """
        if row_id in self._of_row:
            return True
        return bool(self._lend(row_id, entry))

    def cancel(self, row_id: str) -> None:
        """Count promised KV segments that have not moved to the row as the cache's memory again.

        Segments that have moved stay lent: the row may have been preempted and not been dropped by the runner yet.
        """
        self._take_back_promised(row_id)

    def break_promise(self, row_id: str) -> None:
        """Revoke the promise to an admitted row, as `cancel`; evict other snapshots if the cache exceeds its limit."""
        if self._take_back_promised(row_id):
            self._memory.fit()

    def lend(self, row_id: str, entry: CacheEntry) -> list[KVSegment]:
        """Lend an entry's KV segments to the row that is about to continue it; return the segments that move."""
        was_promised = self._take_back_promised(row_id)
        lent = self._lend(row_id, entry, was_promised and self._lacks_room(entry))
        if was_promised:  # fewer may be lent: another prompt may have continued the same snapshot meanwhile
            self._memory.fit(spared=(entry,))
        return [node.segment for node in lent]

    def _take_back_promised(self, row_id: str) -> bool:
        """Count promised segments as the cache's again. Return whether there were any."""
        nodes = self._pop(row_id)
        promised = [node for node in nodes if not node.segment.is_lent]
        for node in promised:
            self._tree.take_back(node)
        if len(promised) < len(nodes):
            self._of_row[row_id] = [node for node in nodes if node.segment.is_lent]
        return bool(promised)

    def _lacks_room(self, entry: CacheEntry) -> bool:
        """Return whether the cache exceeds its memory even once the entry's segments are lent.

        Such an entry was read from disk for this row only.
        """
        lendable = sum(node.segment_bytes for node in _lendable(entry.node))
        return self._memory.missing_bytes > lendable

    def _lend(self, row_id: str, entry: CacheEntry, also_system: bool = False) -> list[SnapshotNode]:
        assert entry.node is not None
        lent = list(_lendable(entry.node, also_system))[::-1]
        for node in lent:
            self._tree.lend(node, row_id, node.segment_bytes)
        if lent:
            self._of_row[row_id] = lent
        return lent

    def add(self, row_id: str, node: SnapshotNode, num_bytes: int) -> None:
        """Lend a new snapshot's KV segment, of about `num_bytes`, which has only ever been in the row's cache."""
        self._tree.lend(node, row_id, num_bytes)
        self._of_row.setdefault(row_id, []).append(node)

    def may_add(self, row_id: str, base: SnapshotNode | None) -> bool:
        """Return whether a segment after `base` would extend the chain that is lent to the row."""
        lent = self._of_row.get(row_id)
        return not lent or (base is not None and lent[-1] in base.entry.chain())

    def is_lost(self, node: SnapshotNode | None) -> bool:
        """Return whether a KV segment up to the end of this node went with a row that did not return it."""
        while node is not None:
            if node.segment.is_lent and (node.lent_to is None or node not in self._of_row.get(node.lent_to, ())):
                return True
            node = node.parent
        return False

    def copy_back(self, entry: CacheEntry) -> bool:
        """Copy the lent KV segments of an entry's chain back from the rows. Return False if they do not fit."""
        lent = [node for node in entry.chain() if node.segment.is_lent]
        if not lent:
            return True
        if not self._memory.evict_for_return(lent):
            return False
        by_row = defaultdict[str | None, list[SnapshotNode]](list)
        for node in lent:
            by_row[node.lent_to].append(node)
        for row_id, nodes in by_row.items():
            if row_id is not None:
                self._fill(row_id, nodes)
            self._settle(nodes)
        return not any(node.segment.is_lent for node in lent)

    def _fill(self, row_id: str, nodes: Sequence[SnapshotNode]) -> None:
        """Copy KV segments back from a row. If the runner raises, segments that were not copied stay lent."""
        try:
            self._runner.fill(row_id, [node.segment for node in nodes])
        except Exception:
            nodes = [node for node in nodes if not node.segment.is_lent]
            self._settle(nodes)
            raise
        finally:
            left = [node for node in self._pop(row_id) if node not in nodes]
            if left:
                self._of_row[row_id] = left

    def returning(
        self, row_ids: Iterable[str], is_to_write: Callable[[CacheEntry], bool] = lambda entry: False
    ) -> dict[str, Sequence[KVSegment]]:
        """Free memory for the KV segments of rows about to be dropped; return the segments to copy back, by row id.

        Segments worth less than the snapshots that would be evicted for them are given up, the last of the row first.
        Among these, segments to be written to disk are copied back, too, and evicted once they are written. `settle`
        and then `take_leaving` must follow.

        Args:
            row_ids: The rows.
            is_to_write: Whether an entry is to be written to disk before it is evicted.
        """
        returning = {}
        for row_id in row_ids:
            self.break_promise(row_id)
            lent, leaving = self._pop(row_id), list[SnapshotNode]()
            while lent and not self._memory.evict_for_return(lent):
                leaving.insert(0, lent.pop())
                if not self._to_write(leaving, is_to_write):
                    self._memory.cache.evict_behind(leaving.pop())
                    lent = [node for node in lent if self._tree.is_stored(node)]
            for node in lent:  # counted now, before the next row's segments are considered
                self._tree.take_back(node)
            if lent:
                self._of_row[row_id] = list(lent)
            if leaving:
                to_write = self._to_write(leaving, is_to_write)
                self._leaving.append((leaving[0], to_write))
                lent += to_write
            if lent:
                returning[row_id] = [node.segment for node in lent]
        return returning

    @staticmethod
    def _to_write(leaving: Sequence[SnapshotNode], is_to_write: Callable[[CacheEntry], bool]) -> list[SnapshotNode]:
        """Return the nodes at the end of a chain that are written to disk before they are evicted."""
        return [node for node in leaving if node.snapshot is not None and is_to_write(node.entry)]

    def take_leaving(self, write: Callable[[CacheEntry], None]) -> None:
        """Write copied-back segments of chains that the cache has no memory for, and evict them."""
        leaving, self._leaving = self._leaving, []
        for first, to_write in leaving:
            for node in to_write:
                if node.snapshot is not None and not node.segment.is_lent:
                    write(node.entry)
            if self._tree.is_stored(first):
                self._memory.cache.evict_behind(first)

    def settle(self, row_ids: Iterable[str]) -> None:
        """End the loans of rows that were dropped or failed.

        Segments that were not copied back are lost, with all their descendants.
        """
        self._settle([node for row_id in row_ids for node in self._pop(row_id)])

    def _settle(self, nodes: Sequence[SnapshotNode]) -> None:
        for node in nodes:
            if not self._tree.is_stored(node):
                continue  # it was lost with a node before it
            if node.segment.is_lent:
                self._memory.cache.evict_behind(node)
            else:
                self._tree.take_back(node)

    def _pop(self, row_id: str) -> list[SnapshotNode]:
        """Remove a row's loans, and return those that are still stored."""
        return [node for node in self._of_row.pop(row_id, ()) if self._tree.is_stored(node)]


def _lendable(node: SnapshotNode | None, also_system: bool = False) -> Iterator[SnapshotNode]:
    """Yield the nodes at the end of a chain whose KV segments nothing else needs, the last first.

    Args:
        node: The last node of the chain.
        also_system: Whether to include system prompts, which other prompts are likely to need.
    """
    num_dependents = 0
    while node is not None and node.num_dependents == num_dependents and node.lent_to is None:
        if node.entry.pinned or (node.entry.kind == "system" and not also_system):
            return
        yield node
        node, num_dependents = node.parent, 1
