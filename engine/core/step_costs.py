"""StepCosts: how long a decode step takes as a function of rows and drafts, in one model.

A step of r rows with k drafts takes (a + b r + [k > 0] (v + w r) + k (c + d r)) * exp(correction) seconds, where v, w,
c and d are those of the proposer. The coefficients are fitted once to the steps measured at warm-up and extrapolate to
other numbers of rows. The correction is learned from every step: a Gaussian process over rows and drafts, updated by a
Kalman filter (Särkkä, Solin, Hartikainen 2013, "Spatiotemporal learning via infinite-dimensional Bayesian filtering and
smoothing"), so that a step also corrects the predictions for similar ones. A common slowdown, as contexts grow or other
processes start, is learned within a few steps and leaves the ratios unchanged.
"""

from collections.abc import Sequence

import numpy as np

from engine.core.least_squares import fit_non_negative
from engine.core.runner import PLAIN, Drafts, StepTime

SIZES = 2 ** np.arange(8)
"""Numbers of rows at which the correction is stored; between them it is interpolated in log2(rows)."""

NOISE = 0.15
"""Standard deviation of a step's log seconds around the model."""
MAX_RESIDUAL_STD = 2.0
"""A step that deviates from its prediction by more standard deviations is skipped: it may have waited for other work.
If the next one deviates as well, it counts with this deviation."""

LEVEL_VAR, ROWS_VAR, DRAFTS_VAR, DEPTH_VAR, CELL_VAR = 7.2, 0.36, 0.36, 0.01, 0.01
"""Prior variances of log seconds: of all steps together; of a batch size; of drafting at all with a proposer at one
size; of each of its drafts squared; of one size and number of drafts."""
CORRELATION_OCTAVES = 3.0
"""Distance of batch sizes, in log2(rows), over which their correlation falls to 1/e."""
FADING = 1 / 8000
"""Share of the information that each step makes obsolete: the covariance drifts back to the prior."""

GUESSED_S = 0.01
GUESSED_DRAFT = 0.15
"""Seconds of a step, and the share that each draft adds, where warm-up measured nothing."""
SHORTEST_SHARE = 0.5
"""The fit predicts no step shorter than this share of the shortest one measured at warm-up."""
SHORTEST_S = 1e-9  # a coarse clock may measure 0 s


