"""GraphStatus: what the replicas of the graph say about themselves, and whether requests can be served."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from ray.serve.handle import DeploymentHandle

from deployments.calls.cached_call import CachedCall
from deployments.calls.replica_calls import ask_replicas, call_within

STATUS_TIMEOUT_S = 5.0
NEAR_TIMEOUT_S = 0.5
"""Longest wait for the nearest engine's answer before all are asked whether they are ready."""
READY_CHECKED_EVERY_S = 1.0

STATUS_SHARED_S = 0.5
"""Status and readiness requests within this time share one call to the replicas."""


class GraphStatus:
    """Asks the replicas of the graph; requests that come closely after one another share the answers.

    Args:
        graph: The deployments by their names in `/v1/status`, `engines` and `mllm` among them; None: there is none.
        ask_ingresses: Returns the status of every ingress, this process's own first.
        num_engines: Returns the number of engines that run as far as this process knows.
        constants: Entries of `/v1/status` that never change: `model` and `config`.
    """

    def __init__(
        self,
        graph: Mapping[str, DeploymentHandle | None],
        ask_ingresses: Callable[[], Awaitable[list[dict[str, Any]]]],
        num_engines: Callable[[], int],
        constants: Mapping[str, Any],
    ):
        self._replicas = {name: handle for name, handle in graph.items() if handle is not None}
        self._ask_ingresses = ask_ingresses
        self._num_engines = num_engines
        self._constants = constants
        self._ready_until = float("-inf")
        self._status = CachedCall(self._ask_status, STATUS_SHARED_S)
        self._readiness = CachedCall(self._ask_readiness, STATUS_SHARED_S)

    async def status(self) -> dict[str, Any]:
        """Return the body of `GET /v1/status`, at most STATUS_SHARED_S old and no older than the last `forget`."""
        return await self._status.get()

    def forget(self) -> None:
        """Make the next status ask again: the counters have changed."""
        self._status.forget()

    async def engines_not_ready(self) -> str | None:
        """Return the reason why no engine is ready; None if one is, or was READY_CHECKED_EVERY_S ago."""
        return None if time.monotonic() < self._ready_until else await self._readiness.get()

    async def has_media_planner(self) -> bool:
        """Return whether a planner of requests with images answers."""
        return bool(await status_of_all(self._replicas["mllm"]))

    async def _ask_status(self) -> dict[str, Any]:
        ingresses, *said = await asyncio.gather(self._ask_ingresses(), *map(status_of_all, self._replicas.values()))
        replicas = dict(zip(self._replicas, said, strict=True))
        engines = [replica["engine"] for replica in replicas["engines"]]
        return {
            "model": self._constants["model"],
            "ready": any(engine["state"] == "ready" for engine in engines),
            "num_running": sum(engine["num_running"] for engine in engines),
            "num_waiting": sum(engine["num_waiting"] for engine in engines),
            "spec_prefill": None,
            **replicas,
            "ingress": ingresses,
            "config": self._constants["config"],
        }

    async def _ask_readiness(self) -> str | None:
        """Return the reason why no engine is ready; None if one is. The nearest is asked first, as one is enough."""
        engines = self._replicas["engines"]
        if self._num_engines():
            with suppress(Exception):
                near = await call_within(NEAR_TIMEOUT_S, engines.options(method_name="status").remote())
                if near["engine"]["state"] == "ready":
                    self._ready_until = time.monotonic() + READY_CHECKED_EVERY_S
                    return None
        reason = None
        asked = await ask_replicas(engines, STATUS_TIMEOUT_S, "status")
        try:
            for answered in asyncio.as_completed(asked):  # one ready engine is enough, a silent one delays nothing
                replica = await answered
                if replica is None:
                    continue
                if replica["engine"]["state"] == "ready":
                    self._ready_until = time.monotonic() + READY_CHECKED_EVERY_S
                    return None
                reason = reason or replica["engine"]["error"]
        finally:
            for task in asked:
                task.cancel()
        return reason or "No engine is ready: the model is being loaded."


async def status_of_all(handle: DeploymentHandle) -> list[dict[str, Any]]:
    """Return the status of every running replica of a deployment that answers within STATUS_TIMEOUT_S."""
    said = await asyncio.gather(*await ask_replicas(handle, STATUS_TIMEOUT_S, "status"))
    return [answer for answer in said if answer is not None]
