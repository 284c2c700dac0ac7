"""How soon, and how likely, a snapshot is used again: learned from what happened to others of its kind."""

import math
from dataclasses import dataclass
from typing import Literal

from engine.config import SnapshotKind
from engine.core.prefix_cache.node import Entry, Lineage, OddsKey

Stage = Literal["tip", "passed", "used", "shared"]
"""tip: the end of its conversation. passed: the same prompt left a longer one behind it. used: the conversation has
gone on from it, or past it. shared: several conversations go on from it."""

PRIOR: dict[Stage, tuple[float, float, float]] = {
    "tip": (0.5, 0.8, 0.9),
    "passed": (0.5, 0.5, 0.5),
    "used": (0.03, 0.03, 0.03),
    "shared": (0.5, 0.8, 0.9),
}
"""Probability of another use before anything is known: of lineages without a return, with one, and with more."""
PRIOR_WEIGHT = 4.0
"""In observations."""
MAX_WEIGHT = 64.0
"""Older observations fade, so that the probability follows at most about so many."""

FIRST_INTERVAL_S = 60.0
"""Between two uses, before anything is known."""
PAUSE_S = 600.0
"""A conversation may pause for so long and come back as likely as before, however quick its turns were."""
MEAN_WEIGHT = 0.05
"""Of one interval in the mean of all lineages."""
OWN_WEIGHT = 0.3
"""Of an interval in the mean of its own lineage."""


@dataclass(slots=True)
class Odds:
    """Snapshots that were used again, and that were not, with fading weights."""

    num_used: float
    num_unused: float

    @property
    def probability(self) -> float:
        return self.num_used / (self.num_used + self.num_unused)

    def add(self, used: float, unused: float) -> None:
        self.num_used = max(0.0, self.num_used + used)
        self.num_unused = max(0.0, self.num_unused + unused)
        total = self.num_used + self.num_unused
        if total > MAX_WEIGHT:
            self.num_used *= MAX_WEIGHT / total
            self.num_unused *= MAX_WEIGHT / total


class ReuseForecast:
    """Rates are uses per second. `now` is monotonic seconds, of the clock of the entries' times."""

    def __init__(self) -> None:
        self._odds: dict[OddsKey, Odds] = {}
        self._log_interval: dict[bool, float] = {}  # geometric mean over lineages, of shared ones and of the others

    def rate(self, lineage: Lineage, odds_key: OddsKey, now: float) -> float:
        """Return how often a snapshot of the lineage is expected to be used."""
        return self._of(odds_key).probability / max(self._interval_s(lineage), now - lineage.seen_s)

    def probability(self, lineage: Lineage, odds_key: OddsKey, now: float) -> float:
        """Return how likely a snapshot of the lineage is used again at all: less the longer it has not been."""
        expected_s, idle_s = max(self._interval_s(lineage), PAUSE_S), now - lineage.seen_s
        return self._of(odds_key).probability * min(1.0, expected_s / max(idle_s, 1e-3))

    def returned(self, lineage: Lineage, now: float) -> None:
        """Record that a prompt continues a conversation, whether or not its last snapshot is still there."""
        log_s = math.log(max(now - lineage.used_s, 1e-3))
        mean = self._log_interval.get(lineage.is_shared, log_s)
        self._log_interval[lineage.is_shared] = mean + MEAN_WEIGHT * (log_s - mean)
        own = math.log(lineage.interval_s) if lineage.interval_s is not None else log_s
        lineage.interval_s = math.exp(own + OWN_WEIGHT * (log_s - own))
        lineage.num_returns += 1
        lineage.used_s = lineage.seen_s = now

    def used(self, odds_key: OddsKey) -> None:
        """Record that a snapshot was used, or would have been if it had been there."""
        self._of(odds_key).add(1, 0)

    def unused(self, odds_key: OddsKey) -> None:
        """Record that a snapshot is given up unused."""
        self._of(odds_key).add(0, 1)

    def regret(self, odds_key: OddsKey) -> None:
        """Take `unused` back: the snapshot would have been of use."""
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


def odds_key_of(entry: Entry, tip: Entry | None) -> OddsKey:
    """Return what an entry's odds are learned by. tip: the last entry of its lineage that is in memory."""
    return odds_key(entry.kind, _stage(entry, tip), entry.lineage)


def odds_key(kind: SnapshotKind, stage: Stage, lineage: Lineage) -> OddsKey:
    return kind, stage, min(lineage.num_returns, 2)


def _stage(entry: Entry, tip: Entry | None) -> Stage:
    if entry.lineage.is_shared:
        return "shared"
    if entry.lineage.is_abandoned:
        return "used"
    if tip is entry:
        return "tip"
    return "used" if entry.num_hits else "passed"
