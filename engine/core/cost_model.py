"""CostModel: how long chunks of prompts and decode steps take on this machine, learned from each of them.

The scheduler and the prefix cache weigh time by it. Drafts and the sparse-prefill scorer still measure for themselves.
"""

from collections import deque

import numpy as np

from engine.protocol import PrefillCost

WINDOW = 32
"""Measured chunks that the fit of the prefill time uses, the newest."""

MAX_RELATIVE_ERROR = 0.5
"""A chunk that took longer or shorter than the fit by more than this part counts less, in proportion."""

NUM_REWEIGHTINGS = 3

REFIT_ERROR, REFIT_CHUNKS = 0.03, 8
"""The fit is renewed when a chunk differs from it by this part, or after so many chunks."""

STEP_WEIGHT = 0.1
"""Weight of a new measurement in the moving average of a decode step."""

GUESSED_S_PER_TOKEN = 1e-3
"""Seconds per prompt token before anything is measured."""

RIDGE = 1e-3
"""Pull of each coefficient towards zero relative to the measurements: decides where they cannot tell two apart."""


class CostModel:
    """Predicts seconds of prefill and decode work.

    A chunk of n tokens behind p others takes a + b * n + c * n * (p + n / 2) seconds: a forward's fixed part, the
    matrix products, and attention. The coefficients are fitted to the newest chunks by weighted least squares on the
    relative error, so that one chunk that waited for something else does not move them.
    """

    def __init__(self) -> None:
        self._chunks: deque[np.ndarray] = deque(maxlen=WINDOW)  # features divided by seconds
        self._num_recorded = 0
        self._fit = np.array([0.0, GUESSED_S_PER_TOKEN, 0.0])
        self._token_s: dict[int, float] = {}  # number of rows -> seconds per output token of one row

    @property
    def is_measured(self) -> bool:
        """Whether any chunk has been measured; all predictions are guesses before."""
        return bool(self._chunks)

    @property
    def prefill(self) -> PrefillCost | None:
        """What prompts cost, None before any chunk was measured."""
        return PrefillCost(*self._fit.tolist()) if self.is_measured else None

    def record_chunk(self, num_tokens: int, start: int, seconds: float, num_rows: int = 1) -> None:
        """Learn from a chunk, or from `num_rows` of them in one forward.

        The first one is replaced by later ones: it may include the compilation of kernels.
        """
        if num_tokens <= 0 or seconds <= 0:
            return
        if self._num_recorded == 1:
            self._chunks.clear()
        self._num_recorded += 1
        chunk = _features(num_tokens, start, num_rows) / seconds
        self._chunks.append(chunk)
        differs = abs(float(self._fit @ chunk) - 1.0) > REFIT_ERROR
        if differs or self._num_recorded % REFIT_CHUNKS == 0:
            self._fit = _fitted(np.array(self._chunks))

    def record_step(self, num_rows: int, tokens_per_row: float, seconds: float) -> None:
        """Learn from a decode step that gave each of `num_rows` rows so many tokens on average."""
        size, token_s = _size_of(num_rows), seconds / max(tokens_per_row, 1.0)
        before = self._token_s.get(size)
        self._token_s[size] = token_s if before is None else (1 - STEP_WEIGHT) * before + STEP_WEIGHT * token_s

    def chunk_s(self, num_tokens: int, start: int, num_rows: int = 1) -> float:
        """Predict the seconds of one chunk behind `start` tokens, or of `num_rows` such chunks in one forward."""
        return float(self._fit @ _features(num_tokens, start, num_rows)) if num_tokens > 0 else 0.0

    def prompt_s(self, start: int, end: int, chunk_tokens: int = 2048) -> float:
        """Predict the seconds that the tokens `start` to `end` of a prompt take in chunks of `chunk_tokens`."""
        return PrefillCost(*self._fit.tolist()).prompt_s(start, end, chunk_tokens)

    def max_tokens(self, seconds: float, start: int) -> int:
        """Return how many tokens behind `start` others fit into so many seconds; 0 if none does."""
        fixed, linear, pair = self._fit.tolist()
        per_token, left = linear + pair * start, seconds - fixed
        if left <= 0:
            return 0
        if pair <= 0:
            return int(left / max(per_token, 1e-12))
        return int((-per_token + (per_token**2 + 2 * pair * left) ** 0.5) / pair)

    def token_s(self, num_rows: int) -> float | None:
        """Predict the seconds until each of `num_rows` rows has one more token; None before a step was measured."""
        if not self._token_s:
            return None
        size = _size_of(num_rows)
        nearest = min(self._token_s, key=lambda known: abs(known.bit_length() - size.bit_length()))
        return self._token_s[nearest]


def _size_of(num_rows: int) -> int:
    """Return the power of two at or above the number of rows."""
    return 1 << max(num_rows - 1, 0).bit_length()


def _features(num_tokens: int, start: int, num_rows: int = 1) -> np.ndarray:
    return np.array([1.0, num_rows * num_tokens, num_rows * num_tokens * (start + num_tokens / 2)])


def _fitted(rows: np.ndarray) -> np.ndarray:
    """Fit the three coefficients, none of them negative. rows: float64 [chunks, 3], features divided by seconds."""
    scale = rows.mean(axis=0)
    rows, weights = rows / scale, np.ones(len(rows))
    solution = np.zeros(3)
    for _ in range(NUM_REWEIGHTINGS):
        solution = _non_negative(rows * weights[:, None], weights)
        predicted = np.maximum(rows @ solution, 1e-9)
        error = np.maximum(np.abs(predicted - 1.0), np.abs(1.0 / predicted - 1.0))
        weights = np.minimum(1.0, MAX_RELATIVE_ERROR / np.maximum(error, 1e-9)) ** 2
    return solution / scale


def _non_negative(rows: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Solve ridge least squares with coefficients that are not negative, by leaving out those that would be."""
    gram, moments, active = rows.T @ rows + RIDGE * len(rows) * np.eye(3), rows.T @ targets, [0, 1, 2]
    while True:
        found = np.linalg.solve(gram[np.ix_(active, active)], moments[active])
        if (found >= 0).all() or len(active) == 1:
            solution = np.zeros(3)
            solution[active] = np.maximum(found, 0.0)
            return solution
        del active[int(found.argmin())]
