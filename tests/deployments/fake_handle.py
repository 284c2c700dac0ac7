"""FakeHandle: acts as a DeploymentHandle of Ray Serve does: options, running replicas, calls, streams and broadcasts.

test_ray_internals.py runs what the deployments do with a handle against Ray's own classes.
"""

import asyncio
import copy
from collections.abc import Callable, Coroutine, Iterable, Mapping
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


def running(*node_ids: str) -> dict[str, Any]:
    """Running replicas, one on each node, as Ray's router holds them; on `node-0` it is `replica-0`."""
    names = [node_id.replace("node", "replica") for node_id in node_ids]
    return {
        name: SimpleNamespace(node_id=node_id, replica_id=SimpleNamespace(unique_id=name), replica_metadata={})
        for node_id, name in zip(node_ids, names, strict=True)
    }


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
    """A handle whose calls the test answers by overriding `call`, `running` and `results`.

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

    @property
    def _router(self) -> Any:
        return SimpleNamespace(_asyncio_router=SimpleNamespace(request_router=self))

    @property
    def curr_replicas(self) -> dict[str, Any]:
        return self.running()

    def broadcast(self, method: str, *arguments: Any) -> DeploymentBroadcastResponse:
        return DeploymentBroadcastResponse(self.results(method, *arguments), asyncio.get_running_loop())

    def call(self, *arguments: Any, **named: Any) -> Any:
        """Return the response of a call."""
        raise AssertionError("nothing calls this deployment")

    def running(self) -> dict[str, Any]:
        """Return the running replicas, see the function `running`. Without an override it is one without a node."""
        return running("")

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
        self._running = running(*(f"node-{i}" for i in range(num_replicas)))
        self._asyncio_router = self._request_router = self

    @property
    def _router(self) -> Any:
        return self

    def running(self) -> dict[str, Any]:
        return self._running

    def running_replicas_populated(self) -> bool:
        return self.has_had_one
