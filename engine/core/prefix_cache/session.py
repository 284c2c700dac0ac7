"""PrefixCacheSession: what the prefix cache knows about a prompt in progress."""

from dataclasses import dataclass, field

from engine.core.prefix_cache.disk_tier import Reading
from engine.core.prefix_cache.node import CacheEntry, SnapshotNode
from engine.core.prefix_cache.prefix_fetcher import Fetching
from engine.core.prefix_cache.prompt_key import PromptKey
from engine.core.request import Request
from engine.placement import PrefixHolder
from engine.protocol import Boundary


@dataclass(slots=True, eq=False)
class PrefixCacheSession:
    """A prompt in progress and its use of the prefix cache."""

    row: Request
    """The first of the rows that share the prompt."""
    key: PromptKey
    max_tokens: int
    """Longest prefix to restore: longer ones failed, or would leave nothing to compute."""
    todo: list[Boundary] = field(default_factory=list)
    """Boundaries left to compute, the next one first."""
    base: SnapshotNode | None = None
    """The node of the snapshot that it was restored from or stored last."""
    base_digest: str | None = None
    base_tokens: int = 0
    stored: list[CacheEntry] = field(default_factory=list)
    """Entries that it has stored."""
    reading: Reading | None = None
    """The snapshot on disk that it waits for; None if it waits for none."""
    holder: PrefixHolder | None = None
    """The node from which its prefix may be fetched; None once that is decided."""
    fetching: Fetching | None = None
    """The fetch that it waits for; None if it waits for none."""
    in_memory: bool = False
    """Whether to use only snapshots in memory, because reading from disk failed or is not worth it."""

    @property
    def is_computing(self) -> bool:
        """Whether the lookup of its prefix is complete."""
        return self.reading is None and self.fetching is None

    def go_on_after(self, entry: CacheEntry, node: SnapshotNode) -> None:
        """Continue from a snapshot, whose node the session holds from now on."""
        self.base, self.base_digest, self.base_tokens = node, entry.digest, entry.num_tokens
