"""fit_non_negative and the solver in it."""

import numpy as np
import pytest

from engine.core import least_squares
from engine.core.least_squares import fit_non_negative


def test_known_coefficients_are_found():
    features = np.array([[1, n, n * n] for n in (1, 2, 5, 9, 20)], float)
    seconds = features @ [3.0, 0.0, 0.5]
    assert fit_non_negative(features / seconds[:, None]) == pytest.approx([3.0, 0.0, 0.5], rel=0.02, abs=0.05)


@pytest.mark.parametrize("seed", range(50))
def test_no_change_of_a_coefficient_reduces_the_error(seed: int):
    """The conditions of Karush, Kuhn and Tucker, which a solution of a convex problem meets and nothing else does."""
    rng = np.random.default_rng(seed)
    rows = rng.uniform(size=rng.integers(1, (30, 12))) * rng.lognormal(0.0, 2.0)
    rows[:, 0] = rows[:, -1]  # columns that cannot be told apart
    targets = np.ones(len(rows))
    found = least_squares._non_negative(rows, targets)
    slope = rows.T @ (targets - rows @ found) - least_squares.RIDGE * len(rows) * found
    limit = 1e-6 * max(1.0, float(np.abs(rows.T @ targets).max()))
    assert (found >= 0).all()
    assert slope[found > 0] == pytest.approx(0.0, abs=limit) and (slope[found == 0] <= limit).all()
