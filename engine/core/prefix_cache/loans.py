"""Loans: a loan moves a snapshot's KV segment into the cache of the row that continues it; no copy stays behind.

A row that continues a conversation needs all its keys and values in its own cache. KV segments at the end of the
snapshot that nothing else needs move there, and are copied back when the row finishes, is aborted or is preempted:
they exist once. KV segments that other prompts need as well, such as system prompts, are copied and stay.

A row owns a KV segment (`SnapshotNode.owner`) from its admission on, as its reservation covers all of its tokens
(`assign`). The arrays move when the prompt begins (`move`). Until then another prompt may begin first and need the same
segment, which then stays in the cache; a row whose memory was reserved without it is queued again (`MemoryTaken`).
Snapshots that the row stores at its boundaries are its own from the beginning. A prompt that continues a snapshot of
another row gets a copy from that row (`copy_back`).

When a snapshot whose KV segment has an owner is evicted, only its recurrent state is freed. If longer snapshots or
prompts in progress need the segment, it stays with the row and is copied back for them; otherwise the loan ends without
a copy.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from engine.core.prefix_cache.disk_tier import DiskTier
from engine.core.prefix_cache.node import KVSegment, SnapshotNode
from engine.core.prefix_cache.snapshot_memory import SnapshotMemory
from engine.core.runner import ModelRunner

log = logging.getLogger("orchard.engine")


class MemoryTaken(Exception):
    """Other prompts need KV segments that a row was to take over, and memory does not hold them beside the row."""


class Loans:
    """Gives KV segments to rows and brings them back: into memory, or onto disk where memory has no room for them.

    Args:
        memory: The cache's memory.
        disk: The disk tier; None without one.
        runner: Has the keys and values of rows.
    """

    def __init__(self, memory: SnapshotMemory, disk: DiskTier | None, runner: ModelRunner):
        self._memory = memory
        self._store = memory.store
        self._disk = disk
        self._runner = runner

    def assign(self, row_id: str, node: SnapshotNode) -> None:
        """Count the KV segments that the row will probably continue as the row's memory, unless it owns some already.

        Args:
            row_id: The row.
            node: The snapshot that it will continue.
        """
        if not self._store.owned_by(row_id):
            self._assign(row_id, _lendable(node))

    def revoke(self, row_id: str) -> None:
        """Count the KV segments of a row that have not moved there as the cache's memory again.

        Segments that have moved stay with the row until it is dropped. Other snapshots are evicted if the cache exceeds
        its limit now.
        """
        if self._take_back_unmoved(row_id):
            self._memory.fit()

    def give_up(self, row_id: str) -> None:
        """Undo `assign` for a row whose prompt continues no snapshot.

        Raises:
            MemoryTaken: The segments stay in the cache, but memory does not hold them beside the row.
        """
        if taken_back := self._take_back_unmoved(row_id):
            self._memory.fit()
            self._check_room(row_id, taken_back, None)

    def move(self, row_id: str, node: SnapshotNode) -> list[KVSegment]:
        """Return the KV segments that move to a row that is about to continue a snapshot.

        Raises:
            MemoryTaken: Assigned segments stay in the cache, but memory does not hold them beside the row.
        """
        taken_back = self._take_back_unmoved(row_id)
        moving = _lendable(node)
        if taken_back and self._memory.missing_bytes > sum(one.segment_bytes for one in moving):
            moving = _lendable(node, also_system=True)  # it was read from disk for this row only
        self._assign(row_id, moving)
        if taken_back:  # they may be fewer: another prompt may have continued the same snapshot meanwhile
            self._memory.fit(kept=(node,))
            self._check_room(row_id, taken_back, node)
        return [one.kv_segment for one in moving]

    def may_extend(self, row_id: str, base: SnapshotNode | None) -> bool:
        """Return whether a segment after `base` would extend the chain that the row owns."""
        owned = self._store.owned_by(row_id)
        return not owned or (base is not None and owned[-1] in base.chain())

    def copy_back(self, node: SnapshotNode) -> bool:
        """Copy the lent KV segments of a snapshot back from rows; return False if that is impossible."""
        lent = [one for one in node.chain() if one.kv_segment.is_lent]
        if not lent:
            return True
        try:
            if not self._copy_back(lent):
                return False
        except Exception:
            log.exception("the keys and values of %d tokens could not be copied back from a row", node.num_tokens)
            self._store.counters.num_unusable += 1
            return False
        if self._disk is not None and node.snapshot is not None:
            self._disk.write(node)
        return True

    @contextmanager
    def dropping(self, row_ids: Sequence[str]) -> Iterator[Mapping[str, Sequence[KVSegment]]]:
        """Bring the KV segments of rows back that the runner drops within the block.

        Segments worth less than the snapshots that would be evicted for them are given up, the last of the row first.
        Among these, segments to be written to disk are copied back, too, and evicted once they are written. Segments
        that were not copied back at the end of the block are lost, with all snapshots that need them.

        Yields:
            The segments to copy back, by row id.
        """
        returning, to_lose = list[SnapshotNode](), list[list[SnapshotNode]]()
        segments = defaultdict[str, list[KVSegment]](list)
        for row_id in row_ids:
            self.revoke(row_id)
            staying, given_up = self._choose_returning(row_id)
            for node in staying:  # counted now, before the next row's segments are considered
                self._store.take_back(node)
            returning += staying
            to_lose.append(given_up)
            for node in (*staying, *filter(self._is_to_write, given_up)):
                segments[row_id].append(node.kv_segment)
        try:
            yield dict(segments)
        finally:
            self._take_back_or_lose(returning)
            for given_up in to_lose:
                self._write_and_lose(given_up)
            self._finish()

    def lost(self, row_ids: Sequence[str]) -> None:
        """End the loans of rows that the runner has lost: segments that have moved there are lost with them."""
        self._take_back_or_lose([node for row_id in row_ids for node in self._store.owned_by(row_id)])
        self._finish()

    def write_all(self) -> None:
        """Drop all rows that own KV segments, so that these are written to disk. Never raises."""
        try:
            with self.dropping(self._store.owners) as lent:
                self._runner.drop(list(lent), lent)
        except Exception:
            log.exception("the keys and values of running rows could not be copied back for the disk tier")

    def _assign(self, row_id: str, nodes: Iterable[SnapshotNode]) -> None:
        for node in nodes:
            self._store.assign(node, row_id, node.segment_bytes)

    def _take_back_unmoved(self, row_id: str) -> list[SnapshotNode]:
        unmoved = [node for node in self._store.owned_by(row_id) if not node.kv_segment.is_lent]
        for node in unmoved:
            self._store.take_back(node)
        return unmoved

    def _check_room(self, row_id: str, taken_back: Sequence[SnapshotNode], node: SnapshotNode | None) -> None:
        """Raise MemoryTaken if segments taken back from a row stay in the cache, and memory does not hold them."""
        stays = any(one.segment is not None and one.owner is None for one in taken_back)
        if stays and not self._memory.can_hold(0, node):
            self._take_back_unmoved(row_id)
            raise MemoryTaken(f"other prompts need the prefix of {row_id}, and memory holds no copy of it")

    def _copy_back(self, lent: Sequence[SnapshotNode]) -> bool:
        """Copy KV segments of one chain back from rows; return False if they do not fit, or some are lost."""
        if not self._memory.evict_for_return(lent):
            return False
        by_row = defaultdict[str | None, list[SnapshotNode]](list)
        for node in lent:
            by_row[node.owner].append(node)
        for row_id, nodes in by_row.items():
            try:
                if row_id is not None:
                    self._runner.fill(row_id, [node.kv_segment for node in nodes])
            except Exception:
                self._take_back_or_lose([node for node in nodes if not node.kv_segment.is_lent])
                raise
            self._take_back_or_lose(nodes)
        return not any(node.segment is None or node.segment.is_lent for node in lent)

    def _choose_returning(self, row_id: str) -> tuple[list[SnapshotNode], list[SnapshotNode]]:
        """Free memory for the KV segments of a row; return the nodes that it suffices for, and those to be written."""
        staying, given_up = self._store.owned_by(row_id), list[SnapshotNode]()
        while staying and not self._memory.evict_for_return(staying):
            given_up.insert(0, staying.pop())
            if not any(map(self._is_to_write, given_up)):
                self._store.lose(given_up.pop())
                staying = [node for node in staying if node.segment is not None]
        return staying, given_up

    def _is_to_write(self, node: SnapshotNode) -> bool:
        return self._disk is not None and node.snapshot is not None and self._disk.lacks(node)

    def _write_and_lose(self, given_up: Sequence[SnapshotNode]) -> None:
        """Write copied-back segments at the end of a chain that the cache has no memory for, and evict them."""
        for node in given_up:
            if self._disk is not None and node.snapshot is not None and not node.kv_segment.is_lent:
                self._disk.write(node)
        for node in given_up:
            if node.segment is not None:
                self._store.lose(node)

    def _take_back_or_lose(self, nodes: Iterable[SnapshotNode]) -> None:
        """Count KV segments that have come back as the cache's; evict what needs the others."""
        for node in nodes:
            if node.segment is None:
                continue  # it was lost with a node before it
            if node.segment.is_lent:
                self._store.lose(node)
            else:
                self._store.take_back(node)

    def _finish(self) -> None:
        if self._disk is not None:
            self._disk.write_waiting()
        self._memory.fit()  # segments read from disk for a row may not fit into the cache


def _lendable(last: SnapshotNode, also_system: bool = False) -> list[SnapshotNode]:
    """Return the nodes at the end of a chain whose KV segments nothing else needs, the first one first.

    Args:
        last: The last node of the chain.
        also_system: Whether to include system prompts, which other prompts are likely to need.
    """
    found, num_dependents = list[SnapshotNode](), 0
    node: SnapshotNode | None = last
    while node is not None and node.num_dependents == num_dependents and node.owner is None:
        if node.pinned or (node.kind == "system" and not also_system):
            break
        found.append(node)
        node, num_dependents = node.parent, 1
    return found[::-1]
