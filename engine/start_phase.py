"""StartPhase: one phase of an engine's start in the log, with its progress and its seconds."""

import logging
import threading
import time
from types import TracebackType

log = logging.getLogger("orchard.engine")

PERIOD_S = 5.0
"""Interval of the lines of a phase that lasts."""


class StartPhase:
    """A context manager: logs a line when a phase begins, one every `period_s` while it lasts, and one when it ends.

    Args:
        name: The phase in the log, such as `reading weights`.
        period_s: Interval of the lines while it lasts.
    """

    def __init__(self, name: str, period_s: float = PERIOD_S):
        self._name = name
        self._period_s = period_s
        self._began_s = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._report, name="start phase", daemon=True)
        self.progress: float | None = None
        """The part that is done, 0 to 1; None if unknown."""

    def __enter__(self) -> "StartPhase":
        log.info("%s ...", self._name)
        self._thread.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        done = "took" if error is None else f"failed with {type(error).__name__} after"
        log.info("%s %s %.1f s", self._name, done, time.monotonic() - self._began_s)

    def _report(self) -> None:
        while not self._ended.wait(self._period_s):
            part = "" if self.progress is None else f"{100 * self.progress:.0f} %, "
            log.info("%s: %s%.0f s so far", self._name, part, time.monotonic() - self._began_s)
