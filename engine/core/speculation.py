"""How many tokens to draft per row and step, from measured acceptance and step times. Pure.

A step with k drafts gives E(k) = 1 + sum over j <= k of (a_1 * ... * a_j) tokens per row, where a_j is the acceptance
of the draft at depth j when those before it were accepted (Leviathan et al. 2023, arXiv 2211.17192), and takes
t(rows, k) seconds. `auto` drafts the k with the largest E(k) / t(rows, k) from the first step on. Acceptance begins
with a prior (core/draft_figures.py) and step times with those of warm-up (core/step_costs.py); both are learned over
all batch sizes together. A k that may be better within the uncertainty is tried for a few steps from time to time;
`Trials` limits the tokens that this may cost.
"""

import logging
from collections import deque
from collections.abc import Collection
from typing import Any, Literal

import numpy as np

from engine.config import MTPConfig
from engine.core.batch import RowOutput
from engine.core.cost_model import CostModel
from engine.core.draft_figures import AcceptanceRates

log = logging.getLogger("orchard.engine")

MIN_GAIN = 1.03
"""A new k must be this factor faster; plain decoding only needs to be faster at all."""

TRIAL_STEPS, TRIAL_PAUSE = 5, 32
"""Steps of a trial, the first of which is not timed, and steps between two trials."""
START_CREDIT, CREDIT_RATE, MAX_CREDIT = 3.0, 0.01, 8.0
"""Tokens per row that trials may cost: initially, as a share of generated tokens, and at most."""
HOPE = 1.5
"""A trial assumes that a k is faster than predicted by this many standard deviations."""

WATCHDOG_ROUNDS, WATCHDOG_ACCEPTANCE, WATCHDOG_PAUSE = 64, 0.2, 1024
"""The watchdog trips when less than WATCHDOG_ACCEPTANCE of the drafts of WATCHDOG_ROUNDS were accepted. Drafting pauses
for WATCHDOG_PAUSE rounds then, twice as long each time."""


class Trials:
    """Decides when another k than the current one is drafted for a few steps, in order to learn about it.

    The tokens that a trial costs are taken from a credit, which grows with the generated tokens.
    """

    def __init__(self) -> None:
        self.num_drafts: int | None = None
        """The k being tried, None between trials."""
        self._credit = START_CREDIT
        self._num_steps = 0  # in this trial, or since the last one

    @property
    def is_due(self) -> bool:
        return self.num_drafts is None and self._num_steps % TRIAL_PAUSE == 0

    def begin(self, num_drafts: int, loss: float) -> None:
        """Start a trial if the credit covers it. loss: predicted tokens lost per row and step."""
        if min(TRIAL_STEPS * loss, MAX_CREDIT) <= self._credit:
            self.num_drafts, self._num_steps = num_drafts, 0

    def record(self, num_tokens: float, loss: float) -> None:
        """Count a step.

        Args:
            num_tokens: Tokens that it gave each row.
            loss: Tokens per row that it lost, if it was part of a trial.
        """
        self._num_steps += 1
        self._credit = min(self._credit + CREDIT_RATE * num_tokens, MAX_CREDIT)
        if self.num_drafts is not None:
            self._credit -= max(loss, 0.0)
            if self._num_steps >= TRIAL_STEPS or self._credit < 0:
                self.end()

    def end(self) -> None:
        self.num_drafts, self._num_steps = None, 1


class AcceptanceWatchdog:
    """Detects a head whose drafts are almost never accepted, such as one with wrongly loaded norms."""

    def __init__(self) -> None:
        self.num_trips = 0
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
            "MTP: %d of %d draft tokens were accepted in %d rounds, fewer than %.0f %%; the next check is in %d rounds",
            accepted,
            drafted,
            WATCHDOG_ROUNDS,
            100 * WATCHDOG_ACCEPTANCE,
            self._pause,
        )
        self.num_trips += 1
        self.pause()
        return True


