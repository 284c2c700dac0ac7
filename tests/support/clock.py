"""Clock: a monotonic clock for constructors that take one; it stands still until a test advances it."""


class Clock:
    """Returns its seconds when it is called."""

    def __init__(self, now_s: float = 100.0):
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
