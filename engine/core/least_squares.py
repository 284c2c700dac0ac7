"""Weighted least squares on the relative error, with non-negative coefficients."""

import numpy as np

MAX_RELATIVE_ERROR = 0.5
"""A measurement that deviates from the fit by a larger share counts less, in proportion."""

NUM_REWEIGHTINGS = 3

RIDGE = 1e-3
"""Regularization relative to the measurements: decides between coefficients that they cannot tell apart."""


def fit_non_negative(rows: np.ndarray) -> np.ndarray:
    """Fit non-negative coefficients such that rows @ coefficients is near 1.

    Args:
        rows: float64 [measurements, coefficients], features divided by the measured value.

    Returns:
        float64 [coefficients].
    """
    scale = np.maximum(rows.mean(axis=0), 1e-12)
    rows, weights = rows / scale, np.ones(len(rows))
    solution = np.zeros(rows.shape[1])
    for _ in range(NUM_REWEIGHTINGS):
        solution = _non_negative(rows * weights[:, None], weights)
        predicted = np.maximum(rows @ solution, 1e-9)
        error = np.maximum(np.abs(predicted - 1.0), np.abs(1.0 / predicted - 1.0))
        weights = np.minimum(1.0, MAX_RELATIVE_ERROR / np.maximum(error, 1e-9)) ** 2
    return solution / scale


def _non_negative(rows: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Solve ridge least squares with non-negative coefficients, removing the most negative one at a time."""
    size = rows.shape[1]
    gram, moments, active = rows.T @ rows + RIDGE * len(rows) * np.eye(size), rows.T @ targets, list(range(size))
    while True:
        found = np.linalg.solve(gram[np.ix_(active, active)], moments[active])
        if (found >= 0).all() or len(active) == 1:
            solution = np.zeros(size)
            solution[active] = np.maximum(found, 0.0)
            return solution
        del active[int(found.argmin())]
