"""The prefix cache's status for the API."""

from dataclasses import asdict
from hashlib import sha256
from itertools import islice
from typing import Literal

from engine.core.prefix_cache.node import CacheEntry
from engine.core.prefix_cache.snapshot_memory import SnapshotMemory
from engine.protocol import CacheEntryStatus, CacheStatus

MAX_ENTRIES_SHOWN = 256


def cache_status(memory: SnapshotMemory, off_reason: str | None, disk: dict[str, int] | None = None) -> CacheStatus:
    """Return the figures and the MAX_ENTRIES_SHOWN most recently used entries."""
    cache, now = memory.cache, memory.cache.clock()
    return CacheStatus(
        off_reason=off_reason,
        max_bytes=memory.max_bytes if off_reason is None else 0,
        num_bytes=cache.num_bytes,
        num_entries=len(cache.index),
        num_pinned=len(cache.tree.pinned),
        entries=tuple(
            _entry(entry, now, cache.file_parent(entry.digest) is not None)
            for entry in islice(cache.index.entries(), MAX_ENTRIES_SHOWN)
        ),
        recent_misses=tuple(cache.recent_misses),
        disk=disk,
        **asdict(cache.counters),
    )


def _entry(entry: CacheEntry, now: float, on_disk: bool) -> CacheEntryStatus:
    node = entry.node
    where: Literal["memory", "disk", "both"] = "disk" if node is None else "both" if on_disk else "memory"
    return CacheEntryStatus(
        kind=entry.kind,
        num_tokens=entry.num_tokens,
        num_bytes=node.segment_bytes + node.state_bytes if node is not None else 0,
        num_hits=entry.num_hits,
        pinned=entry.pinned,
        tenant=sha256(entry.key.tenant.encode(errors="surrogatepass")).hexdigest()[:12] if entry.key.tenant else "",
        where=where,
        age_s=now - entry.created_s,
        idle_s=now - entry.used_s,
    )
