"""Cached memory that no running request needs: snapshots and image features. Evicted on demand."""

import sys

from engine.core.prefix_cache.snapshot_memory import SnapshotMemory
from engine.core.runner import ModelRunner


class EvictableMemory:
    """Evicts snapshots and image features.

    Bytes include allocation slack: a snapshot's buffers may be a little larger than its arrays.
    """

    def __init__(self, memory: SnapshotMemory, runner: ModelRunner):
        self._memory = memory
        self._store = memory.store
        self._runner = runner
        self._slack = runner.costs.snapshot_slack

    @property
    def snapshot_bytes(self) -> int:
        return self._store.num_bytes + self._store.num_in_memory * self._slack

    @property
    def image_bytes(self) -> int:
        return self._runner.feature_bytes

    @property
    def num_bytes(self) -> int:
        return self.snapshot_bytes + self.image_bytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes that are never evicted."""
        return self._store.pinned_bytes + len(self._store.pinned) * self._slack

    @property
    def evictable_bytes(self) -> int:
        """Bytes that can be evicted now: neither pinned snapshots nor KV segments in use by prompts in progress."""
        return self.num_bytes - self._store.unevictable_bytes() - len(self._store.pinned) * self._slack

    def price(self, num_bytes: int) -> float:
        """Return the expected seconds of recomputation that `evict` would cause; inf if `num_bytes` cannot be freed."""
        if num_bytes > self.evictable_bytes:
            return float("inf")
        of_snapshots = self.evictable_bytes - self.image_bytes
        return self._memory.price(min(num_bytes, of_snapshots), self._slack)

    def evict(self, num_bytes: int) -> bool:
        """Evict `num_bytes`: snapshots first, in the order of eviction.py, then image features.

        Returns:
            False, with nothing evicted, if that is impossible.
        """
        if num_bytes > self.evictable_bytes:
            return False
        wanted = self.num_bytes - num_bytes
        self._memory.evict(num_bytes, self._slack)
        if self.num_bytes > wanted:
            self._runner.free_caches()
        return self.num_bytes <= wanted

    def evict_all(self) -> None:
        """Evict everything that can be evicted."""
        self._memory.evict(sys.maxsize)
        self._runner.free_caches()
