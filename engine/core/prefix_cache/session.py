"""PrefixCacheSession: what the prefix cache knows about a prompt in progress, and what that prompt waits for."""

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from engine.core.prefix_cache.node import Snapshot, SnapshotNode
from engine.core.prefix_cache.prompt_key import PromptKey
from engine.placement import PrefixHolder
from engine.protocol import Boundary
from engine.snapshot_store.snapshot_client import Fetch

if TYPE_CHECKING:
    from engine.core.prompt import Prompt

ReadState = Literal["done", "pending", "lost"]
"""How far a reading is: everything is in memory, more is pending, or a part of it was lost or did not fit."""


@dataclass(slots=True, eq=False)
class Reading:
    """A snapshot being read from disk, with those of its ancestors that are only on disk, first ancestor first."""

    pending: list[tuple[str, Future[dict[str, np.ndarray]]]]
    """Digests of the snapshots that are not in memory yet, with the futures of their arrays."""
    until_s: float
    """When waiting for it ends; monotonic seconds."""
    row_id: str | None
    """The row whose reservation covers the keys and values; None if the cache must have memory for them."""
    base: SnapshotNode | None = None
    """The node before the next snapshot; its KV segment is kept, even if it is evicted, until that one is in memory."""
    copying: Iterator[Snapshot | None] | None = None
    """The import of the next snapshot, layer by layer."""
    num_bytes: int = 0
    """Bytes copied to the device."""
    copied_s: float = 0.0
    """Seconds of copying."""


@dataclass(slots=True, eq=False)
class Fetching:
    """A prefix that is being fetched."""

    fetch: Fetch
    began_s: float
    """Monotonic seconds."""
    until_s: float
    """When waiting for it ends; monotonic seconds."""


@dataclass(slots=True, eq=False)
class PrefixCacheSession:
    """A prompt's use of the prefix cache."""

    prompt: "Prompt" = field(repr=False)
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
