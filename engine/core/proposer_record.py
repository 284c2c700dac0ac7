"""ProposerRecord: one proposer's configuration, the acceptance of its drafts by depth, and its watchdog. Pure."""

import logging
from collections import deque
from collections.abc import Collection
from typing import Any

from engine.config import DraftLimits, DraftMode
from engine.core.runner import Drafts, RowOutput

log = logging.getLogger("orchard.engine")

ASSUMED_ACCEPTANCE, DEPTH_DECAY = 0.8, 0.9
"""Prior acceptance of the first draft token, and the factor from each depth to the next. Heads of released models
reach 0.7 to 0.9 at the first draft (DeepSeek-V3 report, arXiv 2412.19437: 0.85 to 0.90), and less where a head reads
its own output."""
ASSUMED_ROWS = 4.0
"""Weight of the prior, in rows of a step."""
ACCEPTANCE_ROWS = 128
"""Rows of steps over which acceptance is averaged, at least 8 steps of the batch."""
RECENT_ROWS, MAX_CHANGE = 12, 0.35
"""When the average over RECENT_ROWS differs from the long one by more than MAX_CHANGE, the text has changed and the
long average is reset to it."""
UNSEEN_STEPS = 512
"""After this many steps without drafts of a depth, its measurements have half their weight."""

WATCHDOG_ROUNDS, WATCHDOG_ACCEPTANCE, WATCHDOG_PAUSE = 64, 0.2, 1024
"""The watchdog trips when less than WATCHDOG_ACCEPTANCE of the drafts of WATCHDOG_ROUNDS were accepted. Drafting pauses
for WATCHDOG_PAUSE rounds then, twice as long each time."""


class AcceptanceRates:
    """The acceptance rate at each depth, given that all shallower drafts were accepted.

    It is an average over all rows of all batches.
    """

    def __init__(self, max_draft_tokens: int):
        self._mean: list[float | None] = [None] * max_draft_tokens
        self._recent = [0.0] * max_draft_tokens
        self._weight = [0.0] * max_draft_tokens
        self._unseen = [0] * max_draft_tokens  # steps

    @property
    def by_depth(self) -> list[float | None]:
        """Measured rates; None where nothing was drafted."""
        return list(self._mean)

    def record(self, num_drafted: int, num_accepted: list[int]) -> None:
        """Learn from one round.

        Args:
            num_drafted: Draft tokens per row.
            num_accepted: Accepted draft tokens of each row.
        """
        for depth in range(len(self._mean)):
            reached = sum(n >= depth for n in num_accepted) if depth < num_drafted else 0
            if reached:
                self._add(depth, sum(n > depth for n in num_accepted) / reached, reached)
            else:
                self._unseen[depth] += 1

    def expected_tokens(self, optimistic_beyond: int | None = None) -> list[float]:
        """Return the expected tokens per row and step with 0, 1, 2, ... drafts.

        Args:
            optimistic_beyond: Number of drafts; acceptance at deeper ones is estimated optimistically, within what was
                measured. None: nowhere.
        """
        expected, before, all_hold = [1.0], ASSUMED_ACCEPTANCE / DEPTH_DECAY, 1.0
        for depth, mean in enumerate(self._mean):
            is_hoped = optimistic_beyond is not None and depth >= optimistic_beyond
            assumed = 1.0 if is_hoped else DEPTH_DECAY * before
            weight = self._worth(depth) if is_hoped else self._weight[depth]
            before = (weight * (mean or 0.0) + ASSUMED_ROWS * assumed) / (weight + ASSUMED_ROWS)
            all_hold *= before
            expected.append(expected[-1] + all_hold)
        return expected

    def _worth(self, depth: int) -> float:
        return self._weight[depth] / (1 + self._unseen[depth] / UNSEEN_STEPS)

    def _add(self, depth: int, new: float, num_rows: int) -> None:
        before, weight = self._mean[depth], min(self._worth(depth), max(ACCEPTANCE_ROWS, 8 * num_rows))
        mean = new if before is None else before + (new - before) * num_rows / (weight + num_rows)
        recent = self._recent[depth] + (new - self._recent[depth]) * num_rows / (min(weight, RECENT_ROWS) + num_rows)
        if abs(recent - mean) > MAX_CHANGE:
            mean, weight = recent, RECENT_ROWS
        self._mean[depth], self._recent[depth] = mean, recent
        self._weight[depth], self._unseen[depth] = weight + num_rows, 0


