"""FakeHandle: acts as a DeploymentHandle of Ray Serve does: options, reservations, calls, streams and broadcasts.

test_ray_internals.py runs what the deployments do with a handle against Ray's own classes.
"""

import asyncio
import contextlib
import copy
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from ray.exceptions import RayTaskError
from ray.serve.handle import DeploymentBroadcastResponse

Callback = Callable[[], Any]


def nothing() -> None: ...


def task_error(cause: Exception) -> RayTaskError:
    """As a replica's exception arrives: wrapped, with a traceback for a message."""
    return RayTaskError("call", "Traceback ...", cause).as_instanceof_cause()


async def play(outcome: Any) -> Any:
    """Return an outcome; sleep for it if it is a float (seconds), or raise it if it is an error."""
    if isinstance(outcome, float):
        await asyncio.sleep(outcome)
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


@dataclass
class FakeSelection:
    """A reserved slot. on_release_unsent: called when it is released because its call was never sent."""

    node_id: str = ""
    replica_id: str = ""
    on_release_unsent: Callable[[], None] | None = None

    async def _release_slot(self, *, force: bool = False) -> None:
        assert force and self.on_release_unsent is not None, "every call is sent at once"
        self.on_release_unsent()


class FakeCall:
    """A call under way, and what Ray holds of it once it is sent. outcome: see `play`. on_cancel: at a cancel."""

    def __init__(self, outcome: Any = None, on_cancel: Callback = nothing):
        self._outcome = outcome
        self._replica_result_future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._replica_result_future.set_result(SimpleNamespace(cancel=on_cancel))

    def __await__(self) -> Any:
        return self.get_async().__await__()

    async def get_async(self) -> Any:
        return await play(self._outcome)

    def cancel(self) -> None:
        """Do nothing, as Ray's cancel does for a call whose response has not been read yet."""


class FakeStream(FakeCall):
    """A streaming call. items: each is yielded, or slept for, or raised, see `play`. on_end: after the last one."""

    def __init__(
        self,
        items: Iterable[Any],
        on_cancel: Callback = nothing,
        on_end: Callback = nothing,
    ):
        super().__init__(on_cancel=on_cancel)
        self._items = iter(items)
        self._on_end = on_end

    def __aiter__(self) -> "FakeStream":
        return self

    async def __anext__(self) -> Any:
        for item in self._items:
            if not isinstance(await play(item), float):
                return item
        self._on_end()
        raise StopAsyncIteration


class FakeHandle:
    """A handle whose calls the test answers by overriding `call`, `reserve`, `release` and `results`.

    Attributes:
        chosen: What `options` was called with.
    """

    chosen: Mapping[str, Any] = {}

    def options(self, **options: Any) -> Any:
        other = copy.copy(self)
        other.chosen = {**self.chosen, **options}
        return other

    def remote(self, *arguments: Any) -> Any:
        return self.call(*arguments)

    def dispatch(self, selection: Any, *arguments: Any, **named: Any) -> Any:
        return self.call(*arguments, **named)

    @contextlib.asynccontextmanager
    async def choose_replica(self, *arguments: Any, **preferences: Any) -> AsyncIterator[Any]:
        selection = await self.reserve(*arguments, **preferences)
        try:
            yield selection
        finally:
            await self.release()

    def broadcast(self, method: str, *arguments: Any) -> DeploymentBroadcastResponse:
        return DeploymentBroadcastResponse(self.results(method, *arguments), asyncio.get_running_loop())

    def call(self, *arguments: Any, **named: Any) -> Any:
        """Return the response of a call."""
        raise AssertionError("nothing calls this deployment")

    async def reserve(self, *arguments: Any, **preferences: Any) -> Any:
        """Return a reserved slot. Without an override there are none, as in Serve's local testing mode."""
        raise NotImplementedError

    async def release(self) -> None:
        """Note that a slot is released."""

    def results(self, method: str, *arguments: Any) -> Coroutine[Any, Any, list[Any]]:
        """Return one call for each replica."""
        raise AssertionError("nothing calls this deployment")


class FakeRunningHandle(FakeHandle):
    """A handle as Serve's proxy holds it, as far as ServeRoutes looks into it; http_proxy/test_routes.py checks that.

    Args:
        num_replicas: Replicas that run now.
        has_had_one: Whether there has been one since the proxy started.
    """

    def __init__(self, num_replicas: int, has_had_one: bool = True):
        self.has_had_one = has_had_one
        self._router = self._asyncio_router = self._request_router = self
        self.curr_replicas = {str(i): None for i in range(num_replicas)}

    def running_replicas_populated(self) -> bool:
        return self.has_had_one
