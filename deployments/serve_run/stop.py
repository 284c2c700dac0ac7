"""GracefulStop: on Ctrl-C and SIGTERM, drains running requests before Serve shuts down.

Serve's own shutdown first kills the HTTP proxies with all open connections (ray 2.60.0: ProxyActor.shutdown does
nothing yet), and SIGTERM ends the cluster that `serve run` started. So the ingresses are drained first, through Serve's
public handles, and then the shutdown proceeds as after Ctrl-C.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

CLOSE_MARGIN_S = 10.0
"""Time beyond drain_timeout_s for requests that ended at the timeout to be closed."""

FLUSH_S = 0.5
"""Time after draining for the proxies to send the last bytes of answers."""


class GracefulStop:
    """Signal handler that drains before it interrupts the main thread. Create and install it in the main thread.

    The first signal starts to drain if the application is serving; a second one does not wait for it. Both end in a
    KeyboardInterrupt in the main thread, which shuts Serve down; later signals do not interrupt the shutdown.

    Args:
        drain: Blocks until no request is running.
    """

    def __init__(self, drain: Callable[[], None]):
        self._drain = drain
        self._is_serving = threading.Event()
        self._is_interrupted = False

    def install(self) -> None:
        """Handle SIGINT and SIGTERM, replacing earlier handlers."""
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._on_signal)

    def serving(self) -> None:
        """Note that the application runs, so that a signal drains first."""
        self._is_serving.set()

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        _live_on()
        for other in (signal.SIGINT, signal.SIGTERM):
            signal.signal(other, self._on_second)
        if not self._is_serving.is_set():
            raise KeyboardInterrupt
        threading.Thread(target=self._drain_and_interrupt, name="drain", daemon=True).start()

    def _on_second(self, signum: int, frame: FrameType | None) -> None:
        """Interrupt the main thread once: on a second signal, or on the one that the drain thread sends."""
        _live_on()
        if self._is_interrupted:
            os.write(2, b"\nThe server is already shutting down.\n\n")  # the thread may be in the middle of a `write`
            return
        self._is_interrupted = True
        raise KeyboardInterrupt

    def _drain_and_interrupt(self) -> None:
        try:
            self._drain()
        except Exception as error:
            say(f"The running requests could not be drained: {type(error).__name__}: {error}")
        main = threading.main_thread().ident
        assert main is not None
        if not self._is_interrupted:
            signal.pthread_kill(main, signal.SIGINT)  # unlike _thread.interrupt_main, this wakes the main thread


def _live_on() -> None:
    """Cancel the alarm of Ray's native SIGTERM handler, which aborts the process three seconds later."""
    signal.alarm(0)


def drain_applications(timeouts_s: Mapping[str, float]) -> None:
    """Drain all ingresses of the applications; block until they are done.

    Failures are printed and do not affect the other applications.

    Args:
        timeouts_s: drain_timeout_s by application name. The call takes at most CLOSE_MARGIN_S longer than the largest.
    """
    from ray import serve

    longest_s = max(timeouts_s.values(), default=0.0)
    say(f"Stopping: running requests get up to {longest_s:g} s to finish. Repeat the signal to end them now.")
    deadline = time.monotonic() + longest_s + CLOSE_MARGIN_S
    draining = {}
    for name in timeouts_s:
        with _telling_of(name):
            draining[name] = serve.get_app_handle(name).broadcast("drain")
    for name, response in draining.items():
        with _telling_of(name):
            left_s = max(1.0, deadline - time.monotonic())  # a silent application must not use up the time of the next
            for answer in response.results(timeout_s=left_s, return_exceptions=True):
                if isinstance(answer, BaseException):
                    say(f"An ingress of '{name}' could not be drained: {type(answer).__name__}: {answer}")
    time.sleep(FLUSH_S)


def drain_this_node(name: str, timeout_s: float) -> None:
    """Drain this machine alone: its engine's answers and snapshots move to others, and its ingress ends what it has.

    Failures are printed.

    Args:
        name: Of the application.
        timeout_s: Its drain_timeout_s. The call takes at most CLOSE_MARGIN_S longer.
    """
    import ray
    from ray import serve

    say(f"Stopping: running requests get up to {timeout_s:g} s to finish. Repeat the signal to end them now.")
    deadline = time.monotonic() + timeout_s + CLOSE_MARGIN_S
    own = ray.get_runtime_context().get_node_id()
    with _telling_of(name):
        ingresses = serve.get_app_handle(name)
        moving = None
        if len([node for node in ray.nodes() if node["Alive"]]) > 1:
            with _telling_of(name):
                ingresses.drain_node.remote(own, 0.0).result(timeout_s=timeout_s)
            with _telling_of(name):  # also if one of several engines did not answer
                moving = ingresses.hand_over.remote(own, max(0.0, deadline - CLOSE_MARGIN_S - time.monotonic()))
        response = ingresses.broadcast("drain_on", own)
        response.results(timeout_s=max(1.0, deadline - time.monotonic()), return_exceptions=True)
        if moving is not None:
            with _telling_of(name):
                say(str(moving.result(timeout_s=max(1.0, deadline - time.monotonic()))))
        ingresses.shutdown()  # else its thread connects to Ray again, and complains, once this process has left it
    time.sleep(FLUSH_S)


@contextmanager
def _telling_of(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        say(f"Application '{name}' could not be drained: {type(error).__name__}: {error}")


def say(text: str) -> None:
    """Print a message to standard error, between blank lines."""
    sys.stderr.write(f"\n{text}\n\n")
    sys.stderr.flush()
