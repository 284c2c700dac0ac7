"""WorkInProgress: the piece of work that the device thread computes, its predicted time and its time limit."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from engine.core.row import Row

LATE_FACTOR, MIN_LATE_S = 5.0, 2.0
"""Work is reported as late beyond this many times its prediction and this many seconds: predictions have errors of ten
percent or so, and short pauses of the machine are normal."""

LOST_FACTOR = 20.0
"""Work is considered hung beyond this many times its prediction and beyond step_timeout_s. Other processes, throttling
and paging slow a healthy device down several times for a while, but not twenty times."""

FIRST_FACTOR = 2.0
"""The first work of a shape may take this many times as long, because kernels may be compiled for it."""


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """A piece of work: one chunk, one decode step, one piece of an image, or the bookkeeping between them."""

    name: str = "a step"
    predicted_s: float = 0.0
    """Seconds that the cost model predicts; 0 without a prediction."""
    is_first: bool = False
    """Whether no work of the same shape has been computed before."""
    rows: tuple[Row, ...] = ()
    """Its rows, for the log."""

    def is_late(self, seconds: float) -> bool:
        """Return whether it takes much longer than predicted, given its `seconds` so far."""
        return seconds > self._factor * max(MIN_LATE_S, LATE_FACTOR * self.predicted_s)

    def limit_s(self, timeout_s: float) -> float:
        """Return the seconds after which the device is considered hung. timeout_s: see EngineConfig.step_timeout_s."""
        return self._factor * max(timeout_s, LOST_FACTOR * self.predicted_s)

    @property
    def _factor(self) -> float:
        return FIRST_FACTOR if self.is_first else 1.0


class WorkInProgress:
    """Names the work in progress. The device thread writes it; any thread may read `work`.

    Args:
        shapes: Shapes that were computed before, at warm-up.
    """

    def __init__(self, shapes: Iterable[Hashable] = ()):
        self.work = Work()
        self._shapes = set(shapes)

    def begin(self, name: str, predicted_s: float, shape: Hashable, rows: Iterable[Row] = ()) -> None:
        """Begin a piece of work.

        Args:
            name: For log messages and the status page.
            predicted_s: Predicted seconds; 0 without a prediction.
            shape: Work of an equal shape reuses compiled kernels.
            rows: See Work.
        """
        self.work = Work(name, predicted_s, shape not in self._shapes, tuple(rows))
        self._shapes.add(shape)

    def end(self) -> None:
        """End the current piece of work."""
        self.work = Work()
