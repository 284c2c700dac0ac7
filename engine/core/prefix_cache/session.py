"""PrefixCacheSession: what the prefix cache knows about a prompt in progress."""

from dataclasses import dataclass, field

from engine.core.prefix_cache.disk_tier import Reading
from engine.core.prefix_cache.node import SnapshotNode
from engine.core.prefix_cache.prefix_fetcher import Fetching
from engine.core.prefix_cache.prompt_key import PromptKey
from engine.core.request import Request
from engine.placement import PrefixHolder
from engine.protocol import Boundary


@dataclass(slots=True, eq=False)
class PrefixCacheSession:
    """A prompt's use of the prefix cache."""

    row: Request
    """The first of the rows that share the prompt."""
    key: PromptKey
    max_tokens: int
    """Longest prefix to restore: longer ones failed, or would leave nothing to compute."""
    todo: list[Boundary] = field(default_factory=list)
    """Boundaries left to compute, the next one first."""
    base: SnapshotNode | None = None
    """The snapshot that it was restored from or stored last, whose KV segment it holds; None without one."""
    stored: list[str] = field(default_factory=list)
    """Digests of the snapshots that it has stored."""
    reading: Reading | None = None
    """The snapshot on disk that it waits for; None if it waits for none."""
    holder: PrefixHolder | None = None
    """The node from which its prefix may be fetched; None once that is decided."""
    fetching: Fetching | None = None
    """The fetch that it waits for; None if it waits for none."""
    skips_disk: bool = False
    """Whether to use only snapshots in memory, because reading from disk failed or is not worth it."""

    @property
    def has_restored(self) -> bool:
        """Whether the lookup of its prefix is complete."""
        return self.reading is None and self.fetching is None

    @property
    def is_storing(self) -> bool:
        """Whether it will still store snapshots."""
        return self.has_restored and bool(self.todo)

    @property
    def base_tokens(self) -> int:
        """Tokens before its last snapshot."""
        return 0 if self.base is None else self.base.num_tokens
