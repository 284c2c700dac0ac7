"""Ghost entries: boundaries whose snapshots were evicted, cleared or rejected."""

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Literal

from engine.config import SnapshotKind
from engine.core.prefix_cache.node import Lineage, OddsKey
from engine.core.prefix_cache.prompt_key import PromptKey

MAX_GHOSTS = 1024


@dataclass(slots=True, eq=False)
class Ghost:
    """A boundary whose snapshot is not stored."""

    kind: SnapshotKind
    num_tokens: int
    reason: Literal["evicted", "cleared"]
    """A rejected snapshot counts as evicted."""
    lineage: Lineage
    given_up_as: OddsKey | None
    """The odds key under which it was counted as unused; None once a prompt has come back to it."""
    row_id: str
    """Id of the row whose snapshot was rejected; '' for one that was evicted."""


class Ghosts:
    """The last MAX_GHOSTS ghosts by digest."""

    def __init__(self) -> None:
        self._ghosts: OrderedDict[str, Ghost] = OrderedDict()
        self._lengths: Counter[int] = Counter()

    def longest(self, key: PromptKey, min_tokens: int, max_tokens: int) -> Ghost | None:
        """Return the longest ghost of min_tokens to max_tokens tokens that is a prefix of the key; None without one."""
        lengths = sorted(length for length in self._lengths if min_tokens <= length <= max_tokens)
        found = [self._ghosts[digest] for _, digest in key.digests(lengths) if digest in self._ghosts]
        return found[-1] if found else None

    def add(self, digest: str, ghost: Ghost) -> None:
        """Add a ghost and drop the oldest one beyond MAX_GHOSTS."""
        self.discard(digest)
        self._ghosts[digest] = ghost
        self._lengths[ghost.num_tokens] += 1
        if len(self._ghosts) > MAX_GHOSTS:
            self.discard(next(iter(self._ghosts)))

    def discard(self, digest: str) -> None:
        """Remove a ghost; unknown digests are ignored."""
        ghost = self._ghosts.pop(digest, None)
        if ghost is None:
            return
        self._lengths[ghost.num_tokens] -= 1
        if not self._lengths[ghost.num_tokens]:
            del self._lengths[ghost.num_tokens]

    def clear(self) -> None:
        self._ghosts.clear()
        self._lengths.clear()
