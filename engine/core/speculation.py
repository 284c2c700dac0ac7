"""How a decode step drafts: by which proposer, and how many tokens per row, from measured acceptance and times. Pure.

A step with k drafts gives E(k) = 1 + sum over j <= k of (a_1 * ... * a_j) tokens per row, where a_j is the acceptance
of the draft at depth j when those before it were accepted (Leviathan et al. 2023, arXiv 2211.17192), and takes
t(rows, k) seconds. `auto` uses the proposer and the k with the largest E(k) / t(rows, k) from the first step on.
A selective proposer has drafts for some rows only; the others get one token. Acceptance begins with a prior
(proposer_record.py) and step times with those of warm-up (step_costs.py); both are learned over all batch sizes
together. A choice that may be better within the uncertainty is tried for a few steps from time to time; `Trials` limits
the tokens that this may cost.
"""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from engine.config import DraftMode
from engine.core.cost_model import CostModel
from engine.core.proposer_record import AcceptanceRates, ProposerRecord
from engine.core.runner import PLAIN, Drafts, RowOutput

MIN_GAIN = 1.03
"""Another way to draft must be this factor faster; plain decoding only needs to be faster at all."""
OPTIMISM_STD = 1.5
"""A trial assumes that a choice is faster than predicted by this many standard deviations."""


TRIAL_STEPS, TRIAL_PAUSE = 5, 32
"""Steps of a trial, the first of which is not timed, and steps between two trials."""
START_CREDIT, CREDIT_RATE, MAX_CREDIT = 3.0, 0.01, 8.0
"""Tokens per row that trials may cost: initially, as a share of generated tokens, and at most."""


class Trials:
    """Decides when another choice of drafts than the current one is used for a few steps, in order to learn about it.

    The tokens that a trial costs are taken from a credit, which grows with the generated tokens.
    """

    def __init__(self) -> None:
        self.choice: int | None = None
        """Index of the choice being tried, None between trials."""
        self._credit = START_CREDIT
        self._num_steps = 0  # in this trial, or since the last one

    @property
    def is_due(self) -> bool:
        return self.choice is None and self._num_steps % TRIAL_PAUSE == 0

    def begin(self, choice: int, loss: float) -> None:
        """Start a trial if the credit covers it. loss: predicted tokens lost per row and step."""
        if min(TRIAL_STEPS * loss, MAX_CREDIT) <= self._credit:
            self.choice, self._num_steps = choice, 0

    def record(self, num_tokens: float, loss: float) -> None:
        """Count a step.

        Args:
            num_tokens: Tokens that it gave each row.
            loss: Tokens per row that it lost, if it was part of a trial.
        """
        self._num_steps += 1
        self._credit = min(self._credit + CREDIT_RATE * num_tokens, MAX_CREDIT)
        if self.choice is not None:
            self._credit -= max(loss, 0.0)
            if self._num_steps >= TRIAL_STEPS or self._credit < 0:
                self.end()

    def end(self) -> None:
        """End the trial, if there is one, and begin the pause before the next one."""
        self.choice, self._num_steps = None, 1

    def cancel(self) -> None:
        """End the trial, if there is one, without a new pause."""
        self.choice = None


