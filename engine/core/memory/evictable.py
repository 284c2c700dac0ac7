"""What is held for later and no answer needs: snapshots, features of pictures. They leave when the room is needed."""

import sys
from typing import Protocol

from engine.core.batch import ModelRunner
from engine.core.prefix_cache.cache import PrefixCache


class Evictable(Protocol):
    """Memory that no answer needs."""

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of the prefix cache."""
        ...

    @property
    def image_bytes(self) -> int:
        """Bytes of images' features."""
        ...

    @property
    def free_bytes(self) -> int:
        """Bytes that can be evicted now."""
        ...

    def free(self, num_bytes: int) -> bool:
        """Evict so many bytes; False, with nothing evicted, where they cannot be had."""
        ...

    def price(self, num_bytes: int) -> float:
        """Return the seconds of computing that `free` is expected to cost."""
        ...


class NothingEvictable:
    """The memory of an engine without caches."""

    snapshot_bytes = image_bytes = free_bytes = 0

    def free(self, num_bytes: int) -> bool:
        return False

    def price(self, num_bytes: int) -> float:
        return float("inf")


class EvictableMemory:
    """Bytes as the budget counts them: a snapshot's buffers may be a little larger than its arrays."""

    def __init__(self, cache: PrefixCache, runner: ModelRunner):
        self._cache = cache
        self._runner = runner
        self._slack = runner.costs.snapshot_slack

    @property
    def snapshot_bytes(self) -> int:
        return self._cache.num_bytes + self._cache.num_in_memory * self._slack

    @property
    def image_bytes(self) -> int:
        return self._runner.feature_bytes

    @property
    def num_bytes(self) -> int:
        return self.snapshot_bytes + self.image_bytes

    @property
    def pinned_bytes(self) -> int:
        """That never leave."""
        return self._cache.pinned_bytes + self._cache.num_pinned * self._slack

    @property
    def free_bytes(self) -> int:
        """That could leave now: not what is pinned, nor the keys and values that prompts in progress go on from."""
        return self.num_bytes - self._cache.unevictable_bytes - self._cache.num_pinned * self._slack

    def price(self, num_bytes: int) -> float:
        """Return the seconds of computing that `free` is expected to cost; inf where so many bytes cannot be freed."""
        if num_bytes > self.free_bytes:
            return float("inf")
        of_snapshots = self.free_bytes - self.image_bytes
        return self._cache.price(min(num_bytes, of_snapshots), self._slack)

    def free(self, num_bytes: int) -> bool:
        """Frees so many bytes: snapshots first, the cheapest to compute again before others. Returns False, and frees
        nothing, where they cannot be had."""
        if num_bytes > self.free_bytes:
            return False
        wanted = self.num_bytes - num_bytes
        self._cache.evict(num_bytes, self._slack)
        if self.num_bytes > wanted:
            self._runner.free_caches()
        return self.num_bytes <= wanted

    def free_all(self) -> None:
        self._cache.evict(sys.maxsize)
        self._runner.free_caches()
