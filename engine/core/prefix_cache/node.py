"""SnapshotNode: the record of a cached boundary of a prompt; and the conversation that it belongs to."""

from dataclasses import dataclass, field, replace
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
class Lineage:
    """A conversation: a chain of snapshots, and how often prompts came back to it.

    A snapshot that several conversations continue is a lineage of its own, without the snapshots after it.
    """

    is_shared: bool = False
    """Whether several conversations continue its only snapshot."""
    is_branch_left: bool = False
    """Whether the conversation has continued from a shorter prefix, without these snapshots."""
    used_s: float = 0.0
    """When a prompt last continued it, or its first snapshot was taken; monotonic seconds."""
    seen_s: float = 0.0
    """When a prompt last continued it or looked it up; monotonic seconds."""
    interval_s: float | None = None
    """Mean time between two uses; None before the second."""
    num_returns: int = 0
    """Prompts that came back to it, whether or not its snapshots were still stored."""
    nodes: list["SnapshotNode"] = field(default_factory=list)
    """Its snapshots in memory, the shortest first."""


OddsKey = tuple[SnapshotKind, str, int]
"""Kind, stage (see reuse_forecast.Stage) and returns of its lineage: snapshots with equal keys share a reuse
probability."""


@dataclass(slots=True, eq=False)
class SnapshotNode:
    """A cached boundary of a prompt, with its memory.

    Its snapshot is in memory, only on disk, or evicted. The KV segment stays while other snapshots or prompts in
    progress need it, also if the store no longer finds the node.
    """

    digest: str
    """Hex digest of `key`."""
    key: PromptKey
    """All tokens before the boundary, with tenant and images."""
    kind: SnapshotKind
    parent_digest: str | None
    """Digest of the boundary before it: that of `parent`, or its file's parent if only there; None without one."""
    origin: PromptOrigin
    """Origin of the prompt that stored it."""
    pinned: bool
    """Whether it is never evicted."""
    created_s: float
    """Monotonic seconds."""
    used_s: float
    """Monotonic seconds."""
    num_hits: int = 0
    is_resume_point: bool = False
    """Whether a preempted row or prompt will continue from it."""
    lineage: Lineage = field(default_factory=Lineage)
    counted_unused_as: OddsKey | None = None
    """The odds key under which it was counted as unused; None before."""

    snapshot: Snapshot | None = None
    """None if it is evicted or only on disk."""
    segment: KVSegment | None = None
    """Keys and values between `parent` and this boundary; None if they are not in memory."""
    parent: "SnapshotNode | None" = None
    """The node before it, whose KV segment it needs; None without one, or without `segment`."""
    segment_bytes: int = 0
    """Bytes of its KV segment that count as the cache's memory; 0 while it has an owner."""
    state_bytes: int = 0
    """Bytes of its snapshot beside the KV segment."""
    num_dependents: int = 0
    """Nodes whose `parent` it is, and prompts in progress that hold it."""
    owner: str | None = None
    """The row whose memory its KV segment counts as; None if it counts as the cache's."""
    owned_bytes: int = 0
    """Bytes of the KV segment while it has an owner; may be an estimate."""

    @property
    def num_tokens(self) -> int:
        return len(self.key)

    @property
    def is_lost(self) -> bool:
        """Whether a KV segment up to this boundary went with a row that did not return it."""
        return any(node.kv_segment.is_lent and node.owner is None for node in self.chain())

    @property
    def kv_segment(self) -> KVSegment:
        """Its KV segment, which must be in memory."""
        assert self.segment is not None
        return self.segment

    def chain(self) -> list["SnapshotNode"]:
        """Return all nodes whose KV segments it needs, from the first token on; none if its own is not in memory."""
        chain, node = [], self if self.segment is not None else None
        while node is not None:
            chain.append(node)
            node = node.parent
        return chain[::-1]

    def nearest_in_memory(self) -> "SnapshotNode | None":
        """Return the nearest node with a snapshot in memory, from this one towards the first token."""
        node: SnapshotNode | None = self
        while node is not None and node.snapshot is None:
            node = node.parent
        return node

    def without_segment(self) -> "SnapshotNode":
        """Return a node of the same boundary without anything in memory."""
        return replace(
            self, segment=None, parent=None, segment_bytes=0, state_bytes=0, num_dependents=0, owner=None, owned_bytes=0
        )
