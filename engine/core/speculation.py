"""How many tokens to draft per row and step: measured acceptance against measured step times. Pure.

A step with k drafts gives E(k) = 1 + sum over j <= k of (a_1 * ... * a_j) tokens per row, where a_j is how often the
draft at depth j holds when those before it did (Leviathan et al. 2023, arXiv 2211.17192), and takes t(rows, k)
seconds. `auto` wants the k with the largest E(k) / t(rows, k). In every range of batch sizes it begins with 0, and
takes another k only after a trial: a few steps with it, compared with those of the present k just before. What trials
may lose against the present k is limited, so that finding out is cheap on the first answer already; see `Arms`.
"""

import logging
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any, Literal

from engine.config import MTPConfig
from engine.core.batch import RowOutput
from engine.core.draft_figures import Acceptance, StepTimes

log = logging.getLogger("orchard.engine")

MAX_AUTO_DRAFTS = 3

MIN_TIMES = 4
SETTLE_STEPS = 1
"""Steps after a change of rows or k whose times are not counted: the runner's pipeline mixes them."""

TRIAL_STEPS, TRIAL_ROWS, MAX_TRIAL_STEPS = 8, 12, 32
"""A trial ends with so many measured steps and row-rounds, or when it has lost its credit, in tokens per row."""
START_CREDIT, CREDIT_RATE, MIN_CREDIT, MAX_CREDIT = 0.8, 0.01, 0.8, 8.0
"""Tokens per row: little of an answer of 60, and 1 % of all that is given out. Less than MIN_CREDIT begins no trial."""

MAX_STEP_LOSS = 3.0
"""Tokens per row that a step alone can be believed to have lost."""

MIN_GAIN, MIN_LOSS = 1.03, 0.97
"""A new k must be so much faster, except that plain decoding need only not be slower; a k that is so much slower than
plain decoding goes at once."""
RETRY_STEPS = 64
"""Before a k is tried that looks better now, but did not in the last trial."""
RETEST_STEPS = (512, 4096)
"""Before plain decoding and the neighbours of the present k are tried in turn although they look worse: at first, and
after doubling each time."""
FRESH_STEPS = 256
"""So long a step time may decide without being measured again: contexts grow, other processes come and go."""

WATCHDOG_ROUNDS, WATCHDOG_ACCEPTANCE, WATCHDOG_PAUSE = 64, 0.2, 1024
"""With fewer accepted drafts over so many rounds there is none for so many rounds, twice as many each time."""


@dataclass(slots=True)
class Round:
    """One decode step. seconds: None where they say nothing. num_rows gave tokens, num_tokens each."""

    num_draft_tokens: int
    seconds: float | None
    num_rows: int
    num_tokens: float


@dataclass(slots=True)
class Trial:
    """Some steps with another k. baseline: tokens per second and row with the present one. credit: see START_CREDIT.

    expected_tokens: of a step, per row, as far as acceptance is known by now.
    """

    num_draft_tokens: int
    baseline: float
    credit: float
    expected_tokens: float = 1.0
    times: list[float] = field(default_factory=list)
    num_steps: int = 0
    num_rows: int = 0

    def record(self, step: Round, settled: bool, expected_tokens: float) -> None:
        self.num_steps += 1
        self.num_rows += step.num_rows
        self.expected_tokens = expected_tokens
        if settled and step.seconds is not None:
            self.times.append(step.seconds)

    @property
    def loss(self) -> float:
        """Of a step, in tokens per row that would have come with the present k. Neither a step that waited for
        something else nor luck with the drafts moves it much."""
        return median_low(self.times) * self.baseline - self.expected_tokens if self.times else 0.0

    @property
    def num_lost(self) -> float:
        return max(self.loss, 0.0) * len(self.times)

    @property
    def is_measured(self) -> bool:
        return len(self.times) >= TRIAL_STEPS and (self.num_rows >= TRIAL_ROWS or self.num_draft_tokens == 0)

    @property
    def is_broke(self) -> bool:
        """With one more step, and the one in flight. A single step that seems to have lost a lot has rather waited."""
        is_credible = len(self.times) > 1 or self.loss < MAX_STEP_LOSS
        return is_credible and self.num_lost + 2 * self.loss > self.credit

    @property
    def is_over(self) -> bool:
        return self.is_broke or self.is_measured or self.num_steps >= MAX_TRIAL_STEPS


