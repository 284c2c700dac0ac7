"""What is held for later and no answer needs: snapshots, features of pictures. They leave when the room is needed."""

from engine.core.batch import ModelRunner
from engine.core.prefix_cache.cache import PrefixCache


class EvictableMemory:
    """Bytes as the budget counts them: a snapshot's buffers may be a little larger than its arrays."""

    def __init__(self, cache: PrefixCache, runner: ModelRunner):
        self._cache = cache
        self._runner = runner
        self._slack = runner.costs.snapshot_slack

    @property
    def num_bytes(self) -> int:
        return self._cache.num_bytes + self._cache.num_in_memory * self._slack + self._runner.feature_bytes

    @property
    def pinned_bytes(self) -> int:
        """That never leave."""
        return self._cache.pinned_bytes + self._cache.num_pinned * self._slack

    @property
    def free_bytes(self) -> int:
        """That could leave."""
        return self.num_bytes - self.pinned_bytes

    def free(self, num_bytes: int) -> bool:
        """So many of them: snapshots first, the one that was used longest ago before others. False, and nobody leaves,
        where they cannot be had."""
        if num_bytes > self.free_bytes:
            return False
        wanted = self.num_bytes - num_bytes
        while self.num_bytes > wanted and self._cache.evict():
            pass
        if self.num_bytes > wanted:
            self._runner.free_caches()
        return self.num_bytes <= wanted

    def free_all(self) -> None:
        while self._cache.evict():
            pass
        self._runner.free_caches()
