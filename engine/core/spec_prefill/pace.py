"""How long a draft takes to read: what it has taken so far, carried forward to longer prompts. Pure."""

FADE = 0.95
"""What each new measurement leaves of the weight of those before: other processes come and go."""

MIN_MEASUREMENTS = 3


class Pace:
    """Least squares of seconds = a * tokens + b * tokens * tokens in front of them, with a, b >= 0.

    Layers with a recurrent state and projections take a, attention takes b.
    """

    def __init__(self) -> None:
        self._count = 0
        self._xx = self._xy = self._yy = self._xs = self._ys = 0.0

    def record(self, start: int, end: int, seconds: float) -> None:
        """Reading tokens start to end of a prompt, in one forward."""
        x, y = _features(start, end)
        sums = (self._xx, x * x), (self._xy, x * y), (self._yy, y * y), (self._xs, x * seconds), (self._ys, y * seconds)
        self._xx, self._xy, self._yy, self._xs, self._ys = (FADE * total + new for total, new in sums)
        self._count += 1

    def seconds(self, start: int, end: int) -> float:
        """About how long reading tokens start to end takes, in one forward or many; 0 while too little is known."""
        if self._count < MIN_MEASUREMENTS or end <= start:
            return 0.0
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
        # the better fit of the two; with one length alone both fit, and the one without attention promises less
        return (0.0, only_b) if self._ys * only_b > self._xs * only_a * (1 + 1e-9) else (only_a, 0.0)


def _features(start: int, end: int) -> tuple[float, float]:
    num_tokens = end - start
    return num_tokens / 1000, num_tokens * (start + end) / 2e6