class Arms:
    """The k in use at one size of the batch, and when another one is tried."""

    def __init__(self, size: int, max_draft_tokens: int, times: StepTimes, acceptance: Acceptance):
        self.num_draft_tokens = 0
        self.num_switches = 0
        self._size = size
        self._times = times
        self._acceptance = acceptance
        self._seen_at: list[int | None] = [None] * (max_draft_tokens + 1)  # when k was last in use or on trial
        self._trial: Trial | None = None
        self._num_steps = 0
        self._last_trial = 0
        self._retest_steps = RETEST_STEPS[0]
        self._credit = START_CREDIT

    @property
    def next(self) -> int:
        return self.num_draft_tokens if self._trial is None else self._trial.num_draft_tokens

    def reset(self) -> None:
        """Back to plain decoding."""
        self._trial = None
        self._use(0)

    def record(self, step: Round, settled: bool) -> None:
        """settled: the step's time is one with these rows and drafts."""
        k = step.num_draft_tokens
        if k != self.next:
            return
        self._num_steps += 1
        self._seen_at[k] = self._num_steps
        if self._trial is not None:
            self._trial.record(step, settled, self._acceptance.expected_tokens(k))
            if self._trial.is_over:
                self._end(self._trial)
            return
        self._credit = min(self._credit + CREDIT_RATE * step.num_tokens, MAX_CREDIT)
        if settled and step.seconds is not None:
            self._times.add(self._size, k, step.seconds)
            if self._times.count(self._size, k) >= TRIAL_STEPS:
                self._consider()

    def _consider(self) -> None:
        since = self._num_steps - self._last_trial
        if self.num_draft_tokens and self._rate(self.num_draft_tokens) < MIN_LOSS * self._rate(0):
            if self._num_steps - (self._seen_at[0] or 0) <= FRESH_STEPS:
                self._use(0)
            elif since >= RETRY_STEPS:
                self._try(0, MAX_CREDIT)
            return
        k = self._candidate(since)
        if k == 0:
            self._try(0, MAX_CREDIT)  # whatever it costs: drafts that do not pay cost more
        elif k is not None and self._credit >= MIN_CREDIT:
            self._try(k, self._credit)

    def _candidate(self, since: int) -> int | None:
        """What is worth a trial: the untried k that is hoped to be best; in turn plain decoding and the neighbours;
        one that looks better."""
        k, wanted = self.num_draft_tokens, MIN_GAIN * self._rate(self.num_draft_tokens)
        others = [other for other in range(len(self._seen_at)) if other != k]
        better = [other for other in others if self._rate(other) > wanted]
        untried = [other for other in better if self._seen_at[other] is None]
        if untried:
            return max(untried, key=self._rate)
        if since >= self._retest_steps:
            neighbours = [other for other in others if other in (0, k - 1, k + 1)]
            return min(neighbours, key=lambda other: self._seen_at[other] or self._num_steps)  # the longest unseen
        return max(better, key=self._rate) if better and since >= RETRY_STEPS else None

    def _try(self, k: int, credit: float) -> None:
        self._acceptance.renew_beyond(self.num_draft_tokens)
        self._trial = Trial(k, self._rate(self.num_draft_tokens), credit)

    def _end(self, trial: Trial) -> None:
        self._trial, self._last_trial = None, self._num_steps
        self._credit -= trial.num_lost
        k = trial.num_draft_tokens
        if len(trial.times) >= min(MIN_TIMES, self._times.count(self._size, k) + 1):
            self._times.replace(self._size, k, trial.times)
        self._acceptance.forget_beyond(max(k, self.num_draft_tokens))
        gain = MIN_GAIN if k else 1.0
        if len(trial.times) >= MIN_TIMES and self._rate(k) > gain * self._rate(self.num_draft_tokens):
            self._use(k)
        else:
            self._retest_steps = min(2 * self._retest_steps, RETEST_STEPS[1])

    def _use(self, k: int) -> None:
        self.num_switches += k != self.num_draft_tokens
        self.num_draft_tokens = k
        self._last_trial = self._num_steps
        self._retest_steps = RETRY_STEPS if k else RETEST_STEPS[0]  # drafts have to prove themselves again soon

    def _rate(self, k: int) -> float:
        """Tokens per second and row."""
        return self._acceptance.expected_tokens(k) / self._times.hoped_for(self._size, k)


