"""Trials of other ways to draft than the current one, within a credit of tokens. Pure."""

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
