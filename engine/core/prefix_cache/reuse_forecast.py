"""Forecasts when and how probably a snapshot is used again, learned from similar snapshots."""

import math
from dataclasses import dataclass
from typing import Literal

from engine.config import SnapshotKind
from engine.core.prefix_cache.node import Lineage, OddsKey, SnapshotNode

Stage = Literal["leaf", "inner", "continued", "shared"]
"""leaf: the last snapshot of its conversation. inner: the same prompt stored a longer one after it. continued: the
conversation has continued from it, or after it. shared: several conversations continue from it."""

PRIOR: dict[Stage, tuple[float, float, float]] = {
    "leaf": (0.5, 0.8, 0.9),
    "inner": (0.5, 0.5, 0.5),
    "continued": (0.03, 0.03, 0.03),
    "shared": (0.5, 0.8, 0.9),
}
"""Prior probability of another use, for lineages without a return, with one, and with more."""
PRIOR_WEIGHT = 4.0
"""Weight of the prior, in observations."""
MAX_WEIGHT = 64.0
"""Total weight of observations; older ones fade."""

FIRST_INTERVAL_S = 60.0
"""Assumed seconds between two uses, before anything is measured."""
PAUSE_S = 600.0
"""A conversation may pause for this long without becoming less likely to return, however short its turns were."""
MEAN_WEIGHT = 0.05
"""Weight of one interval in the mean of all lineages."""
OWN_WEIGHT = 0.3
"""Weight of an interval in the mean of its own lineage."""


@dataclass(slots=True)
class Odds:
    """Fading counts of snapshots that were used again and that were not."""

    num_used: float
    num_unused: float

    @property
    def probability(self) -> float:
        return self.num_used / (self.num_used + self.num_unused)

    def add(self, used: float, unused: float) -> None:
        """Add observations; negative ones take earlier ones back."""
        self.num_used = max(0.0, self.num_used + used)
        self.num_unused = max(0.0, self.num_unused + unused)
        total = self.num_used + self.num_unused
        if total > MAX_WEIGHT:
            self.num_used *= MAX_WEIGHT / total
            self.num_unused *= MAX_WEIGHT / total


class ReuseForecast:
    """Predicts reuse. Rates are uses per second; `now` is monotonic seconds on the clock of the nodes' times."""

    def __init__(self) -> None:
        self._odds: dict[OddsKey, Odds] = {}
        self._log_interval: dict[bool, float] = {}  # is_shared -> mean of log seconds over these lineages

    def rate(self, lineage: Lineage, odds_key: OddsKey, now: float) -> float:
        """Return the expected uses per second of a snapshot of the lineage."""
        return self._of(odds_key).probability / max(self._interval_s(lineage), now - lineage.seen_s)

    def probability(self, lineage: Lineage, odds_key: OddsKey, now: float) -> float:
        """Return the probability that a snapshot of the lineage is used again at all; it falls with its idle time."""
        expected_s, idle_s = max(self._interval_s(lineage), PAUSE_S), now - lineage.seen_s
        return self._of(odds_key).probability * min(1.0, expected_s / max(idle_s, 1e-3))

    def returned(self, lineage: Lineage, now: float) -> None:
        """Record that a prompt continues a conversation, whether or not its last snapshot is still stored."""
        log_s = math.log(max(now - lineage.used_s, 1e-3))
        mean = self._log_interval.get(lineage.is_shared, log_s)
        self._log_interval[lineage.is_shared] = mean + MEAN_WEIGHT * (log_s - mean)
        own = math.log(lineage.interval_s) if lineage.interval_s is not None else log_s
        lineage.interval_s = math.exp(own + OWN_WEIGHT * (log_s - own))
        lineage.num_returns += 1
        lineage.used_s = lineage.seen_s = now

    def used(self, odds_key: OddsKey) -> None:
        """Record that a snapshot was used, or would have been used if it were stored."""
        self._of(odds_key).add(1, 0)

    def unused(self, odds_key: OddsKey) -> None:
        """Record that a snapshot counts as unused."""
        self._of(odds_key).add(0, 1)

    def undo_unused(self, odds_key: OddsKey) -> None:
        """Undo `unused`: the snapshot would have been used."""
        self._of(odds_key).add(0, -1)

    def _of(self, key: OddsKey) -> Odds:
        if key not in self._odds:
            _, stage, num_returns = key
            prior = PRIOR[stage][num_returns]  # type: ignore[index]
            self._odds[key] = Odds(PRIOR_WEIGHT * prior, PRIOR_WEIGHT * (1 - prior))
        return self._odds[key]

    def _interval_s(self, lineage: Lineage) -> float:
        if lineage.interval_s is not None:
            return lineage.interval_s
        of_others = self._log_interval.get(not lineage.is_shared, math.log(FIRST_INTERVAL_S))
        return math.exp(self._log_interval.get(lineage.is_shared, of_others))


def odds_key_of(node: SnapshotNode, leaf: SnapshotNode | None) -> OddsKey:
    """Return the odds key of a node. leaf: the last node of its lineage that is in memory."""
    return odds_key(node.kind, _stage(node, leaf), node.lineage)


def odds_key(kind: SnapshotKind, stage: Stage, lineage: Lineage) -> OddsKey:
    """Return the odds key of a snapshot of this kind and stage."""
    return kind, stage, min(lineage.num_returns, 2)


def _stage(node: SnapshotNode, leaf: SnapshotNode | None) -> Stage:
    if node.lineage.is_shared:
        return "shared"
    if node.lineage.is_branch_left:
        return "continued"
    if leaf is node:
        return "leaf"
    return "continued" if node.num_hits else "inner"
