"""The device thread, and which thread may touch what.

MLX binds lazy arrays to the thread that created them, so one thread loads the weights, runs every step and frees
everything at the end. Other threads communicate with it in two ways only: commands are submitted through a queue, and
results are published by callbacks that run on this thread and must not block. While there is work, commands run
between steps, and within a step whenever the worker polls; otherwise the thread sleeps in the queue. `step_age_s` tells
other threads how long the current piece of work has lasted.

When its work has ended, the thread sleeps forever instead of returning: destructors of MLX's thread-local objects take
the GIL, and Python 3.11 aborts the process if that happens during interpreter shutdown.
"""

import atexit
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

log = logging.getLogger("orchard.engine")

EXIT_TIMEOUT_S = 10.0


class Worker(Protocol):
    """The object that the thread runs: `step` while `has_work`, and `close` at the end."""

    @property
    def has_work(self) -> bool: ...

    def step(self) -> None: ...

    def close(self) -> None: ...


W = TypeVar("W", bound=Worker)


class DeviceThread(Generic[W]):
    """Creates a worker on a thread of its own and runs its steps.

    Args:
        make_worker: Creates the worker on the thread.
        on_ready: Called on the thread with the worker.
        on_end: Called on the thread with the exception that ended it, or None after `stop`.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        make_worker: Callable[[], W],
        on_ready: Callable[[W], None],
        on_end: Callable[[BaseException | None], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._make_worker = make_worker
        self._on_ready = on_ready
        self._on_end = on_end
        self._clock = clock
        self._commands: queue.SimpleQueue[Callable[[W], None] | None] = queue.SimpleQueue()
        self._step_began: float | None = None
        self._is_stopped = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=_run_and_park, args=([self],), name="device", daemon=True)

    def start(self) -> None:
        """Start the thread; it is stopped at interpreter exit."""
        atexit.register(self._at_exit)
        self._thread.start()

    def submit(self, command: Callable[[W], None]) -> None:
        """Run `command(worker)` on the device thread before the next piece of work. Never blocks."""
        self._commands.put(command)

    def stop(self) -> None:
        """Stop the thread after the running step."""
        self._commands.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the thread's work; return False on timeout."""
        return self._ended.wait(timeout_s)

    @property
    def step_age_s(self) -> float:
        """Seconds since the current piece of work or command began; 0 when idle."""
        began = self._step_began
        return 0.0 if began is None else self._clock() - began

    def _at_exit(self) -> None:
        self.stop()
        self.join(EXIT_TIMEOUT_S)

    def _run(self) -> None:
        self._work()
        atexit.unregister(self._at_exit)
        self._ended.set()

    def _work(self) -> None:
        error = None
        try:
            worker = self._make_worker()
            try:
                self._on_ready(worker)
                while self._take_commands(worker):
                    self._step_began = self._clock()
                    worker.step()
                    self._step_began = None
            finally:
                worker.close()
        except BaseException as e:
            log.exception("the device thread failed")
            error = e
        self._step_began = None
        self._on_end(error)

    def poll(self, worker: W) -> None:
        """Run submitted commands; called by the worker between two pieces of its step."""
        while not self._is_stopped:
            try:
                command = self._commands.get(block=False)
            except queue.Empty:
                break
            self._execute(command, worker)
        self._step_began = self._clock()

    def _take_commands(self, worker: W) -> bool:
        """Run submitted commands, sleeping while there is no work; return False when stopped."""
        while not self._is_stopped:
            try:
                command = self._commands.get(block=not worker.has_work)
            except queue.Empty:
                return True
            self._execute(command, worker)
        return False

    def _execute(self, command: Callable[[W], None] | None, worker: W) -> None:
        if command is None:
            self._is_stopped = True
            return
        self._step_began = self._clock()
        command(worker)
        self._step_began = None


def _run_and_park(only: list[DeviceThread]) -> None:
    only.pop()._run()  # the sleeping thread must not keep the object alive
    threading.Event().wait()
