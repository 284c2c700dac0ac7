"""Runs checks over a loaded model on a device thread, one per step, and yields their outcomes as they come."""

import queue
from collections.abc import Callable, Iterator, Mapping

from engine.device_thread import DeviceThread
from engine.self_test.bench import Bench
from engine.self_test.outcome import NotApplicable, Outcome, Status

Check = Callable[[Bench], Outcome]

STOP_TIMEOUT_S = 10.0
"""How long an interrupted self-test waits for the running check."""


class CheckThread:
    """The worker of a device thread whose steps are checks.

    Args:
        load: Loads the model.
        checks: The checks by name, in order.
        publish: Receives each outcome.
        finish: Called with the model after the last check.
    """

    def __init__(
        self,
        load: Callable[[], Bench],
        checks: Mapping[str, Check],
        publish: Callable[[Outcome], None],
        finish: Callable[[Bench], None],
    ):
        self._bench = load()
        self._left = list(checks.items())
        self._publish = publish
        self._finish = finish

    @property
    def has_work(self) -> bool:
        return bool(self._left)

    def step(self) -> None:
        """Run the next check."""
        name, check = self._left.pop(0)
        self._publish(guarded(name, lambda: check(self._bench)))

    def close(self) -> None:
        try:
            self._finish(self._bench)
        finally:
            self._bench.runner.close()


def guarded(name: str, check: Callable[[], Outcome]) -> Outcome:
    """Run a check; an exception is the outcome FAIL of this check."""
    try:
        return check()
    except NotApplicable as reason:
        return Outcome(name, Status.SKIP, str(reason))
    except Exception as error:
        return Outcome(name, Status.FAIL, f"{type(error).__name__}: {error}", "no error")


def run_checks(
    load: Callable[[], Bench], checks: Mapping[str, Check], finish: Callable[[Bench], None] = lambda bench: None
) -> Iterator[Outcome]:
    """Load a model on a device thread of its own, and yield the outcomes of the checks.

    Args:
        load: Loads the model.
        checks: The checks by name, in order.
        finish: Called with the model after the last check.

    Raises:
        Exception: What loading or `finish` raised.
    """
    results: queue.SimpleQueue[Outcome | BaseException | None] = queue.SimpleQueue()
    result: Outcome | BaseException | None = None
    thread = DeviceThread(lambda: CheckThread(load, checks, results.put, finish), lambda worker: None, results.put)
    thread.start()
    try:
        for _ in checks:
            result = results.get()
            if not isinstance(result, Outcome):
                break
            yield result
        else:
            thread.stop()
            result = results.get()
    finally:
        thread.stop()
        thread.join(STOP_TIMEOUT_S)
    if isinstance(result, BaseException):
        raise result
