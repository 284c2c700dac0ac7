"""The figures of one engine for metrics."""

from dataclasses import dataclass, field

from engine.core.request_figures import RequestFigures
from engine.status import CacheCounters, EngineStatus, FetchStatus


@dataclass(frozen=True, kw_only=True)
class EngineFigures:
    """Counts of an engine since its start, and its present state."""

    status: EngineStatus
    requests: RequestFigures = field(default_factory=RequestFigures)
    cache: CacheCounters = field(default_factory=CacheCounters)
    disk: dict[str, int] | None = None
    """Figures of the disk tier, None without one."""
    fetch: FetchStatus | None = None
    """Figures of the exchange of snapshots with other nodes, None without one."""
    num_decoding: int = 0
    """Rows of the decode batch."""
    num_snapshots: int = 0
    """Snapshots of the prefix cache, in memory or on disk."""
    num_late: int = 0
    """Pieces of work that took much longer than predicted."""
    available_bytes: int = 0
    """Memory of the machine that processes can still take."""
    total_bytes: int = 0
    """Memory of the machine."""
