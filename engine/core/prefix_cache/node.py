"""The records of the prefix cache for each boundary of a prompt: its snapshot, its entry, and its conversation."""

from dataclasses import dataclass, field
from typing import Protocol

from engine.config import SnapshotKind
from engine.core.prefix_cache.prompt_key import PromptKey
from engine.protocol import PromptOrigin


class KVSegment(Protocol):
    """A KV segment: keys and values of the tokens between two snapshots, or a reference to the row that has them."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its keys and values; 0 while they are lent to a row."""
        ...

    @property
    def is_lent(self) -> bool:
        """Whether its keys and values are in the cache of a row, or were lost with that row."""
        ...


class Snapshot(Protocol):
    """The state after a prefix: opaque here, and alive while it is referenced."""

    @property
    def segment(self) -> KVSegment:
        """The KV segment after the parent snapshot."""
        ...

    @property
    def segment_bytes(self) -> int:
        """Bytes of its own KV segment, without the parent's."""
        ...

    @property
    def state_bytes(self) -> int:
        """All other bytes, which no descendant needs."""
        ...


@dataclass(slots=True, eq=False)
class SnapshotNode:
    """A node of the snapshot tree with its memory, which may outlive its entry."""

    snapshot: Snapshot | None
    """None once it is evicted and only its KV segment is still needed."""
    segment: KVSegment
    """Keys and values between the parent and this snapshot."""
    parent: "SnapshotNode | None"
    """The node before it, whose KV segment it needs."""
    segment_bytes: int
    """Bytes of its KV segment that count as the cache's memory; 0 while they are lent to a row."""
    state_bytes: int
    entry: "CacheEntry"
    """The entry that it was stored for. If `snapshot` is None, that entry has been removed or has another node."""
    num_dependents: int = 0
    """Child nodes, and prompts that were restored from it."""
    lent_to: str | None = None
    """The row whose memory its KV segment counts as; None if it counts as the cache's."""
    lent_bytes: int = 0
    """Bytes of the KV segment while it is lent; may be an estimate."""

    def nearest_entry(self) -> "CacheEntry | None":
        """Return the nearest entry with a snapshot in memory, from this node towards the first token."""
        node: SnapshotNode | None = self
        while node is not None and node.snapshot is None:
            node = node.parent
        return node.entry if node is not None else None


@dataclass(slots=True, eq=False)
class Lineage:
    """A conversation: a chain of snapshots, and how often prompts came back to it.

    A snapshot that several conversations continue is a lineage of its own, without the snapshots after it.
    """

    is_shared: bool = False
    """Whether several conversations continue its only snapshot."""
    is_abandoned: bool = False
    """Whether the conversation has continued from a shorter prefix, without these snapshots."""
    used_s: float = 0.0
    """When a prompt last continued it, or its first snapshot was taken; monotonic seconds."""
    seen_s: float = 0.0
    """When a prompt last continued it or looked it up; monotonic seconds."""
    interval_s: float | None = None
    """Mean time between two uses; None before the second."""
    num_returns: int = 0
    """Prompts that came back to it, whether or not its snapshots were still stored."""
    entries: list["CacheEntry"] = field(default_factory=list)
    """Entries with snapshots in memory, the shortest first."""


OddsKey = tuple[SnapshotKind, str, int]
"""Kind, stage (see reuse_forecast.Stage) and returns of its lineage: snapshots with equal keys share a reuse
probability."""


@dataclass(slots=True, eq=False)
class CacheEntry:
    """A cached boundary of a prompt."""

    digest: str
    """Hex digest of `key`."""
    key: PromptKey
    """All tokens before the boundary, with tenant and images."""
    kind: SnapshotKind
    parent: str | None
    """Digest of the entry before it: its parent in memory, or its file's parent if only there; None without one."""
    origin: PromptOrigin
    """Origin of the prompt that stored it."""
    pinned: bool
    """Whether it is never evicted."""
    created_s: float
    """Monotonic seconds."""
    used_s: float
    """Monotonic seconds."""
    node: SnapshotNode | None = None
    """None if its snapshot is only on disk."""
    num_hits: int = 0
    is_resume_point: bool = False
    """Whether a preempted row or prompt will continue from it."""
    lineage: Lineage = field(default_factory=Lineage)
    given_up_as: OddsKey | None = None
    """The odds key under which it was counted as unused; None before."""

    @property
    def num_tokens(self) -> int:
        return len(self.key)

    def chain(self) -> list[SnapshotNode]:
        """Return all nodes whose KV segments it needs, from the first token on; none if it is only on disk."""
        chain, node = [], self.node
        while node is not None:
            chain.append(node)
            node = node.parent
        return chain[::-1]
