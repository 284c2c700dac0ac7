"""What is remembered of snapshots that are no longer stored, or were not worth storing."""

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Literal

from engine.config import SnapshotKind
from engine.core.prefix_cache.node import Lineage, OddsKey
from engine.core.prefix_cache.prompt_key import PromptKey

MAX_GHOSTS = 1024


@dataclass(slots=True, eq=False)
class Ghost:
    """A boundary of some prompt whose snapshot is not there."""

    kind: SnapshotKind
    num_tokens: int
    reason: Literal["evicted", "cleared"]
    """A snapshot that was rejected because others are worth more counts as evicted."""
    lineage: Lineage
    given_up_as: OddsKey | None
    """How it was counted as not used again; None once a prompt has come back to it."""
    prompt: str
    """Which prompt's snapshot was rejected; '' for one that was evicted."""


class Ghosts:
    """The last MAX_GHOSTS of them, by digest."""

    def __init__(self) -> None:
        self._ghosts: OrderedDict[str, Ghost] = OrderedDict()
        self._lengths: Counter[int] = Counter()

    def longest(self, key: PromptKey, min_tokens: int, max_tokens: int) -> Ghost | None:
        """Return the longest prefix of the key with a number of tokens in this range, both ends included."""
        lengths = sorted(length for length in self._lengths if min_tokens <= length <= max_tokens)
        found = [self._ghosts[digest] for _, digest in key.digests(lengths) if digest in self._ghosts]
        return found[-1] if found else None

    def add(self, digest: str, ghost: Ghost) -> None:
        self.discard(digest)
        self._ghosts[digest] = ghost
        self._lengths[ghost.num_tokens] += 1
        if len(self._ghosts) > MAX_GHOSTS:
            self.discard(next(iter(self._ghosts)))

    def discard(self, digest: str) -> None:
        ghost = self._ghosts.pop(digest, None)
        if ghost is None:
            return
        self._lengths[ghost.num_tokens] -= 1
        if not self._lengths[ghost.num_tokens]:
            del self._lengths[ghost.num_tokens]

    def clear(self) -> None:
        self._ghosts.clear()
        self._lengths.clear()