class Watchdog:
    """Notices a head that guesses nothing, such as one whose norms were loaded by the wrong convention."""

    def __init__(self) -> None:
        self.num_trips = 0
        self._window: deque[tuple[int, int]] = deque(maxlen=WATCHDOG_ROUNDS)
        self._pause = WATCHDOG_PAUSE
        self._num_rounds_left = 0

    @property
    def num_rounds_left(self) -> int:
        """Until drafts are due again; 0 while nothing is wrong."""
        return self._num_rounds_left

    def pause(self) -> None:
        self._window.clear()
        self._num_rounds_left, self._pause = self._pause, 2 * self._pause

    def record(self, num_drafted: int, num_accepted: int, pays: bool) -> bool:
        """One round of all rows, with drafts or without. True when it trips: not when drafts are seen to pay, as a few
        that hold may do where they cost little."""
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
            "MTP: %d of %d draft tokens were accepted in %d rounds, fewer than %.0f %%; the next look is in %d rounds",
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
    """Asked before every decode step, told after it.

    no_drafts: why max_draft_tokens is 0, if it is. A fixed number of drafts (MTPConfig) is the operator's decision:
    there the watchdog only warns.
    """

    def __init__(self, config: Literal["auto", "off"] | MTPConfig, max_draft_tokens: int, no_drafts: str = ""):
        self._config = config
        self._reason = no_drafts if max_draft_tokens == 0 else "off in the configuration" if config == "off" else ""
        self._mode = "off" if self._reason else "auto" if config == "auto" else "fixed"
        self._max_draft_tokens = max_draft_tokens
        self._acceptance = Acceptance(max_draft_tokens)
        self._times = StepTimes()
        self._watchdog = Watchdog()
        self._arms: dict[int, Arms] = {}
        self._now = 0
        self._last = (0, 0)  # rows and drafts
        self._num_alike = 0  # steps with the same before
        self._num_rounds = self._num_drafted = self._num_accepted = 0

    @property
    def num_watchdog_trips(self) -> int:
        return self._watchdog.num_trips

    @property
    def num_switches(self) -> int:
        return sum(arms.num_switches for arms in self._arms.values())

    def num_draft_tokens(self, num_rows: int) -> int:
        """For the next decode step with so many rows."""
        if not num_rows:
            return 0
        self._now = self._choose(num_rows)
        return self._now

    def record(
        self, num_draft_tokens: int, num_rows: int, seconds: float | None, outputs: Collection[RowOutput]
    ) -> None:
        """seconds: from the end of the decode step before to the end of this one, so that what the device computes in
        between counts; None when more than that happened. outputs may be those of the step before."""
        self._num_alike = self._num_alike + 1 if self._last == (num_rows, num_draft_tokens) else 0
        self._last = (num_rows, num_draft_tokens)
        if not outputs:
            return
        size, settled = StepTimes.size_of(num_rows), self._num_alike >= SETTLE_STEPS
        if self._mode == "auto":
            arms = self._arms_of(size)
            if self._record_drafts(outputs, pays=arms.num_draft_tokens > 0):
                self._give_up()
            if not self._watchdog.num_rounds_left:
                num_tokens = 1 + sum(output.num_accepted for output in outputs) / len(outputs)
                arms.record(Round(num_draft_tokens, seconds, len(outputs), num_tokens), settled)
            return
        self._record_drafts(outputs, pays=False)
        if settled and seconds is not None:
            self._times.add(size, num_draft_tokens, seconds)

    def failed(self) -> None:
        """A step with drafts has failed: plain decoding for a while, whatever has been measured."""
        if self._mode == "auto":
            self._watchdog.pause()
            self._give_up()

    def status(self) -> dict[str, Any]:
        """For the status page; acceptance is None before anything was drafted."""
        drafted, pause = self._num_drafted, self._watchdog.num_rounds_left
        status: dict[str, Any] = {"mode": self._mode, "num_draft_tokens": self._now}
        if self._mode == "off":
            status["reason"] = self._reason
        elif self._mode == "auto" and pause:
            status["reason"] = f"hardly any draft was accepted; the next is tried in {pause} rounds"
        return status | {
            "acceptance": round(self._num_accepted / drafted, 4) if drafted else None,
            "acceptance_by_depth": [None if mean is None else round(mean, 4) for mean in self._acceptance.by_depth],
            "num_rounds": self._num_rounds,
            "num_drafted": drafted,
            "num_accepted": self._num_accepted,
            "num_watchdog_trips": self._watchdog.num_trips,
            "step_ms": self._times.status_ms(),
        }

    def _choose(self, num_rows: int) -> int:
        if self._mode == "off" or (self._mode == "auto" and self._watchdog.num_rounds_left):
            return 0
        if isinstance(self._config, MTPConfig):
            fits = num_rows <= self._config.max_rows
            return min(self._config.max_draft_tokens, self._max_draft_tokens) if fits else 0
        return self._arms_of(StepTimes.size_of(num_rows)).next

    def _arms_of(self, size: int) -> Arms:
        if size not in self._arms:
            max_draft_tokens = min(self._max_draft_tokens, MAX_AUTO_DRAFTS)
            self._arms[size] = Arms(size, max_draft_tokens, self._times, self._acceptance)
        return self._arms[size]

    def _record_drafts(self, outputs: Collection[RowOutput], pays: bool) -> bool:
        """True when the watchdog trips."""
        drafted = sum(output.num_drafted for output in outputs)
        accepted = [output.num_accepted for output in outputs]
        if drafted:
            self._num_rounds += 1
            self._num_drafted += drafted
            self._num_accepted += sum(accepted)
            self._acceptance.record(max(output.num_drafted for output in outputs), accepted)
        return self._watchdog.record(drafted, sum(accepted), pays)

    def _give_up(self) -> None:
        """Plain decoding everywhere; when drafts are due again, nothing is held against them."""
        for arms in self._arms.values():
            arms.reset()
        self._acceptance.forget_beyond(0)
