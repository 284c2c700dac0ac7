"""The prefix cache's status for the API."""

from hashlib import sha256
from itertools import islice
from typing import Literal

from engine.core.prefix_cache.cache import CacheEntry, PrefixCache
from engine.protocol import CacheEntryStatus, CacheStatus

MAX_ENTRIES_SHOWN = 256


def cache_status(cache: PrefixCache, off: str | None, now: float, disk: dict[str, int] | None = None) -> CacheStatus:
    """Return the figures and the MAX_ENTRIES_SHOWN most recently used entries."""
    counters = cache.counters
    return CacheStatus(
        off=off,
        max_bytes=cache.max_bytes if off is None else 0,
        num_bytes=cache.num_bytes,
        num_entries=len(cache),
        num_pinned=cache.num_pinned,
        num_hits=counters.num_hits,
        num_misses=counters.num_misses,
        num_cached_tokens=counters.num_cached_tokens,
        num_stored=counters.num_stored,
        num_evicted=counters.num_evicted,
        num_rejected=counters.num_rejected,
        num_unusable=counters.num_unusable,
        num_integrity_errors=counters.num_integrity_errors,
        misses=dict(counters.misses),
        entries=tuple(
            _entry(entry, now, cache.file_parent(entry.digest) is not None)
            for entry in islice(cache.entries(), MAX_ENTRIES_SHOWN)
        ),
        recent_misses=tuple(cache.recent_misses),
        disk=disk,
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
