"""EngineClient: the one hop between the ingress and the engines; reserve a replica, plan on its node, dispatch, stream.

It also asks all engines at once what is no request: the state of their caches. `ask_replicas` asks any deployment.

The reservation holds a slot of the replica while the plan is made, so that placing, planning and generating agree on
the node. Whatever ends a call (its last token, an error, a client that leaves) cancels the engine's generator and
gives the slot back.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from typing import Any

import grpc
from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle

from deployments.chat import ChatRequest, EngineAnswer, Plan, Route, SilentEngine
from deployments.routing import NODE_SESSION
from engine.protocol import Cancelled, EngineFailed, FinishReason, OrchardError, Overloaded, TokenChunk, Unavailable

log = logging.getLogger("ray.serve")

RESERVE_TIMEOUT_S = 30.0
"""How long a request waits for a replica: Serve itself would wait for ever."""
PLAN_TIMEOUT_S = 120.0
ASK_TIMEOUT_S = 10.0
"""An engine answers between two steps, and a step of a long prompt may last for seconds."""
RETRY_AFTER_S = 5.0
"""An engine that is gone is back within seconds at best."""


class CancelledThere(Exception):
    """A call was cancelled by the replica that should have answered it, as it shuts down; not by who waits for it."""


GONE = (RayActorError, NodeDiedError, ObjectLostError, ReplicaUnavailableError, CancelledThere)
"""What a handle raises when the replica behind it, or its node, is dead or cannot be reached."""


class EngineStream:
    """A request that has its first chunk. Iterate it once, or close it."""

    def __init__(self, plan: Plan, node_id: str, first: TokenChunk, rest: Any, resources: AsyncExitStack):
        self.plan = plan
        self.node_id = node_id
        self.num_cached_tokens = first.num_cached
        self.num_skipped_tokens = first.num_skipped
        self._first = first
        self._rest = rest
        self._resources = resources
        self._closing: asyncio.Task[None] | None = None

    async def __aiter__(self) -> AsyncIterator[TokenChunk]:
        """Raises Unavailable when the engine is lost on the way."""
        try:
            yield self._first
            with _telling_who_cancelled():
                async for chunk in self._rest:
                    yield chunk
        except Exception as error:
            cause = cause_of(error)
            if is_gone(cause):
                lost = "The engine was lost in the middle of the answer. Please send the request again."
                raise Unavailable(lost, RETRY_AFTER_S) from error
            raise cause from None
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Frees the row and the slot. Goes on in its own task when the caller is cancelled (again) meanwhile."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._resources.aclose())
        await asyncio.shield(self._closing)


class EngineClient:
    """`planners` must pin by the session id `node:<id>`, see routing.py. room_in_s: for who finds all queues full, how
    long until there is room."""

    def __init__(
        self,
        engine: DeploymentHandle,
        planners: Mapping[Route, DeploymentHandle],
        reserve_timeout_s: float = RESERVE_TIMEOUT_S,
        ask_timeout_s: float = ASK_TIMEOUT_S,
        plan_timeout_s: float = PLAN_TIMEOUT_S,
        room_in_s: Callable[[], float] = lambda: RETRY_AFTER_S,
    ):
        # options() connects a handle to its deployment, so that the first request need not wait for it
        # Chunks are plain dataclasses: pickle takes a fifth of the engine's CPU per item off what cloudpickle costs.
        self._engine = engine.options(
            stream=True, _by_reference=False, method_name="generate", response_serialization="pickle"
        )
        self._planners = {route: planner.options(method_name="plan") for route, planner in planners.items()}
        self._questions = engine
        self._reserve_timeout_s = reserve_timeout_s
        self._ask_timeout_s = ask_timeout_s
        self._plan_timeout_s = plan_timeout_s
        self._room_in_s = room_in_s

    async def start(self, request: ChatRequest, route: Route) -> EngineStream:
        """Returns with the first chunk. A replica that dies before it is replaced by another one, once.

        Raises InvalidRequest, Overloaded, Unavailable, EngineFailed, Cancelled.
        """
        try:
            with _telling_who_cancelled():
                return await self._attempt(request, route)
        except Exception as error:
            if not is_gone(cause_of(error)):
                raise self._answer_to(error) from None
            log.warning("request %s: the replica is gone (%s), trying another one", request.request_id, error)
        try:
            with _telling_who_cancelled():
                return await self._attempt(request, route)
        except Exception as error:
            raise self._answer_to(error) from None

    async def ask_all(self, method: str, node_ids: Iterable[str]) -> tuple[list[EngineAnswer[Any]], list[SilentEngine]]:
        """What the engines on these nodes answer, and those that give no answer in time.

        One call per node: Ray's broadcast does not say who is silent.
        """
        said = await asyncio.gather(*(self._ask(method, node_id) for node_id in node_ids))
        return [s for s in said if isinstance(s, EngineAnswer)], [s for s in said if isinstance(s, SilentEngine)]

    async def _ask(self, method: str, node_id: str) -> EngineAnswer[Any] | SilentEngine:
        handle = self._questions.options(method_name=method, session_id=NODE_SESSION + node_id)
        try:
            with _telling_who_cancelled():
                return await within(self._ask_timeout_s, handle.remote())
        except TimeoutError:
            return SilentEngine(node_id, f"no answer within {self._ask_timeout_s:g} s")
        except Exception as error:
            log.warning("the engine on node %s did not answer %s: %s", node_id, method, error)
            return SilentEngine(node_id, why_silent(error))

    async def _attempt(self, request: ChatRequest, route: Route) -> EngineStream:
        async with AsyncExitStack() as resources:
            selection = await self._reserve(resources)
            plan = await self._plan(request, route, selection)
            engine_request, plan = plan.request, replace(plan, request=plan.request.without_pixels())
            chunks: Any
            if selection is None:
                chunks = self._engine.remote(engine_request)
            else:
                chunks = self._engine.dispatch(selection, engine_request)
            del engine_request  # the call alone holds the pixels, until it is sent
            resources.callback(cancel, chunks)  # before the reservation ends
            first = await anext(chunks)
            if (error := failure_of(first)) is not None:
                raise error
            node_id = selection.node_id if selection else ""
            return EngineStream(plan, node_id, first, chunks, resources.pop_all())

    async def _reserve(self, resources: AsyncExitStack) -> Any | None:
        """A slot on the replica that will answer; None in Serve's local testing mode, which cannot choose."""
        try:
            async with asyncio.timeout(self._reserve_timeout_s):
                return await resources.enter_async_context(self._engine.choose_replica())
        except NotImplementedError:
            return None
        except TimeoutError:
            late = f"No engine took the request within {self._reserve_timeout_s:g} s."
            raise Unavailable(late, RETRY_AFTER_S) from None

    async def _plan(self, request: ChatRequest, route: Route, selection: Any | None) -> Plan:
        planner = self._planners[route]
        if selection is not None:
            planner = planner.options(session_id=NODE_SESSION + selection.node_id)
        try:
            return await within(self._plan_timeout_s, planner.remote(request))
        except TimeoutError:
            late = f"The request could not be prepared within {self._plan_timeout_s:g} s."
            raise Unavailable(late, RETRY_AFTER_S) from None

    def _answer_to(self, error: Exception) -> Exception:
        """The error for the client; what is not foreseen stays as it is."""
        error = cause_of(error)
        if isinstance(error, BackPressureError):
            num_waiting, limit, *_ = error.args
            return Overloaded(
                f"{num_waiting} requests wait in Serve for a replica; the limit is {limit}, the deployment's "
                "max_queued_requests.",
                self._room_in_s(),
            )
        if is_gone(error) or isinstance(error, DeploymentUnavailableError):
            lost = "The engine was lost before the first token. Please send the request again."
            return Unavailable(lost, RETRY_AFTER_S)
        return error


