"""Predicts how long the draft model takes to read a prompt, from earlier measurements. Pure."""

FADE = 0.95
"""Factor by which earlier measurements lose weight with each new one, because the load of other processes changes."""

RETRY_FADE = 0.98
"""Factor by which predictions fall with each prompt that is refused because of them."""

CERTAIN = 0.5
"""Share of a probe's pace that prompts take at least: short chunks take more time per token than those of prompts, and
the machine may be busy with the rest of the start."""

MIN_MEASUREMENTS = 3


class Pace:
    """Fits seconds = a * tokens + b * tokens * preceding tokens by least squares, with a, b >= 0.

    Projections and recurrent layers contribute to a, attention to b. Before MIN_MEASUREMENTS measurements of prompts, a
    is the least that `expect` was told, and b is 0.
    """

    def __init__(self) -> None:
        self._expected_s = 0.0  # per 1000 tokens
        self._count = 0
        self._xx = self._xy = self._yy = self._xs = self._ys = 0.0

    def expect(self, num_tokens: int, seconds: float) -> None:
        """Derive the least seconds that prompts take from a short probe, if no earlier probe was faster."""
        per_thousand = CERTAIN * 1000 * seconds / num_tokens
        self._expected_s = min(self._expected_s or per_thousand, per_thousand)

    def record(self, start: int, end: int, seconds: float) -> None:
        """Record the seconds of reading the tokens from start to end of a prompt in one forward."""
        x, y = _features(start, end)
        sums = (self._xx, x * x), (self._xy, x * y), (self._yy, y * y), (self._xs, x * seconds), (self._ys, y * seconds)
        self._xx, self._xy, self._yy, self._xs, self._ys = (FADE * total + new for total, new in sums)
        self._count += 1

    def lower(self) -> None:
        """Lower all predictions a little, after a prompt was refused and thus not measured.

        Otherwise a pace that was measured beside busy processes could refuse all later prompts.
        """
        self._xs *= RETRY_FADE
        self._ys *= RETRY_FADE
        self._expected_s *= RETRY_FADE

    def seconds(self, start: int, end: int) -> float:
        """Predict the seconds of reading the tokens from start to end; 0 without measurements and probes."""
        if end <= start:
            return 0.0
        if self._count < MIN_MEASUREMENTS:
            return self._expected_s * (end - start) / 1000
        a, b = self._solve()
        x, y = _features(start, end)
        return a * x + b * y

    def _solve(self) -> tuple[float, float]:
        determinant = self._xx * self._yy - self._xy * self._xy
        if determinant > 1e-9 * self._xx * self._yy:
            a = (self._xs * self._yy - self._ys * self._xy) / determinant
            b = (self._ys * self._xx - self._xs * self._xy) / determinant
            if a >= 0 and b >= 0:
                return a, b
        only_a, only_b = self._xs / self._xx, self._ys / self._yy if self._yy else 0.0
        # Take the better fit; if all lengths are equal both fit, and the one without attention predicts less.
        return (0.0, only_b) if self._ys * only_b > self._xs * only_a * (1 + 1e-9) else (only_a, 0.0)


def _features(start: int, end: int) -> tuple[float, float]:
    num_tokens = end - start
    return num_tokens / 1000, num_tokens * (start + end) / 2e6
