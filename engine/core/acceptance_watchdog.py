"""Pauses a proposer whose drafts are almost never accepted. Pure."""

import logging
from collections import deque

from engine.core.runner import Proposer

log = logging.getLogger("orchard.engine")

WATCHDOG_ROUNDS, WATCHDOG_ACCEPTANCE, WATCHDOG_PAUSE = 64, 0.2, 1024
"""The watchdog trips when less than WATCHDOG_ACCEPTANCE of the drafts of WATCHDOG_ROUNDS were accepted. Drafting pauses
for WATCHDOG_PAUSE rounds then, twice as long each time."""


class AcceptanceWatchdog:
    """Detects a proposer whose drafts are almost never accepted, such as a head with wrongly loaded norms."""

    def __init__(self, proposer: Proposer) -> None:
        self.num_trips = 0
        self._proposer: Proposer = proposer
        self._window: deque[tuple[int, int]] = deque(maxlen=WATCHDOG_ROUNDS)
        self._pause = WATCHDOG_PAUSE
        self._num_rounds_left = 0

    @property
    def num_rounds_left(self) -> int:
        """Rounds until drafting resumes; 0 when it is not paused."""
        return self._num_rounds_left

    def pause(self) -> None:
        """Pause drafting; each pause is twice as long as the one before."""
        self._window.clear()
        self._num_rounds_left, self._pause = self._pause, 2 * self._pause

    def record(self, num_drafted: int, num_accepted: int, pays: bool) -> bool:
        """Record one round of all rows, with drafts or without.

        Args:
            num_drafted: Draft tokens of all rows.
            num_accepted: How many of them were accepted.
            pays: Whether drafting is measurably faster although few drafts are accepted; then it is not paused.

        Returns:
            Whether the watchdog trips.
        """
        if self._num_rounds_left:
            self._num_rounds_left -= 1
            return False
        if not num_drafted:
            return False
        self._window.append((num_drafted, num_accepted))
        if len(self._window) < WATCHDOG_ROUNDS:
            return False
        drafted, accepted = (sum(numbers) for numbers in zip(*self._window, strict=True))
        if accepted >= WATCHDOG_ACCEPTANCE * drafted:
            self._pause = WATCHDOG_PAUSE
            return False
        self._window.clear()
        if pays:
            return False
        log.warning(
            "%s: %d of %d draft tokens were accepted in %d rounds, fewer than %.0f %%; the next check is in %d rounds",
            self._proposer,
            accepted,
            drafted,
            WATCHDOG_ROUNDS,
            100 * WATCHDOG_ACCEPTANCE,
            self._pause,
        )
        self.num_trips += 1
        self.pause()
        return True
