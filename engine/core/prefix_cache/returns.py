"""SegmentReturns: brings lent KV segments back into memory, or onto disk where memory has no room for them."""

import logging
from collections.abc import Iterable, Sequence

from engine.core.batch import ModelRunner
from engine.core.prefix_cache.disk_tier import DiskTier
from engine.core.prefix_cache.loans import Loans
from engine.core.prefix_cache.node import CacheEntry, KVSegment
from engine.core.prefix_cache.snapshot_memory import SnapshotMemory

log = logging.getLogger("orchard.engine")


class SegmentReturns:
    """Ends loans: of rows that are about to be dropped, and of entries that other prompts need.

    Args:
        memory: The cache's memory.
        loans: Tracks lent KV segments.
        disk: The disk tier; None without one.
        runner: Has the lent keys and values.
    """

    def __init__(self, memory: SnapshotMemory, loans: Loans, disk: DiskTier | None, runner: ModelRunner):
        self._memory = memory
        self._loans = loans
        self._disk = disk
        self._runner = runner

    def prepare(self, row_ids: Iterable[str]) -> dict[str, Sequence[KVSegment]]:
        """Return the KV segments lent to rows that are about to be dropped, by row id; `settle` must follow."""
        if self._disk is None:
            return self._loans.returning(row_ids)
        return self._loans.returning(row_ids, self._disk.lacks)

    def settle(self, row_ids: Iterable[str]) -> None:
        """End the loans of rows that the runner has dropped or lost."""
        self._loans.settle(row_ids)
        if self._disk is not None:
            self._loans.take_leaving(self._disk.save)
            self._disk.save_waiting()
        self._memory.fit()  # segments read from disk for a row may not fit into the cache

    def copy_back(self, entry: CacheEntry) -> bool:
        """Copy an entry's lent keys and values back from rows; return False if that is impossible."""
        if not any(node.segment.is_lent for node in entry.chain()):
            return True
        try:
            has_come_back = self._loans.copy_back(entry)
        except Exception:
            log.exception("the keys and values of %d tokens could not be copied back from a row", entry.num_tokens)
            self._memory.cache.counters.num_unusable += 1
            return False
        if has_come_back and self._disk is not None and entry.node is not None and entry.node.snapshot is not None:
            self._disk.save(entry)
        return has_come_back

    def write_all(self) -> None:
        """Drop all rows with lent KV segments, so that these are written to disk. Never raises."""
        try:
            lent = self.prepare(self._loans.row_ids)
            self._runner.drop(list(lent), lent)
            self.settle(lent)
        except Exception:
            log.exception("the keys and values of running rows could not be copied back for the disk tier")
