"""The prefix cache's status for the API."""

from dataclasses import asdict
from hashlib import sha256
from itertools import islice
from typing import Literal

from engine.core.prefix_cache.node import SnapshotNode
from engine.core.prefix_cache.snapshot_memory import SnapshotMemory
from engine.status import CacheEntryStatus, CacheStatus

MAX_ENTRIES_SHOWN = 256


def cache_status(memory: SnapshotMemory, off_reason: str | None, disk: dict[str, int] | None = None) -> CacheStatus:
    """Return the figures and the MAX_ENTRIES_SHOWN most recently used snapshots."""
    store, now = memory.store, memory.store.clock()
    return CacheStatus(
        off_reason=off_reason,
        max_bytes=memory.max_bytes if off_reason is None else 0,
        num_bytes=store.num_bytes,
        num_entries=len(store),
        num_pinned=len(store.pinned),
        entries=tuple(_entry(node, now, store.has_file(node)) for node in islice(store.nodes(), MAX_ENTRIES_SHOWN)),
        recent_misses=tuple(store.recent_misses),
        disk=disk,
        **asdict(store.counters),
    )


def _entry(node: SnapshotNode, now: float, on_disk: bool) -> CacheEntryStatus:
    in_memory = node.snapshot is not None
    where: Literal["memory", "disk", "both"] = "disk" if not in_memory else "both" if on_disk else "memory"
    return CacheEntryStatus(
        kind=node.kind,
        num_tokens=node.num_tokens,
        num_bytes=node.segment_bytes + node.state_bytes if in_memory else 0,
        num_hits=node.num_hits,
        pinned=node.pinned,
        tenant=sha256(node.key.tenant.encode(errors="surrogatepass")).hexdigest()[:12] if node.key.tenant else "",
        where=where,
        age_s=now - node.created_s,
        idle_s=now - node.used_s,
    )
