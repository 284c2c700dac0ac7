"""Calls to other replicas: timeouts, cancellation, and the meaning of their errors.

Every function raises CancelledThere, not CancelledError, where the replica has cancelled the call.
"""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle

from deployments.calls.replica_choice import NoReplica
from deployments.ray_internals import answer_of, cancel_call, replica_calls, running_nodes
from engine.errors import OrchardError

log = logging.getLogger("ray.serve")

LOOK_PERIOD_S = 1.0
LEFT_GRACE_S = 5.0
"""Wait for a replica that Serve no longer lists as running: it may be draining, or lost with its node."""


class CancelledThere(Exception):
    """The replica cancelled the call because it is shutting down; its caller did not."""


class Silent(Exception):
    """A replica has sent nothing for longer than a living one ever does: its node is lost or unreachable."""


class NoAnswer(TimeoutError):
    """The timeout of `call_within` has passed, as opposed to a TimeoutError of the call itself."""


LOST_REPLICA_ERRORS = (
    RayActorError,
    NodeDiedError,
    ObjectLostError,
    ReplicaUnavailableError,
    CancelledThere,
    Silent,
    NoReplica,
)
"""Errors of a call to a replica that is dead or unreachable."""

RESET_BY_PEER = ("stream removed", "rst_stream", "connection reset", "socket closed")
"""Phrases in the details of gRPC's UNKNOWN and INTERNAL that mean that the peer's process ended during the call."""


async def call_within(timeout_s: float | None, response: Any) -> Any:
    """Await a handle's call, and cancel it after timeout_s (None: never) or with the caller.

    Raises:
        NoAnswer: The timeout has passed.
        Exception: Whatever the call raises.
    """
    scope = asyncio.timeout(timeout_s)
    try:
        with telling_remote_cancels():
            async with scope:
                return await response
    except TimeoutError:
        cancel_call(response)
        if scope.expired():
            raise NoAnswer from None
        raise
    except (asyncio.CancelledError, CancelledThere):
        cancel_call(response)
        raise


async def while_running(
    handle: Any, node_id: str, work: asyncio.Task[Any], period_s: float = LOOK_PERIOD_S, grace_s: float = LEFT_GRACE_S
) -> Any:
    """Await a call to a node while the deployment has a replica on it.

    A call to an unreachable node would hang until its timeout. Ray detects the loss of a node within seconds, and Serve
    then removes its replicas from the running ones, but does not fail their open calls.

    Args:
        handle: Handle of the deployment.
        node_id: The node of the called replica.
        work: The call.
        period_s: Time between two looks at the running replicas.
        grace_s: Time without a replica on the node after which the call is given up.

    Raises:
        Silent: The node has had no replica for grace_s.
        Exception: Whatever the call raises.
    """
    work.add_done_callback(lambda task: task.cancelled() or task.exception())  # marks the exception as retrieved
    has_been_there, missing_s = False, 0.0
    try:
        while not (await asyncio.wait({work}, timeout=period_s))[0]:
            nodes = running_nodes(handle)
            if nodes is None or any(node.node_id == node_id for node in nodes):
                has_been_there, missing_s = True, 0.0
            elif has_been_there:
                missing_s += period_s
                if missing_s >= grace_s:
                    raise Silent(f"node {node_id} has had no replica for {grace_s:g} s; its call is given up")
        return work.result()
    finally:
        if not work.done():
            work.cancel()
            await asyncio.wait({work}, timeout=period_s)


async def ask_replicas(
    handle: DeploymentHandle, timeout_s: float, method: str, *args: Any
) -> list[asyncio.Task[Any | None]]:
    """Call a method of every running replica.

    Returns:
        A task per replica with its answer, None if there is none within timeout_s; [] if no replica is running.
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
        log.warning("a replica did not answer %s: %r", method, cause_of(error))
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
    """Return the exception that the replica's code raised, without Ray's wrapper."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        return error.cause
    return error


def is_replica_lost(error: Exception) -> bool:
    """Tell whether the replica or the connection to it is lost, as opposed to an error of the replica's own code."""
    if isinstance(error, grpc.aio.AioRpcError):
        code = error.code()
        if code in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL):
            details = (error.details() or "").lower()
            return any(phrase in details for phrase in RESET_BY_PEER)
        return code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)  # a peer cancels when it shuts down
    return isinstance(error, LOST_REPLICA_ERRORS)


def why_silent(error: Exception) -> str:
    """Return the reason for a missing answer, for the operator."""
    error = cause_of(error)
    if isinstance(error, OrchardError):
        return error.message
    if isinstance(error, NoReplica):
        return str(error)
    is_lost = is_replica_lost(error) or isinstance(error, DeploymentUnavailableError)
    return "the engine was lost" if is_lost else "the engine failed to answer"
