"""Assigns snapshots to conversations, across evictions, and learns from their use."""

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Literal

from engine.config import SnapshotKind
from engine.core.prefix_cache.node import Lineage, OddsKey, SnapshotNode
from engine.core.prefix_cache.prompt_key import PromptKey
from engine.core.prefix_cache.reuse_forecast import ReuseForecast, odds_key, odds_key_of

MAX_GHOSTS = 1024
"""Boundaries without a stored snapshot that are remembered, as in the ghost lists of ARC (Megiddo and Modha, 2003)."""


@dataclass(slots=True, eq=False)
class Ghost:
    """A boundary whose snapshot was evicted, cleared or rejected."""

    kind: SnapshotKind
    num_tokens: int
    reason: Literal["evicted", "cleared"]
    """A rejected snapshot counts as evicted."""
    lineage: Lineage
    counted_unused_as: OddsKey | None
    """The odds key under which it was counted as unused; None once a prompt has come back to it."""
    row_id: str
    """Id of the row whose snapshot was rejected; '' for one that was evicted."""


class Lineages:
    """Tracks conversations. `now` is always monotonic seconds on the clock of the nodes' times."""

    def __init__(self) -> None:
        self.forecast = ReuseForecast()
        self._ghosts: OrderedDict[str, Ghost] = OrderedDict()  # by digest, the oldest one first
        self._lengths: Counter[int] = Counter()  # of the ghosts

    def ghost(self, key: PromptKey, min_tokens: int, max_tokens: int) -> Ghost | None:
        """Return the longest ghost of min_tokens to max_tokens tokens that is a prefix of the key; None without one."""
        lengths = sorted(length for length in self._lengths if min_tokens <= length <= max_tokens)
        found = [self._ghosts[digest] for _, digest in key.digests(lengths) if digest in self._ghosts]
        return found[-1] if found else None

    def of_new(self, key: PromptKey, kind: SnapshotKind, base: SnapshotNode | None, row_id: str, now: float) -> Lineage:
        """Return the lineage of a new snapshot: that of its longest ghost, that of its parent, or a new one.

        Args:
            key: The tokens before its boundary.
            kind: Kind of its boundary.
            base: The node that the snapshot is computed after, though it may have been evicted meanwhile.
            row_id: The row whose tokens it has; '' if unknown. A rejected snapshot for which the same row asks again
                does not count as a return.
            now: Monotonic seconds.
        """
        num_before = base.num_tokens if base is not None else 0
        ghost = self.ghost(key, num_before + 1, len(key))
        if ghost is not None:
            if not row_id or ghost.row_id != row_id:
                self._missed(ghost, base, now)
            if not ghost.lineage.is_shared or ghost.num_tokens == len(key):
                return ghost.lineage
        if kind != "system" and base is not None and not base.lineage.is_shared:
            return base.lineage
        return self.started(kind, now)

    def started(self, kind: SnapshotKind, now: float) -> Lineage:
        """Return a new lineage."""
        return Lineage(is_shared=kind == "system", used_s=now, seen_s=now)

    def rate_of_new(self, lineage: Lineage, kind: SnapshotKind, now: float) -> float:
        """Return the expected uses per second of a snapshot stored as the last of its lineage."""
        return self.forecast.rate(lineage, _new_odds_key(lineage, kind), now)

    def used(self, node: SnapshotNode, now: float) -> None:
        """Record that a prompt continues a node, which is in memory."""
        lineage = node.lineage
        is_leaf = lineage.nodes[-1] is node
        self.forecast.used(odds_key_of(node, lineage.nodes[-1]))
        if node.counted_unused_as is not None and (lineage.is_branch_left or not is_leaf):
            self.forecast.undo_unused(node.counted_unused_as)
        node.counted_unused_as, lineage.is_branch_left = None, False
        if is_leaf and len(lineage.nodes) > 1:
            self.count_unused(lineage.nodes[-2])
        elif not is_leaf:
            self._fork(node)
        self.forecast.returned(node.lineage, now)

    def rejected(self, node: SnapshotNode, row_id: str) -> None:
        """Record that a snapshot is not stored because others are worth more."""
        odds = _new_odds_key(node.lineage, node.kind)
        self.forecast.unused(odds)
        self._add_ghost(node.digest, Ghost(node.kind, node.num_tokens, "evicted", node.lineage, odds, row_id))

    def remember(self, node: SnapshotNode, reason: Literal["evicted", "cleared"]) -> None:
        """Keep a ghost of a node that is no longer stored."""
        ghost = Ghost(node.kind, node.num_tokens, reason, node.lineage, node.counted_unused_as, "")
        self._add_ghost(node.digest, ghost)

    def discard_ghost(self, digest: str) -> None:
        """Remove the ghost of a boundary, which is stored again; unknown digests are ignored."""
        if (ghost := self._ghosts.pop(digest, None)) is not None:
            self._lengths[ghost.num_tokens] -= 1
            if not self._lengths[ghost.num_tokens]:
                del self._lengths[ghost.num_tokens]

    def clear(self) -> None:
        """Forget all ghosts."""
        self._ghosts.clear()
        self._lengths.clear()

    def _add_ghost(self, digest: str, ghost: Ghost) -> None:
        self.discard_ghost(digest)
        self._ghosts[digest] = ghost
        self._lengths[ghost.num_tokens] += 1
        if len(self._ghosts) > MAX_GHOSTS:
            self.discard_ghost(next(iter(self._ghosts)))

    def _missed(self, ghost: Ghost, base: SnapshotNode | None, now: float) -> None:
        """Record that a prompt would have used a snapshot that is not stored."""
        if ghost.counted_unused_as is not None:
            self.forecast.undo_unused(ghost.counted_unused_as)
            self.forecast.used(ghost.counted_unused_as)
            ghost.counted_unused_as = None
            if base is None or base.lineage is not ghost.lineage:  # else `used` has recorded the return
                self.forecast.returned(ghost.lineage, now)

    def count_unused(self, node: SnapshotNode) -> None:
        """Count a node, which is still in its lineage, as unused, unless it is already."""
        if node.counted_unused_as is None:
            node.counted_unused_as = odds_key_of(node, node.lineage.nodes[-1])
            self.forecast.unused(node.counted_unused_as)

    def _fork(self, node: SnapshotNode) -> None:
        """Record that a prompt continues a node that is not the last of its lineage.

        At first use, the conversation is assumed to continue from here, as with templates that render the end of a
        prompt differently in the next one: the nodes after it are given up. A node that was used before is a prefix
        shared by several conversations, and gets a lineage of its own.
        """
        lineage = node.lineage
        at = lineage.nodes.index(node)
        if node.num_hits:
            del lineage.nodes[at]
            node.lineage = Lineage(True, False, node.used_s, node.used_s, nodes=[node])
            return
        after = lineage.nodes[at + 1 :]
        for one in after:
            self.count_unused(one)
        del lineage.nodes[at + 1 :]
        for one in after:
            one.lineage = Lineage(False, True, lineage.used_s, lineage.seen_s, nodes=[one])


def _new_odds_key(lineage: Lineage, kind: SnapshotKind) -> tuple[SnapshotKind, str, int]:
    return odds_key(kind, "shared" if lineage.is_shared else "leaf", lineage)
