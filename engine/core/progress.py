"""Progress: the piece of work that the device thread has in hand, what it should take, and what it may take."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

LATE_FACTOR, MIN_LATE_S = 5.0, 2.0
"""Work that has lasted so many times its prediction, and longer than so many seconds, is reported: predictions are good
to some ten percent, and short pauses of the machine are no news."""

LOST_FACTOR = 20.0
"""Work that has lasted so many times its prediction, and longer than step_timeout_s, is taken for lost. Other
processes, throttling and paging make a healthy device several times slower for a while, but not twenty times."""

FIRST_FACTOR = 2.0
"""The first work of a shape may take so many times as long: kernels may be compiled for it."""


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """A piece of work: one chunk, one decode step, one piece of an image, or what lies between those."""

    name: str = "a step"
    predicted_s: float = 0.0
    """Seconds that the cost model predicts; 0 without a prediction."""
    is_first: bool = False
    """Whether nothing of its shape has been computed before."""

    def is_late(self, seconds: float) -> bool:
        """Whether it takes much longer than predicted, if it has lasted so many seconds."""
        return seconds > self._patience * max(MIN_LATE_S, LATE_FACTOR * self.predicted_s)

    def limit_s(self, timeout_s: float) -> float:
        """Return the seconds after which the device does not come back. timeout_s: see EngineConfig.step_timeout_s."""
        return self._patience * max(timeout_s, LOST_FACTOR * self.predicted_s)

    @property
    def _patience(self) -> float:
        return FIRST_FACTOR if self.is_first else 1.0


class Progress:
    """Names the work in hand. The device thread writes it, any thread may read `work`.

    Args:
        shapes: Those that have been computed before, at warm-up.
    """

    def __init__(self, shapes: Iterable[Hashable] = ()):
        self.work = Work()
        self._shapes = set(shapes)

    def begin(self, name: str, predicted_s: float, shape: Hashable) -> None:
        """Take a piece of work in hand."""
        self.work = Work(name, predicted_s, shape not in self._shapes)
        self._shapes.add(shape)

    def end(self) -> None:
        """Be between two pieces of work."""
        self.work = Work()
