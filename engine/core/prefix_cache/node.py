"""What the prefix cache stores about a boundary of a prompt: its snapshot, its entry, and the conversation it is in."""

from dataclasses import dataclass, field
from typing import Protocol

from engine.config import SnapshotKind
from engine.core.prefix_cache.prompt_key import PromptKey
from engine.protocol import PromptOrigin


class Stretch(Protocol):
    """The keys and values of the tokens between two snapshots, or their place in the cache of the row that has them."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its keys and values; 0 while they are lent to a row."""
        ...

    @property
    def is_lent(self) -> bool:
        """Whether its keys and values are in the cache of a row, or were lost with one."""
        ...


class Snapshot(Protocol):
    """The state behind a prefix: opaque here, and alive for as long as someone holds it."""

    @property
    def stretch(self) -> Stretch:
        """The keys and values behind the parent snapshot."""
        ...

    @property
    def stretch_bytes(self) -> int:
        """Of its own stretch, without the parent's."""
        ...

    @property
    def state_bytes(self) -> int:
        """All the rest, which no descendant needs."""
        ...


@dataclass(slots=True, eq=False)
class Held:
    """The bytes of a snapshot, which may outlive its entry."""

    snapshot: Snapshot | None
    """None once it is evicted and only its stretch is still needed."""
    stretch: Stretch
    """Keys and values between the parent and this snapshot."""
    parent: "Held | None"
    """The snapshot in front of it, whose stretch it needs."""
    stretch_bytes: int
    """Bytes of the keys and values that count as the cache's memory; 0 while they are lent to a row."""
    state_bytes: int
    entry: "Entry"
    """Its entry, which is no longer stored, or has another snapshot, where this one is None."""
    num_dependents: int = 0
    """Snapshots behind it, and prompts that were restored from it."""
    lent_to: str | None = None
    """The row whose memory its keys and values count as, None if they count as the cache's."""
    lent_bytes: int = 0
    """Bytes of the keys and values while they are lent; partly an estimate."""


@dataclass(slots=True, eq=False)
class Lineage:
    """A conversation: snapshots each of which continues the one before, and how often prompts came back to it.

    A snapshot that several conversations continue is a lineage of its own, which the snapshots behind it are not in.
    """

    is_shared: bool = False
    """Whether several conversations continue its only snapshot."""
    is_abandoned: bool = False
    """Whether the conversation has gone on from a shorter prefix, and left these snapshots behind."""
    used_s: float = 0.0
    """When a prompt last continued it, or its first snapshot was taken."""
    seen_s: float = 0.0
    """When a prompt last continued it, or is known to be about to."""
    interval_s: float | None = None
    """Mean time between two uses; None before the second."""
    num_returns: int = 0
    """Prompts that came back to it, whether or not its snapshots were still there."""
    entries: list["Entry"] = field(default_factory=list)
    """Those whose snapshots are in memory, the shortest first."""


OddsKey = tuple[SnapshotKind, str, int]
"""Kind, stage (see reuse_forecast.Stage) and returns of its lineage: what is equally likely to be used again."""


@dataclass(slots=True, eq=False)
class Entry:
    """A boundary of some prompt."""

    digest: str
    key: PromptKey
    kind: SnapshotKind
    parent: str | None
    """Digest of the entry in front of it, as it is in memory, else on disk."""
    origin: PromptOrigin
    pinned: bool
    created_s: float
    used_s: float
    held: Held | None = None
    """None if its snapshot is on disk alone."""
    num_hits: int = 0
    is_awaited: bool = False
    """Whether a row that has lost its place goes on from it."""
    lineage: Lineage = field(default_factory=Lineage)
    given_up_as: OddsKey | None = None
    """Set once it is counted as one that is not used again."""

    @property
    def num_tokens(self) -> int:
        return len(self.key)
