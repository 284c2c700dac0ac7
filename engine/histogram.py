"""A histogram with fixed buckets: plain numbers, written by one thread."""

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Counts values by bucket.

    Args:
        bounds: Upper bounds of the buckets, inclusive, ascending; a last bucket without bound follows.

    Attributes:
        counts: Values in each bucket, not cumulative; one more than bounds.
        total: Sum of all values.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]):
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, num: int = 1) -> None:
        """Count a value `num` times."""
        self.counts[bisect_left(self.bounds, value)] += num
        self.total += value * num

    def copy(self) -> "Histogram":
        """Return an independent copy."""
        other = Histogram(self.bounds)
        other.counts, other.total = list(self.counts), self.total
        return other


def steps_1_2_5(largest: float) -> tuple[int, ...]:
    """Return 1, 2, 5, 10, 20, 50 ... up to `largest`."""
    bounds, factor = list[int](), 1
    while factor <= largest:
        bounds += [step * factor for step in (1, 2, 5) if step * factor <= largest]
        factor *= 10
    return tuple(bounds)
