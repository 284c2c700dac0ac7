"""The asyncio interface of a device thread: its worker's life and calls to it, as the event loop sees them."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from engine.device_thread import DeviceThread, W
from engine.errors import EngineFailed

log = logging.getLogger("orchard.engine")

T = TypeVar("T")


def type_and_message(error: BaseException) -> str:
    """Return the type and the message of an error."""
    return f"{type(error).__name__}: {error}"


class AsyncDeviceThread(DeviceThread[W]):
    """A device thread that belongs to the event loop that is running when it is constructed.

    Args:
        name: What the worker is called in errors, such as `the engine`.
        make_worker: Creates the worker on the thread.
        on_end: Called on the loop when the worker has ended, with the state and the error set.
        warm_up: Runs on the loop once the worker exists; the worker is ready when it returns, and has failed when it
            raises. None: ready at once.
        describe: Returns the message of an error that ends the worker.

    Attributes:
        worker: None before it is created, and after its end.
        state: loading, ready, then failed or stopped; the warm-up may set another one.
        error: Why the worker has ended; None before.
        was_ready: Whether it has ever been ready.
        is_closing: Whether `shutdown` has been called.
    """

    def __init__(
        self,
        name: str,
        make_worker: Callable[[], W],
        on_end: Callable[[str], None],
        warm_up: Callable[[], Awaitable[None]] | None = None,
        describe: Callable[[BaseException], str] = type_and_message,
    ):
        super().__init__(make_worker, partial(self.call_soon, self._loaded), partial(self.call_soon, self._end))
        self._name = name
        self._notify_end = on_end
        self._warm_up = warm_up
        self._describe = describe
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._warming: asyncio.Future[None] | None = None
        self._calls: set[asyncio.Future[Any]] = set()  # calls whose results are awaited
        self.worker: W | None = None
        self.state = "loading"
        self.error: str | None = None
        self.was_ready = self.is_closing = False

    async def wait_ready(self) -> None:
        """Wait until the worker is ready.

        Raises:
            EngineFailed: It never will be; the message has the reason.
        """
        await asyncio.shield(self._ready)

    @property
    def unavailable_reason(self) -> str | None:
        """Why the worker cannot be used, None if it can be."""
        if self.worker is not None and not self.is_closing:
            return None
        return self.error or f"{self._name} is not ready: it is {'shutting down' if self.is_closing else self.state}"

    async def call(self, function: Callable[[W], T]) -> T:
        """Run a function on the device thread, between two pieces of work, and return its result.

        Raises:
            EngineFailed: The worker cannot be used, or the function failed.
        """
        if (reason := self.unavailable_reason) is not None:
            raise EngineFailed(reason)
        result: asyncio.Future[T] = self._loop.create_future()
        self._calls.add(result)
        try:
            self.submit(lambda worker: self._answer(result, worker, function))
            return await result
        finally:
            self._calls.discard(result)

    def fail(self, error: BaseException) -> None:
        """End the worker with an error, and stop the thread after the running step."""
        self._end(error)
        self.stop()

    async def shutdown(self, timeout_s: float) -> None:
        """Stop after the running step; if that takes longer than `timeout_s`, the worker has failed."""
        self.is_closing = True
        self.stop()
        if not await asyncio.to_thread(self.join, timeout_s):
            self._end(EngineFailed(f"the step that was running did not end within {timeout_s:.0f} s"))

    # On the device thread.

    def call_soon(self, callback: Callable[..., None], *args: object) -> None:
        """Call a function on the event loop."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(callback, *args)

    def _answer(self, result: asyncio.Future[T], worker: W, function: Callable[[W], T]) -> None:
        try:
            self.call_soon(_set_result, result, function(worker))
        except Exception as error:  # must not end the device thread
            log.exception("a call on the device thread failed")
            failed = EngineFailed(f"a call on the device thread failed: {type(error).__name__}")
            self.call_soon(_set_error, result, failed)

    # On the event loop.

    def _loaded(self, worker: W) -> None:
        if self.is_closing:
            return
        self.worker = worker
        if self._warm_up is None:
            self._set_ready()
        else:
            self._warming = asyncio.ensure_future(self._warm_up())
            self._warming.add_done_callback(self._warmed)

    def _warmed(self, warming: asyncio.Future[None]) -> None:
        if warming.cancelled():
            return
        if (error := warming.exception()) is not None:
            self.fail(error)
        elif self.worker is not None:  # it may have failed meanwhile
            self._set_ready()

    def _set_ready(self) -> None:
        self.state, self.was_ready = "ready", True
        self._ready.set_result(None)

    def _end(self, error: BaseException | None) -> None:
        if self.error is not None:
            return
        self.worker, self.state = None, "failed" if error else "stopped"
        self.error = self._describe(error) if error else f"{self._name} was shut down"
        self._notify_end(self.error)
        for result in self._calls:
            _set_error(result, EngineFailed(self.error))
        if not self._ready.done():
            self._ready.set_exception(EngineFailed(self.error))
            self._ready.exception()  # marks it as retrieved, in case wait_ready is never called


def _set_result(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _set_error(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