class NoAnswer(TimeoutError):
    """The time of `within` is over; a TimeoutError of the call itself is none."""


async def within(timeout_s: float, response: Any) -> Any:
    """What a handle's call returns; cancelled when it lasts longer (NoAnswer), or when the caller is."""
    scope = asyncio.timeout(timeout_s)
    try:
        async with scope:
            return await response
    except TimeoutError:
        response.cancel()
        if scope.expired():
            raise NoAnswer from None
        raise
    except asyncio.CancelledError:
        response.cancel()
        raise


async def ask_replicas(
    handle: DeploymentHandle, timeout_s: float, method: str, *args: Any
) -> list[asyncio.Task[Any | None]]:
    """What each running replica of a deployment answers, None if it gives no answer in time. [] where none is running.

    The results are taken one by one: Ray's own `results_async` loses all of them when one comes too late.
    """
    try:
        async with asyncio.timeout(timeout_s):
            replicas = await handle.broadcast(method, *args)._fetch_replica_results_async()
    except (DeploymentUnavailableError, TimeoutError):
        return []
    return [asyncio.ensure_future(_answer_of(replica, timeout_s, method)) for replica in replicas]


async def _answer_of(replica: Any, timeout_s: float, method: str) -> Any | None:
    try:
        with _telling_who_cancelled():
            async with asyncio.timeout(timeout_s):
                return await replica.get_async()
    except Exception as error:
        log.warning("a replica gave no answer to %s: %r", method, cause_of(error))
        return None


def cancel(response: Any) -> None:
    """Ends a streaming call wherever it stands.

    Ray's own cancel() misses a call that has been dispatched but not read from yet.
    """
    dispatched = response._replica_result_future
    response.cancel()
    if dispatched.done() and not dispatched.cancelled() and dispatched.exception() is None:
        dispatched.result().cancel()


def cause_of(error: Exception) -> Exception:
    """What the replica's code raised, without Ray's wrapping."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        return error.cause
    return error


def is_gone(error: Exception) -> bool:
    if isinstance(error, grpc.aio.AioRpcError):  # cancelled: by the peer, which shuts down
        return error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    return isinstance(error, GONE)


def failure_of(chunk: TokenChunk) -> OrchardError | None:
    """Why a choice ended with this chunk, if not as it should."""
    if chunk.finish_reason is FinishReason.ABORT:
        return Cancelled(chunk.error or "The request was cancelled.")
    if chunk.finish_reason is not FinishReason.ERROR:
        return None
    message = chunk.error or "The engine gave up the request."
    return EngineFailed(message) if chunk.retry_after_s is None else Unavailable(message, chunk.retry_after_s)


@contextmanager
def _telling_who_cancelled() -> Iterator[None]:
    """Ray raises CancelledError when the call was cancelled over there: to the caller the replica is gone."""
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise CancelledThere("the replica cancelled the call") from None


def why_silent(error: Exception) -> str:
    error = cause_of(error)
    if isinstance(error, OrchardError):
        return error.message
    if isinstance(error, BackPressureError):
        return "too many requests are waiting for it"
    return "it is gone" if is_gone(error) or isinstance(error, DeploymentUnavailableError) else "it could not answer"
