"""Calls of other replicas: how long they may take, how they are ended, and what their errors mean."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle

from deployments.ray_seams import answer_of, cancel_call, replica_calls
from deployments.replica_choice import NoReplica
from engine.protocol import OrchardError

log = logging.getLogger("ray.serve")


class CancelledThere(Exception):
    """A call was cancelled by the replica that should have answered it, as it shuts down; not by its caller."""


class Silent(Exception):
    """Nothing came from a replica for longer than a living one is ever silent: its node is gone or unreachable."""


class NoAnswer(TimeoutError):
    """The time of `within` is over; a TimeoutError of the call itself is none."""


GONE = (RayActorError, NodeDiedError, ObjectLostError, ReplicaUnavailableError, CancelledThere, Silent, NoReplica)
"""What a call raises when the replica behind it, or its node, is dead or cannot be reached."""

RESET_BY_PEER = ("stream removed", "rst_stream", "connection reset", "socket closed")
"""In the details of gRPC's UNKNOWN and INTERNAL: the peer's process ended during the call, it did not fail it."""


async def within(timeout_s: float, response: Any) -> Any:
    """What a handle's call returns; cancelled when it lasts longer (NoAnswer), or when the caller is."""
    scope = asyncio.timeout(timeout_s)
    try:
        async with scope:
            return await response
    except TimeoutError:
        cancel_call(response)
        if scope.expired():
            raise NoAnswer from None
        raise
    except asyncio.CancelledError:
        cancel_call(response)
        raise


async def ask_replicas(
    handle: DeploymentHandle, timeout_s: float, method: str, *args: Any
) -> list[asyncio.Task[Any | None]]:
    """What each running replica of a deployment answers, None if it gives no answer in time. [] where none is running.

    The results are taken one by one: Ray's own `results_async` loses all of them when one comes too late.
    """
    try:
        async with asyncio.timeout(timeout_s):
            calls = await replica_calls(handle, method, *args)
    except (DeploymentUnavailableError, TimeoutError):
        return []
    return [asyncio.ensure_future(_answer(call, timeout_s, method)) for call in calls]


async def _answer(call: Any, timeout_s: float, method: str) -> Any | None:
    try:
        with telling_remote_cancels():
            async with asyncio.timeout(timeout_s):
                return await answer_of(call)
    except Exception as error:
        log.warning("a replica gave no answer to %s: %r", method, cause_of(error))
        return None


@contextmanager
def telling_remote_cancels() -> Iterator[None]:
    """Raise CancelledThere where Ray raises CancelledError because the call was cancelled by the replica."""
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise CancelledThere("the replica cancelled the call") from None


def cause_of(error: Exception) -> Exception:
    """What the replica's code raised, without Ray's wrapping."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        return error.cause
    return error


def is_gone(error: Exception) -> bool:
    """Whether the replica, or the way to it, is lost; an error that the replica's own code raised is not that."""
    if isinstance(error, grpc.aio.AioRpcError):
        code = error.code()
        if code in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL):
            details = (error.details() or "").lower()
            return any(phrase in details for phrase in RESET_BY_PEER)
        return code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)  # cancelled by a peer that shuts down
    return isinstance(error, GONE)


def why_silent(error: Exception) -> str:
    """Why a replica gave no answer, for the operator."""
    error = cause_of(error)
    if isinstance(error, OrchardError):
        return error.message
    if isinstance(error, NoReplica):
        return str(error)
    if isinstance(error, BackPressureError):
        return "too many requests are waiting for it"
    return "it is gone" if is_gone(error) or isinstance(error, DeploymentUnavailableError) else "it could not answer"