class AcceptanceWatchdog:
    """Detects a proposer whose drafts are almost never accepted, such as a head with wrongly loaded norms."""

    def __init__(self, proposer: str) -> None:
        self.num_trips = 0
        self._proposer = proposer
        self._window: deque[tuple[int, int]] = deque(maxlen=WATCHDOG_ROUNDS)
        self._pause = WATCHDOG_PAUSE
        self.num_rounds_left = 0
        """Rounds until drafting resumes; 0 when it is not paused."""

    def pause(self) -> None:
        """Pause drafting; each pause is twice as long as the one before."""
        self._window.clear()
        self.num_rounds_left, self._pause = self._pause, 2 * self._pause

    def record(self, num_drafted: int, num_accepted: int, pays: bool) -> bool:
        """Record one round of all rows, with drafts or without.

        Args:
            num_drafted: Draft tokens of all rows.
            num_accepted: How many of them were accepted.
            pays: Whether drafting is measurably faster although few drafts are accepted; then it is not paused.

        Returns:
            Whether the watchdog trips.
        """
        if self.num_rounds_left:
            self.num_rounds_left -= 1
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


class ProposerRecord:
    """One proposer as the speculation controller knows it.

    Args:
        name: The proposer.
        mode: Its configuration.
        choices: The ways to draft with it that the runner offers, by increasing number of tokens.
        no_drafts: Why `choices` is empty, if it is.
    """

    def __init__(self, name: str, mode: DraftMode, choices: Collection[Drafts], no_drafts: str = ""):
        self.name = name
        self.lengths = [drafts.num_tokens for drafts in choices]
        self.limits = mode if isinstance(mode, DraftLimits) else None
        self.reason = (
            (no_drafts or "the runner offers none")
            if not choices
            else "off in the configuration"
            if mode == "off"
            else ""
        )
        self.mode = "off" if self.reason else "auto" if self.limits is None else "fixed"
        self.acceptance = AcceptanceRates(max(self.lengths, default=0))
        self.watchdog = AcceptanceWatchdog(name)
        self._is_selective = any(drafts.is_selective for drafts in choices)
        self.row_share = 0.0 if self._is_selective else 1.0
        """Share of the rows for which it has drafts, as of the last outputs."""
        self._num_rounds = self._num_drafted = self._num_accepted = 0

    @property
    def is_paused(self) -> bool:
        return self.mode == "auto" and self.watchdog.num_rounds_left > 0

    def fixed_length(self, num_rows: int) -> int:
        """Return the configured number of drafts that the runner offers; 0 with too many rows or in another mode."""
        if self.mode != "fixed" or self.limits is None or num_rows > self.limits.max_rows:
            return 0
        return max((k for k in self.lengths if k <= self.limits.max_draft_tokens), default=0)

    def expected_tokens(self, optimistic_beyond: int | None = None) -> list[float]:
        """Return the expected tokens per row and step with each of `lengths`; see AcceptanceRates.expected_tokens."""
        by_depth = self.acceptance.expected_tokens(optimistic_beyond)
        return [1.0 + self.row_share * (by_depth[k] - 1.0) for k in self.lengths]

    def record(self, outputs: Collection[RowOutput], pays: bool) -> bool:
        """Learn from a step of all rows, drafted by this proposer or not; return whether the watchdog trips.

        A row for which a selective proposer has nothing was given no drafts. With another one a row without drafts
        counts as one whose drafts were rejected.

        Args:
            outputs: The rows' outputs.
            pays: See AcceptanceWatchdog.record.
        """
        if self._is_selective:
            self.row_share = sum(self.name in output.can_draft for output in outputs) / len(outputs)
        own = [output for output in outputs if output.proposer == self.name and output.num_drafted]
        drafted = sum(output.num_drafted for output in own)
        accepted = [output.num_accepted for output in (own if self._is_selective or not own else outputs)]
        if drafted:
            self._num_rounds += 1
            self._num_drafted += drafted
            self._num_accepted += sum(accepted)
        self.acceptance.record(max((output.num_drafted for output in own), default=0), accepted)
        return self.watchdog.record(drafted, sum(accepted), pays) and self.mode == "auto"

    def status(self) -> dict[str, Any]:
        """Return the figures for the status page; acceptance is None before anything was drafted."""
        drafted, pause = self._num_drafted, self.watchdog.num_rounds_left
        status: dict[str, Any] = {"mode": self.mode}
        if self.mode == "off":
            status["reason"] = self.reason
        elif self.is_paused:
            status["reason"] = f"drafting is paused for {pause} rounds: few drafts were accepted, or a step failed"
        return status | {
            "acceptance": round(self._num_accepted / drafted, 4) if drafted else None,
            "acceptance_by_depth": [None if mean is None else round(mean, 4) for mean in self.acceptance.by_depth],
            "num_rounds": self._num_rounds,
            "num_drafted": drafted,
            "num_accepted": self._num_accepted,
            "num_watchdog_trips": self.watchdog.num_trips,
        }
