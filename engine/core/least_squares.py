"""Weighted least squares on the relative error, with non-negative coefficients."""

import numpy as np

MAX_RELATIVE_ERROR = 0.5
"""A measurement that deviates from the fit by a larger share counts less, in proportion."""

NUM_REWEIGHTINGS = 3

MAX_EXCHANGES = 3
"""Changes of the set of positive coefficients, per coefficient; the method ends after fewer unless rounding cycles."""

RIDGE = 1e-3
"""Weight of the prior relative to the measurements: decides between coefficients that they cannot tell apart."""


def fit_non_negative(rows: np.ndarray, known: np.ndarray | float = 0.0, prior: np.ndarray | float = 0.0) -> np.ndarray:
    """Fit non-negative coefficients such that known + rows @ coefficients is near 1.

    Args:
        rows: float64 [measurements, coefficients], features divided by the measured value.
        known: float64 [measurements], the share of each measured value that other coefficients explain.
        prior: float64 [coefficients], from which the fit departs only as far as the measurements demand.

    Returns:
        float64 [coefficients].
    """
    scale = np.maximum(rows.mean(axis=0), 1e-12)
    rows, weights, prior = rows / scale, np.ones(len(rows)), np.broadcast_to(prior * scale, rows.shape[1])
    solution, targets = np.zeros(rows.shape[1]), np.broadcast_to(1.0 - known, len(rows))
    for _ in range(NUM_REWEIGHTINGS):
        solution = _non_negative(rows * weights[:, None], weights * targets, prior)
        predicted = np.maximum(known + rows @ solution, 1e-9)
        error = np.maximum(np.abs(predicted - 1.0), np.abs(1.0 / predicted - 1.0))
        weights = np.minimum(1.0, MAX_RELATIVE_ERROR / np.maximum(error, 1e-9)) ** 2
    return solution / scale


def _non_negative(rows: np.ndarray, targets: np.ndarray, prior: np.ndarray | float = 0.0) -> np.ndarray:
    """Solve ridge least squares with non-negative coefficients.

    The active-set method of Lawson and Hanson (1974, "Solving Least Squares Problems", chapter 23): a coefficient at
    zero joins while a larger one would reduce the error, and leaves if the others push it below zero.
    """
    size = rows.shape[1]
    ridge = RIDGE * len(rows)
    gram, moments = rows.T @ rows + ridge * np.eye(size), rows.T @ targets + ridge * prior
    solution, free = np.zeros(size), np.zeros(size, bool)
    for _ in range(MAX_EXCHANGES * size):
        gains = np.where(free, 0.0, moments - gram @ solution)
        if gains.max() <= 1e-9 * len(rows):
            break
        free[gains.argmax()] = True
        while True:
            found = np.zeros(size)
            found[free] = np.linalg.solve(gram[np.ix_(free, free)], moments[free])
            below = free & (found < 0)
            if not below.any():
                break
            share = (solution[below] / (solution[below] - found[below])).min()
            solution = solution + share * (found - solution)
            free &= solution > 1e-12
            solution[~free] = 0.0
        solution = found
    return solution
