"""What `serve run` and `orchard serve` do about Ctrl-C and SIGTERM: answers that are running get their time first.

Serve's own shutdown begins with killing the HTTP proxies, whatever runs through them (ray 2.60.0: ProxyActor.shutdown
does nothing yet), and SIGTERM ends the whole cluster that `serve run` has started. So the ingresses are drained before
that, through Serve's public handles; then all goes on as after a Ctrl-C.
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
"""For the answers that ended late to be closed, beyond their time to drain."""

FLUSH_S = 0.5
"""The proxies may still have the last bytes of answers that are over as far as the ingresses know."""


class GracefulStop:
    """Made and installed in the main thread. drain: returns when nothing runs any more.

    The first signal drains, if something is served by then, the second one does not wait for it. Either ends with a
    KeyboardInterrupt in the main thread, on which Serve is shut down; no later signal interrupts that.
    """

    def __init__(self, drain: Callable[[], None]):
        self._drain = drain
        self._is_serving = threading.Event()
        self._is_interrupted = False

    def install(self) -> None:
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._on_signal)

    def serving(self) -> None:
        """There may be answers to wait for from now on."""
        self._is_serving.set()

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        _live_on()
        for other in (signal.SIGINT, signal.SIGTERM):
            signal.signal(other, self._on_second)
        if not self._is_serving.is_set():
            raise KeyboardInterrupt
        threading.Thread(target=self._drain_and_interrupt, name="drain", daemon=True).start()

    def _on_second(self, signum: int, frame: FrameType | None) -> None:
        """Also on the signal with which the drain thread says that it is over. Always in the main thread."""
        _live_on()
        if self._is_interrupted:
            os.write(2, b"\nThe server is being shut down already.\n\n")  # the thread may be in the middle of a `write`
            return
        self._is_interrupted = True
        raise KeyboardInterrupt

    def _drain_and_interrupt(self) -> None:
        try:
            self._drain()
        except Exception as error:
            say(f"The answers that were running could not be waited for: {type(error).__name__}: {error}")
        main = threading.main_thread().ident
        assert main is not None
        if not self._is_interrupted:
            signal.pthread_kill(main, signal.SIGINT)  # wakes it, which _thread.interrupt_main does not


def _live_on() -> None:
    """On SIGTERM Ray's native handler prints a stack, sets an alarm that aborts the process after three seconds, and
    then calls ours."""
    signal.alarm(0)


def drain_applications(timeouts_s: Mapping[str, float]) -> None:
    """Name -> drain_timeout_s of each application. Blocks, up to the longest of them and a little longer.

    One that cannot be asked, or does not answer, is told of and keeps no other from being waited for.
    """
    from ray import serve

    longest_s = max(timeouts_s.values(), default=0.0)
    say(f"Stopping: answers that are running get up to {longest_s:g} s. Once more, and they end now.")
    deadline = time.monotonic() + longest_s + CLOSE_MARGIN_S
    draining = {}
    for name in timeouts_s:
        with _telling_of(name):
            draining[name] = serve.get_app_handle(name).broadcast("drain")
    for name, response in draining.items():
        with _telling_of(name):
            left_s = max(1.0, deadline - time.monotonic())  # a moment, also for who is asked behind a silent one
            for answer in response.results(timeout_s=left_s, return_exceptions=True):
                if isinstance(answer, BaseException):
                    say(f"An ingress of '{name}' could not be drained: {type(answer).__name__}: {answer}")
    time.sleep(FLUSH_S)


@contextmanager
def _telling_of(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        say(f"Application '{name}' could not be drained: {type(error).__name__}: {error}")


def say(text: str) -> None:
    sys.stderr.write(f"\n{text}\n\n")
    sys.stderr.flush()
