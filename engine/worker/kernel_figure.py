"""KernelFigure: the result of a check of a kernel; the error that most of them state, and its limits."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

LIMIT = 1e-3
"""Largest error of kernels in float32, relative to the largest value; some devices shorten the inputs of products."""

BFLOAT16_LIMIT = 1e-2
"""The same of kernels in bfloat16, which round to 1 in 256."""


@dataclass(frozen=True)
class KernelFigure:
    """The result of a check of a kernel.

    Attributes:
        value: Its error, or the share of an array that it copies.
        limit: The most that is right.
        what: The value in words.
        is_wrong: Whether a value beyond the limit means wrong results; else it is slow.
    """

    value: float
    limit: float
    what: str
    is_wrong: bool = True


def float64_of(x: mx.array) -> np.ndarray:
    """Return an array in float64."""
    return np.array(x.astype(mx.float32), np.float64)


def error_of(got: mx.array, expected: Any) -> float:
    """Return the largest error, relative to the largest expected value."""
    exact = np.array(expected.astype(mx.float32) if isinstance(expected, mx.array) else expected, np.float64)
    difference = np.abs(np.array(got.astype(mx.float32)).astype(np.float64) - exact)
    return float(difference.max() / np.abs(exact).max()) if np.isfinite(difference).all() else float("inf")