class SpeculationController:
    """Chooses the drafts before every decode step and learns after it.

    With fixed limits (DraftLimits) the watchdog only warns: the number is the operator's decision. Of two proposers
    with fixed limits the later one drafts, where rows have its drafts.

    Args:
        modes: The configuration of each proposer that has an option, in the order of `EngineConfig.draft_modes`.
        costs: Predicts the seconds of decode steps; its choices are those of the runner.
        no_drafts: Why the runner offers no drafts of a proposer, see ModelRunner.
    """

    def __init__(self, modes: Mapping[str, DraftMode], costs: CostModel, no_drafts: Mapping[str, str]):
        self._steps = costs.steps
        self._choices = costs.steps.choices
        drafts = self._choices[1:]
        options = {name: name for name in modes} | {one.proposer: one.option or one.proposer for one in drafts}
        self._records = [
            ProposerRecord(
                name,
                modes.get(option, "auto"),
                [one for one in drafts if one.proposer == name],
                no_drafts.get(name, ""),
            )
            for name, option in options.items()
        ]
        self._trials = Trials()
        self._best = 0  # index of the current choice outside of trials
        self._now = PLAIN
        self._loss = 0.0  # predicted tokens per row that the next step loses against the current choice
        self._most_rows = 0
        self.num_switches = 0

    def choose(self, num_rows: int) -> Drafts:
        """Return the drafts of the next decode step."""
        if not num_rows:
            return PLAIN
        self._most_rows = max(num_rows, self._most_rows)
        fixed = self._fixed(num_rows)
        if fixed is not None:
            self._loss = 0.0
            self._trials.cancel()
        self._now = fixed or self._choices[self._choose_best(num_rows)]
        return self._now

    def record(self, outputs: Collection[RowOutput]) -> None:
        """Learn acceptance from a step's outputs, which may be those of the step before.

        The cost model learns the step's time.
        """
        if not outputs:
            return
        for record in self._records:
            pays = record.mode == "auto" and self._best > 0 and self._choices[self._best].proposer == record.name
            if record.record(outputs, pays):
                self._give_up(record)
        if any(record.mode == "auto" and not record.is_paused for record in self._records):
            num_tokens = 1 + sum(output.num_accepted for output in outputs) / len(outputs)
            self._trials.record(num_tokens, self._loss)

    def failed(self) -> None:
        """Pause the proposer of a step that has failed, unless it has fixed limits."""
        for record in self._records:
            if record.mode == "auto" and self._now.num_tokens and record.name == self._now.proposer:
                record.watchdog.pause()
                self._give_up(record)

    def status(self) -> dict[str, Any]:
        """Return the figures for the status page, by proposer and of the current choice."""
        return {
            "proposer": self._now.proposer if self._now.num_tokens else None,
            "num_draft_tokens": self._now.num_tokens,
            **{record.name: record.status() for record in self._records},
            "step_ms": self._steps.status_ms(self._most_rows),
        }

    def _fixed(self, num_rows: int) -> Drafts | None:
        """Return the drafts that the configuration fixes; None where `auto` decides."""
        for record in reversed(self._records):
            if record.row_share and (k := record.fixed_length(num_rows)):
                return Drafts(k, record.name)
        return None

    def _choose_best(self, num_rows: int) -> int:
        allowed = self._allowed()
        if not any(allowed[1:]):
            self._best, self._loss = 0, 0.0
            return 0
        expected, seconds = self._expected(None), self._steps.seconds(num_rows)
        rates = np.where(allowed, expected / seconds, 0.0)
        best = int(rates.argmax())
        if rates[best] > (MIN_GAIN if best else 1.0) * rates[self._best]:
            self._use(best, left_by_choice=bool(allowed[self._best]))
        losses = seconds * rates[self._best] - expected
        if self._trials.is_due:
            factor = np.exp(OPTIMISM_STD * self._steps.ratio_std(num_rows, self._best))
            optimistic = self._expected(self._choices[self._best]) / seconds * factor * allowed
            k = int(optimistic.argmax())
            if optimistic[k] > MIN_GAIN * rates[self._best]:
                self._trials.begin(k, float(losses[k]))
        tried = self._trials.choice
        chosen = self._best if tried is None or not allowed[tried] else tried
        self._loss = float(losses[chosen])
        return chosen

    def _allowed(self) -> np.ndarray:
        """Return which choices `auto` may use, bool [choices]."""
        may = {
            record.name: record.mode == "auto" and not record.is_paused and record.row_share > 0
            for record in self._records
        }
        return np.array([not one.num_tokens or may[one.proposer] for one in self._choices])

    def _expected(self, current: Drafts | None) -> np.ndarray:
        """Return the expected tokens per row and step of each choice, float64 [choices].

        Args:
            current: The current choice, beyond which acceptance is estimated optimistically; None for no optimism.
        """
        expected = {(PLAIN.proposer, 0): 1.0}
        for record in self._records:
            beyond = None if current is None else current.num_tokens if current.proposer == record.name else 0
            tokens = record.expected_tokens(beyond)
            expected |= {(record.name, k): each for k, each in zip(record.lengths, tokens, strict=True)}
        return np.array([expected[one.proposer, one.num_tokens] for one in self._choices])

    def _use(self, choice: int, left_by_choice: bool) -> None:
        """Make a choice the current one. left_by_choice: the one before could be used as well, but is slower."""
        self._best = choice
        if left_by_choice:
            self.num_switches += 1
            self._trials.end()
        else:
            self._trials.cancel()

    def _give_up(self, record: ProposerRecord) -> None:
        """Return to plain decoding if this proposer drafts now, and reset its acceptance to the prior."""
        if self._choices[self._best].proposer == record.name:
            self._best = 0
        self._trials.end()
        record.acceptance = AcceptanceRates(len(record.acceptance.by_depth))
