"""Which conversation each snapshot belongs to, across evictions, and what is learned from how it is used."""

from typing import Literal

from engine.config import SnapshotKind
from engine.core.prefix_cache.ghosts import Ghost, Ghosts
from engine.core.prefix_cache.node import Entry, Lineage
from engine.core.prefix_cache.prompt_key import PromptKey
from engine.core.prefix_cache.reuse_forecast import ReuseForecast, odds_key, odds_key_of


class Lineages:
    """`now` is monotonic seconds, of the clock of the entries' times."""

    def __init__(self) -> None:
        self.forecast = ReuseForecast()
        self._ghosts = Ghosts()

    def ghost(self, key: PromptKey, min_tokens: int, max_tokens: int) -> Ghost | None:
        """Return the longest prefix, with a number of tokens in this range, that is remembered and not stored."""
        return self._ghosts.longest(key, min_tokens, max_tokens)

    def of_new(self, key: PromptKey, kind: SnapshotKind, in_front: Entry | None, prompt: str, now: float) -> Lineage:
        """Return the lineage of the longest remembered prefix of a new snapshot, or a new one.

        Args:
            in_front: The entry that the snapshot is computed behind, though it may have been evicted meanwhile.
            prompt: Which prompt it is of. A ghost that this prompt has left itself is no earlier turn.
        """
        num_in_front = in_front.num_tokens if in_front is not None else 0
        ghost = self._ghosts.longest(key, num_in_front + 1, len(key))
        if ghost is not None:
            if not prompt or ghost.prompt != prompt:
                self._came_back(ghost, in_front, now)
            if not ghost.lineage.is_shared or ghost.num_tokens == len(key):
                return ghost.lineage
        if kind != "system" and in_front is not None and not in_front.lineage.is_shared:
            return in_front.lineage
        return self.started(kind, now)

    def started(self, kind: SnapshotKind, now: float) -> Lineage:
        return Lineage(is_shared=kind == "system", used_s=now, seen_s=now)

    def rate_of_new(self, lineage: Lineage, kind: SnapshotKind, now: float) -> float:
        """Return how often a snapshot is expected to be used if it is stored as the last of its lineage."""
        return self.forecast.rate(lineage, _new_odds_key(lineage, kind), now)

    def used(self, entry: Entry, now: float) -> None:
        """Record that a prompt continues an entry, which is in memory."""
        lineage = entry.lineage
        is_tip = lineage.entries[-1] is entry
        self.forecast.used(odds_key_of(entry, lineage.entries[-1]))
        if entry.given_up_as is not None and (lineage.is_abandoned or not is_tip):
            self.forecast.regret(entry.given_up_as)
        entry.given_up_as, lineage.is_abandoned = None, False
        if is_tip and len(lineage.entries) > 1:
            self._give_up(lineage.entries[-2])
        elif not is_tip:
            self._fork(entry)
        self.forecast.returned(entry.lineage, now)

    def evicted(self, entry: Entry) -> None:
        """Record that an entry is about to be evicted; it is still in its lineage."""
        self._give_up(entry)

    def rejected(self, key: PromptKey, kind: SnapshotKind, lineage: Lineage, prompt: str) -> None:
        """Record that a snapshot is not stored because others are worth more."""
        odds = _new_odds_key(lineage, kind)
        self.forecast.unused(odds)
        self._ghosts.add(key.digest(), Ghost(kind, len(key), "evicted", lineage, odds, prompt))

    def remember(self, entry: Entry, reason: Literal["evicted", "cleared"]) -> None:
        """Keep what is known of an entry that is no longer stored."""
        self._ghosts.add(
            entry.digest, Ghost(entry.kind, entry.num_tokens, reason, entry.lineage, entry.given_up_as, "")
        )

    def stored(self, digest: str) -> None:
        self._ghosts.discard(digest)

    def clear(self) -> None:
        self._ghosts.clear()

    def _came_back(self, ghost: Ghost, in_front: Entry | None, now: float) -> None:
        """A prompt would have used a snapshot that is not there."""
        if ghost.given_up_as is not None:
            self.forecast.regret(ghost.given_up_as)
            self.forecast.used(ghost.given_up_as)
            ghost.given_up_as = None
            if in_front is None or in_front.lineage is not ghost.lineage:  # else `used` has recorded the return
                self.forecast.returned(ghost.lineage, now)

    def _give_up(self, entry: Entry) -> None:
        """Count an entry, which is in its lineage, as one that is not used again."""
        if entry.given_up_as is None:
            entry.given_up_as = odds_key_of(entry, entry.lineage.entries[-1])
            self.forecast.unused(entry.given_up_as)

    def _fork(self, entry: Entry) -> None:
        """A prompt continues an entry that has longer ones of its lineage behind it.

        The first time, the prompts of this conversation go on from here, as they do where a template renders the end of
        a prompt differently in the next one: the entries behind it are given up. If it has been continued before, it is
        a prefix that several conversations have in common.
        """
        lineage = entry.lineage
        at = lineage.entries.index(entry)
        if entry.num_hits:
            del lineage.entries[at]
            entry.lineage = Lineage(True, False, entry.used_s, entry.used_s, entries=[entry])
            return
        behind = lineage.entries[at + 1 :]
        for one in behind:
            self._give_up(one)
        del lineage.entries[at + 1 :]
        for one in behind:
            one.lineage = Lineage(False, True, lineage.used_s, lineage.seen_s, entries=[one])


def _new_odds_key(lineage: Lineage, kind: SnapshotKind) -> tuple[SnapshotKind, str, int]:
    return odds_key(kind, "shared" if lineage.is_shared else "tip", lineage)