class StepCosts:
    """Predicts the seconds of decode steps.

    Args:
        drafts: The ways to draft.
        step_times: Steps measured at warm-up. Without any, predictions are guesses until a step is recorded.
    """

    def __init__(self, drafts: Sequence[Drafts] = (), step_times: Sequence[StepTime] = ()):
        self.choices: tuple[Drafts, ...] = (PLAIN, *drafts)
        self._index = {one: i for i, one in enumerate(self.choices)}
        self._shape = _shape(self.choices)
        self._unknown = _covariance(self._shape)
        self._covariance = self._unknown.copy()
        self._correction = np.zeros(len(self._unknown))
        self._fit = self._fitted(step_times)
        # other work may disturb the warm-up so much that the fit takes all steps of one choice for outliers
        self._shortest_s = max(SHORTEST_SHARE * min((t.seconds for t in step_times), default=0.0), SHORTEST_S)
        self._steps: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # rows -> interpolation, log seconds of the fit
        self.is_measured = False
        self._was_outlier = False
        for step in step_times:
            self.record(step.num_rows, step.drafts, step.seconds)

    def record(self, num_rows: int, drafts: Drafts, seconds: float) -> None:
        """Learn from a step."""
        weights, base = self._of(num_rows)
        i = self._index[drafts]
        self._covariance += FADING * (self._unknown - self._covariance)
        direction = self._covariance @ weights[i]
        variance = float(direction @ weights[i]) + NOISE**2
        predicted = float(base[i] + weights[i] @ self._correction)
        residual, most = float(np.log(max(seconds, SHORTEST_S))) - predicted, MAX_RESIDUAL_STD * variance**0.5
        was_outlier, self._was_outlier = self._was_outlier, abs(residual) > most
        if self._was_outlier and not was_outlier:
            return
        residual = min(max(residual, -most), most)
        self._correction += direction * (residual / variance)
        self._covariance -= np.outer(direction, direction / variance)
        self.is_measured = True

    def seconds(self, num_rows: int) -> np.ndarray:
        """Predict the seconds of a step with each of `choices`: float64 [choices]."""
        weights, base = self._of(num_rows)
        return np.exp(base + weights @ self._correction)

    def seconds_of(self, num_rows: int, drafts: Drafts) -> float:
        """Predict the seconds of a step with these drafts."""
        return float(self.seconds(num_rows)[self._index[drafts]])

    def ratio_std(self, num_rows: int, choice: int) -> np.ndarray:
        """Return the standard deviation of log(seconds / seconds of `choices[choice]`) of each of `choices`."""
        weights, _ = self._of(num_rows)
        apart = weights - weights[choice]
        return np.sqrt(np.maximum(((apart @ self._covariance) * apart).sum(axis=1), 0.0))

    def status_ms(self, most_rows: int) -> dict[str, dict[str, float]]:
        """Return {rows: {`Drafts.name`: milliseconds}} for 1, 2, 4, ... rows, up to `most_rows`."""
        sizes = [int(size) for size in SIZES if size < 2 * most_rows and self.is_measured]
        each = {size: self.seconds(size).tolist() for size in sizes}
        return {
            str(size): {one.name: round(1000 * s, 3) for one, s in zip(self.choices, each[size], strict=True)}
            for size in sizes
        }

    def _of(self, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the weights of the correction [choices, corrections] and the logarithm of the fit [choices]."""
        if num_rows not in self._steps:
            position = min(float(np.log2(num_rows)), len(SIZES) - 1.0)
            at = np.maximum(1.0 - np.abs(np.arange(len(SIZES)) - position), 0.0)
            weights = np.kron(at, np.eye(len(self.choices)))
            fit = np.array([self._features(num_rows, i) @ self._fit for i in range(len(self.choices))])
            self._steps[num_rows] = weights, np.log(np.maximum(fit, self._shortest_s))
        return self._steps[num_rows]

    def _features(self, num_rows: int, choice: int) -> np.ndarray:
        tokens = self._shape[:, choice]
        verifies = tokens > 0
        return np.concatenate([[1.0, num_rows], verifies, verifies * num_rows, tokens, tokens * num_rows])

    def _fitted(self, step_times: Sequence[StepTime]) -> np.ndarray:
        if not step_times:
            num = len(self._shape)
            return GUESSED_S * np.concatenate(
                [[1.0, 0.0], np.zeros(2 * num), np.full(num, GUESSED_DRAFT), np.zeros(num)]
            )
        rows = [self._features(t.num_rows, self._index[t.drafts]) / max(t.seconds, SHORTEST_S) for t in step_times]
        return fit_non_negative(np.array(rows))


def _shape(choices: Sequence[Drafts]) -> np.ndarray:
    """Return the draft tokens of each choice by proposer: float64 [proposers, choices]; 0 for those of another one."""
    proposers = list(dict.fromkeys(one.proposer for one in choices))
    return np.array([[one.num_tokens * (one.proposer == name) for one in choices] for name in proposers], float)


def _covariance(shape: np.ndarray) -> np.ndarray:
    """Return the prior covariance of the corrections, ordered by batch size and then choice."""
    octaves = np.arange(len(SIZES))
    near = np.exp(-np.abs(octaves[:, None] - octaves) / CORRELATION_OCTAVES)
    verifies = (shape > 0).astype(float)
    at_one_size = ROWS_VAR + CELL_VAR * np.eye(shape.shape[1])
    at_one_size += DRAFTS_VAR * verifies.T @ verifies + DEPTH_VAR * shape.T @ shape
    return LEVEL_VAR + np.kron(near, at_one_size)
