"""The device thread's heartbeat, on a clock of the test's."""

import queue
from typing import Any

from engine.device_thread import DeviceThread
from tests.support.clock import Clock


class TwoPieces:
    """A worker with one step of two pieces; tells how old they were at their ends."""

    has_work = True

    def __init__(self, clock: Clock):
        self.clock = clock
        self.thread: Any = None
        self.ages: list[float] = []

    def step(self) -> None:
        for seconds in (100.0, 50.0):
            self.clock.advance(seconds)
            self.ages.append(self.thread.step_age_s)
            self.thread.poll(self)
        self.thread.stop()

    def close(self) -> None:
        """It has nothing."""


def test_each_piece_of_a_step_has_an_age_of_its_own():
    clock, ends = Clock(), queue.SimpleQueue[BaseException | None]()
    worker = TwoPieces(clock)
    thread = DeviceThread(lambda: worker, lambda worker: None, ends.put, clock)
    worker.thread = thread
    thread.start()
    assert ends.get(timeout=60) is None
    assert worker.ages == [100.0, 50.0] and thread.step_age_s == 0.0
