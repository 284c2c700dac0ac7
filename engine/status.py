"""The engine's status, for `/v1/status` and `/v1/cache`: counters and current figures."""

from dataclasses import dataclass, field
from typing import Any, Literal

from engine.cache_miss import CacheMiss
from engine.config import SnapshotKind


@dataclass(frozen=True)
class CacheEntryStatus:
    """One snapshot of the prefix cache."""

    kind: SnapshotKind  # Kind of its boundary.
    num_tokens: int  # Tokens before its boundary.
    num_bytes: int  # In memory, without what it shares with the snapshots before it.
    num_hits: int  # Prompts that continued it.
    pinned: bool  # Whether it is never evicted.
    tenant: str  # A digest of the tenant; '' without one.
    where: Literal["memory", "disk", "both"]  # Where its arrays are.
    age_s: float  # Seconds since it was taken.
    idle_s: float  # Seconds since its last use.


@dataclass(kw_only=True)
class CacheCounters:
    """Counters of the prefix cache since the start."""

    num_hits: int = 0  # Prompts with a cached prefix.
    num_misses: int = 0  # Prompts without one.
    num_cached_tokens: int = 0  # Prompt tokens that were cached.
    num_stored: int = 0  # Snapshots stored.
    num_evicted: int = 0  # Snapshots evicted.
    num_rejected: int = 0  # Snapshots that did not fit, were not finite, or could not be taken.
    num_outvalued: int = 0  # Rejected snapshots that were worth less than those they would have evicted.
    num_unusable: int = 0
    """Snapshots that could not be restored, or not be read from disk in time; their prompts were computed."""
    num_integrity_errors: int = 0  # Failed integrity checks, each of which emptied the cache.
    misses: dict[str, int] = field(default_factory=dict)  # num_misses by reason.


@dataclass(frozen=True, kw_only=True)
class FetchStatus:
    """Snapshots that nodes fetch from one another: counters since the start."""

    address: str = ""  # `host:port` at which other nodes fetch this one's.
    num_fetched: int = 0  # Snapshots fetched from other nodes, those before the wanted ones included.
    fetched_bytes: int = 0  # Their bytes, those of incomplete files included.
    fetched_s: float = 0.0  # Seconds of the transfers.
    failures: dict[str, int] = field(default_factory=dict)
    """Prefixes that were not fetched, by reason, see FetchFailure in snapshot_store/wire.py; `slow` is a decision."""
    num_served: int = 0  # Snapshots sent to other nodes.
    served_bytes: int = 0  # Their bytes.
    num_refused: int = 0  # Connections of other nodes that were refused or did not greet.
    num_connections: int = 0  # Connections of other nodes that are open now.
    taken_over: dict[str, int] = field(default_factory=dict)
    """Fetched snapshots that no prompt waited for, by purpose, see Purpose in snapshot_store/wire.py."""
    taken_over_bytes: dict[str, int] = field(default_factory=dict)  # Their bytes, by purpose.
    not_taken_over: dict[str, int] = field(default_factory=dict)
    """Snapshots that were offered and not taken over, by reason, see NotTaken in snapshot_store/wire.py."""


@dataclass(kw_only=True)
class CacheStatus(CacheCounters):
    """The prefix cache for `GET /v1/cache`, with a copy of its counters."""

    off_reason: str | None = None  # Why there is no prefix cache, None if there is one.
    max_bytes: int = 0  # Limit of num_bytes.
    num_bytes: int = 0  # Bytes of snapshots in memory.
    num_entries: int = 0  # Entries in memory or on disk.
    num_pinned: int = 0  # Pinned entries.
    entries: tuple[CacheEntryStatus, ...] = ()  # The most recently used first.
    recent_misses: tuple[CacheMiss, ...] = ()
    """The newest first; prompts that could have got more cached tokens are included."""
    disk: dict[str, int] | None = None  # Figures of the disk tier, None without one.
    fetch: FetchStatus | None = None  # Figures of the exchange with other nodes, None without one.


@dataclass(frozen=True)
class CacheCleared:
    """The result of clearing the prefix cache; pinned snapshots stay."""

    num_entries: int
    num_bytes: int
    num_files: int = 0


@dataclass(frozen=True)
class QueuedRequest:
    """One queued request."""

    request_id: str  # Id of the request.
    position: int  # 1 is the next.
    num_rows: int  # Queued choices.
    num_bytes: int  # The least memory that they need.
    waited_s: float  # Seconds in the queue.
    expected_wait_s: float | None = None  # Predicted from recent admissions; None if unknown.
    preempted: bool = False  # Whether its answer has begun: it was preempted, or another engine began it.


@dataclass(frozen=True)
class WorkInHand:
    """The work that the device computes now."""

    name: str
    seconds: float
    """Seconds since it began."""
    predicted_s: float
    """Seconds that the cost model predicts; 0 without a prediction."""
    is_late: bool
    """Whether it takes much longer than predicted."""


@dataclass(kw_only=True)
class EngineCounters:
    """Counters of the engine since the start. Rows are counted per choice of a request."""

    num_steps: int = 0  # Steps of the engine.
    num_finished: int = 0  # Rows that finished with an answer.
    num_aborted: int = 0  # Rows that were aborted.
    num_failed: int = 0  # Rows that failed.
    num_moved: int = 0  # Rows that ended so that another engine continues them.
    num_expired: int = 0  # Rows that waited in the queue for too long.
    num_preempted: int = 0  # Rows that were preempted, once for each time.
    num_prompt_tokens: int = 0  # Prefilled tokens; those computed again after a preemption count again.
    num_cached_tokens: int = 0  # Prompt tokens that came from the prefix cache.
    num_sparse: int = 0  # Rows whose prompts were prefilled by a sparse plan.
    num_skipped_tokens: int = 0  # Prompt tokens that sparse plans skipped.
    num_output_tokens: int = 0  # Generated tokens.
    num_drafted: int = 0  # Draft tokens that were verified.
    num_accepted: int = 0  # Accepted draft tokens that are part of an answer.
    num_bursts: int = 0  # Forwards that computed chunks of several prompts.
    num_failed_bursts: int = 0  # Such forwards that failed; each prompt was then computed alone.
    max_rows_in_a_step: int = 0  # The most rows in a decode step.


@dataclass(kw_only=True)
class EngineStatus(EngineCounters):
    """The engine for `/v1/status`: current figures in bytes, seconds and tokens, with a copy of its counters."""

    state: str
    """`loading` (weights), `compiling` (kernels, while steps and memory are measured), `warming` (prefilling pinned
    prompts), `ready`, `failed` or `stopped`."""
    model: str
    """As configured."""
    load_progress: float
    """0 to 1: of the bytes of the weights, of the warm-up's steps while compiling, of the prompts while warming."""
    num_running: int = 0  # Rows: decoding, or of a prompt in progress.
    num_waiting: int = 0  # Requests in the queue.
    max_running: int = 0
    max_queue: int = 0
    max_context_tokens: int = 0
    speculation: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    admission: dict[str, Any] = field(default_factory=dict)
    """Memory accounts, see core/memory/budget.py."""
    queue: tuple[QueuedRequest, ...] = ()
    """The first queued requests."""
    expected_wait_s: float | None = None
    capabilities: dict[str, Any] = field(default_factory=dict)
    work: WorkInHand | None = None
    """None while the device is idle."""
    unavailable: str | None = None
    """Why new requests are rejected now, None if they are accepted."""
    error: str | None = None
    """Why the engine failed or stopped, None while it runs."""
