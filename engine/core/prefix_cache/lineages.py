"""Assigns snapshots to conversations, across evictions, and learns from their use."""

from typing import Literal

from engine.config import SnapshotKind
from engine.core.prefix_cache.ghosts import Ghost, Ghosts
from engine.core.prefix_cache.node import Lineage, SnapshotNode
from engine.core.prefix_cache.prompt_key import PromptKey
from engine.core.prefix_cache.reuse_forecast import ReuseForecast, odds_key, odds_key_of


class Lineages:
    """Tracks conversations. `now` is always monotonic seconds on the clock of the nodes' times."""

    def __init__(self) -> None:
        self.forecast = ReuseForecast()
        self._ghosts = Ghosts()

    def ghost(self, key: PromptKey, min_tokens: int, max_tokens: int) -> Ghost | None:
        """Return the longest remembered prefix that is not stored, of min_tokens to max_tokens tokens, or None."""
        return self._ghosts.longest(key, min_tokens, max_tokens)

    def of_new(
        self, key: PromptKey, kind: SnapshotKind, in_front: SnapshotNode | None, row_id: str, now: float
    ) -> Lineage:
        """Return the lineage of a new snapshot: that of its longest ghost, that of its parent, or a new one.

        Args:
            key: The tokens before its boundary.
            kind: Kind of its boundary.
            in_front: The node that the snapshot is computed after, though it may have been evicted meanwhile.
            row_id: The row whose tokens it has; '' if unknown. A rejected snapshot for which the same row asks again
                does not count as a return.
            now: Monotonic seconds.
        """
        num_in_front = in_front.num_tokens if in_front is not None else 0
        ghost = self._ghosts.longest(key, num_in_front + 1, len(key))
        if ghost is not None:
            if not row_id or ghost.row_id != row_id:
                self._came_back(ghost, in_front, now)
            if not ghost.lineage.is_shared or ghost.num_tokens == len(key):
                return ghost.lineage
        if kind != "system" and in_front is not None and not in_front.lineage.is_shared:
            return in_front.lineage
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
        is_tip = lineage.nodes[-1] is node
        self.forecast.used(odds_key_of(node, lineage.nodes[-1]))
        if node.given_up_as is not None and (lineage.is_abandoned or not is_tip):
            self.forecast.regret(node.given_up_as)
        node.given_up_as, lineage.is_abandoned = None, False
        if is_tip and len(lineage.nodes) > 1:
            self._give_up(lineage.nodes[-2])
        elif not is_tip:
            self._fork(node)
        self.forecast.returned(node.lineage, now)

    def evicted(self, node: SnapshotNode) -> None:
        """Record that a node, still in its lineage, is about to be evicted."""
        self._give_up(node)

    def rejected(self, node: SnapshotNode, row_id: str) -> None:
        """Record that a snapshot is not stored because others are worth more."""
        odds = _new_odds_key(node.lineage, node.kind)
        self.forecast.unused(odds)
        self._ghosts.add(node.digest, Ghost(node.kind, node.num_tokens, "evicted", node.lineage, odds, row_id))

    def remember(self, node: SnapshotNode, reason: Literal["evicted", "cleared"]) -> None:
        """Keep a ghost of a node that is no longer stored."""
        self._ghosts.add(node.digest, Ghost(node.kind, node.num_tokens, reason, node.lineage, node.given_up_as, ""))

    def stored(self, digest: str) -> None:
        """Remove the ghost of a boundary that is stored again."""
        self._ghosts.discard(digest)

    def clear(self) -> None:
        self._ghosts.clear()

    def _came_back(self, ghost: Ghost, in_front: SnapshotNode | None, now: float) -> None:
        """Record that a prompt would have used a snapshot that is not stored."""
        if ghost.given_up_as is not None:
            self.forecast.regret(ghost.given_up_as)
            self.forecast.used(ghost.given_up_as)
            ghost.given_up_as = None
            if in_front is None or in_front.lineage is not ghost.lineage:  # else `used` has recorded the return
                self.forecast.returned(ghost.lineage, now)

    def _give_up(self, node: SnapshotNode) -> None:
        """Count a node, which is in its lineage, as unused."""
        if node.given_up_as is None:
            node.given_up_as = odds_key_of(node, node.lineage.nodes[-1])
            self.forecast.unused(node.given_up_as)

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
        behind = lineage.nodes[at + 1 :]
        for one in behind:
            self._give_up(one)
        del lineage.nodes[at + 1 :]
        for one in behind:
            one.lineage = Lineage(False, True, lineage.used_s, lineage.seen_s, nodes=[one])


def _new_odds_key(lineage: Lineage, kind: SnapshotKind) -> tuple[SnapshotKind, str, int]:
    return odds_key(kind, "shared" if lineage.is_shared else "tip", lineage)