class SpeculationController:
    """Chooses the number of drafts before every decode step and learns after it.

    With a fixed number of drafts (MTPConfig) the watchdog only warns: the number is the operator's decision.

    Args:
        config: The configured mode.
        max_draft_tokens: The runner's limit; 0 without an MTP head.
        costs: Predicts the seconds of decode steps.
        no_drafts: Why max_draft_tokens is 0, if it is.
    """

    def __init__(
        self,
        config: Literal["auto", "off"] | MTPConfig,
        max_draft_tokens: int,
        costs: CostModel,
        no_drafts: str = "",
    ):
        self._config = config
        self._reason = no_drafts if max_draft_tokens == 0 else "off in the configuration" if config == "off" else ""
        self._mode = "off" if self._reason else "auto" if config == "auto" else "fixed"
        self._max_draft_tokens = max_draft_tokens
        self._costs = costs
        self._acceptance = AcceptanceRates(max_draft_tokens)
        self._watchdog = AcceptanceWatchdog()
        self._trials = Trials()
        self._best = 0  # the current k outside of trials
        self._now = 0
        self._loss = 0.0  # predicted tokens per row that the next step loses against the current k
        self._most_rows = 0
        self.num_switches = 0
        self._num_rounds = self._num_drafted = self._num_accepted = 0

    @property
    def num_watchdog_trips(self) -> int:
        return self._watchdog.num_trips

    def num_draft_tokens(self, num_rows: int) -> int:
        """Return the number of draft tokens per row for the next decode step."""
        if not num_rows:
            return 0
        self._most_rows = max(num_rows, self._most_rows)
        self._now = self._choose(num_rows)
        return self._now

    def record(self, outputs: Collection[RowOutput]) -> None:
        """Learn acceptance from a step's outputs, which may be those of the step before.

        The cost model learns the step's time.
        """
        if not outputs:
            return
        if self._record_drafts(outputs) and self._mode == "auto":
            self._give_up()
        if self._mode == "auto" and not self._watchdog.num_rounds_left:
            num_tokens = 1 + sum(output.num_accepted for output in outputs) / len(outputs)
            self._trials.record(num_tokens, self._loss)

    def failed(self) -> None:
        """Pause drafting after a step with drafts has failed."""
        if self._mode == "auto":
            self._watchdog.pause()
            self._give_up()

    def status(self) -> dict[str, Any]:
        """Return the figures for the status page; acceptance is None before anything was drafted."""
        drafted, pause = self._num_drafted, self._watchdog.num_rounds_left
        status: dict[str, Any] = {"mode": self._mode, "num_draft_tokens": self._now}
        if self._mode == "off":
            status["reason"] = self._reason
        elif self._mode == "auto" and pause:
            status["reason"] = f"drafting is paused for {pause} rounds: few drafts were accepted, or a step failed"
        return status | {
            "acceptance": round(self._num_accepted / drafted, 4) if drafted else None,
            "acceptance_by_depth": [None if mean is None else round(mean, 4) for mean in self._acceptance.by_depth],
            "num_rounds": self._num_rounds,
            "num_drafted": drafted,
            "num_accepted": self._num_accepted,
            "num_watchdog_trips": self._watchdog.num_trips,
            "step_ms": self._costs.steps.status_ms(self._most_rows),
        }

    def _choose(self, num_rows: int) -> int:
        if self._mode == "off" or (self._mode == "auto" and self._watchdog.num_rounds_left):
            return 0
        if isinstance(self._config, MTPConfig):
            fits = num_rows <= self._config.max_rows
            return min(self._config.max_draft_tokens, self._max_draft_tokens) if fits else 0
        return self._choose_best(num_rows)

    def _choose_best(self, num_rows: int) -> int:
        steps, expected = self._costs.steps, self._acceptance.expected_tokens()
        seconds = steps.seconds(num_rows)
        rates = expected / seconds
        best = int(rates.argmax())
        if rates[best] > (MIN_GAIN if best else 1.0) * rates[self._best]:
            self._use(best)
        losses = seconds * rates[self._best] - expected
        if self._trials.is_due:
            hoped = self._acceptance.expected_tokens(optimistic_beyond=self._best)
            hoped_rates = hoped / seconds * np.exp(HOPE * steps.doubt(num_rows, self._best))
            k = int(hoped_rates.argmax())
            if hoped_rates[k] > MIN_GAIN * rates[self._best]:
                self._trials.begin(k, float(losses[k]))
        chosen = self._best if self._trials.num_drafts is None else self._trials.num_drafts
        self._loss = float(losses[chosen])
        return chosen

    def _use(self, num_drafts: int) -> None:
        self.num_switches += 1
        self._best = num_drafts
        self._trials.end()

    def _record_drafts(self, outputs: Collection[RowOutput]) -> bool:
        """Record the drafts of a round; return whether the watchdog pauses drafting."""
        drafted = sum(output.num_drafted for output in outputs)
        accepted = [output.num_accepted for output in outputs]
        if drafted:
            self._num_rounds += 1
            self._num_drafted += drafted
            self._num_accepted += sum(accepted)
        self._acceptance.record(max(output.num_drafted for output in outputs), accepted)
        return self._watchdog.record(drafted, sum(accepted), pays=self._mode == "auto" and self._best > 0)

    def _give_up(self) -> None:
        """Return to plain decoding and reset acceptance to its prior."""
        self._best = 0
        self._trials.end()
        self._acceptance.forget()
