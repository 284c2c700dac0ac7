"""EngineClient: the one hop between the ingress and the engines; reserve a replica, plan on its node, dispatch, stream.

It also asks all engines at once what is no request: the state of their caches.

The reservation holds a slot of the replica while the plan is made, so that placing, planning and generating agree on
the node. Whatever ends a call (its last token, an error, a client that leaves) cancels the engine's generator and
gives the slot back.

Until the first token a request can go elsewhere, and does so once: when its engine or planner is lost, or refuses it
(Unavailable, Overloaded) while there is another engine. Both attempts together wait for replicas no longer than
reserve_timeout_s and for plans no longer than plan_timeout_s. To that comes, for each attempt, the time in the engine's
queue (queue_timeout_s; a request that has waited as long as that is not sent again), and what it takes to notice that a
replica is lost (SILENCE_LIMIT_S). Nothing is sent again once a token has been passed on.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from deployments.chat import ChatRequest, EngineAnswer, Plan, Route, SilentEngine
from deployments.engine_stream import RETRY_AFTER_S, SILENCE_LIMIT_S, ChunkReader, EngineStream
from deployments.ray_seams import cancel_call, end_dispatch, running_nodes
from deployments.replica_calls import Silent, cause_of, is_gone, telling_remote_cancels, why_silent, within
from deployments.replica_choice import Choice, NoOtherReplica, NoReplicaYet, pin_to
from engine.protocol import (
    GRAMMAR_FAILED,
    Cancelled,
    EngineFailed,
    EngineRequest,
    FinishReason,
    InvalidRequest,
    OrchardError,
    Overloaded,
    QueueTimeout,
    TokenChunk,
    Unavailable,
)

log = logging.getLogger("ray.serve")

RESERVE_TIMEOUT_S = 30.0
"""How long a request waits for a replica, over all attempts: Serve itself would wait for ever."""
PLAN_TIMEOUT_S = 120.0
ASK_TIMEOUT_S = 10.0
"""An engine answers between two steps, and a step of a long prompt may last for seconds."""

LOOK_PERIOD_S = 1.0
LEFT_GRACE_S = 5.0
"""A planner that Serve has taken from the running ones may be ending its last requests, or be lost with its node. So
long it is waited for."""

MIN_REFUSAL_S, MAX_REFUSAL_S = 1.0, 10.0
LOSS_S = 30.0
"""So long an engine that was lost is chosen last. Ray notices a dead node within 9 s, and Serve a little later."""


class Refusals:
    """Engines that have lately refused a request, or were lost: they are chosen last for a while."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._until: dict[str, float] = {}  # by unique id of the replica

    def note(self, replica_id: str, seconds: float) -> None:
        self._until[replica_id] = self._clock() + seconds

    def forget(self, replica_id: str) -> None:
        """It has taken a request again."""
        self._until.pop(replica_id, None)

    def recent(self) -> frozenset[str]:
        now = self._clock()
        self._until = {replica_id: until for replica_id, until in self._until.items() if until > now}
        return frozenset(self._until)


@dataclass
class Attempt:
    """One way of a request to an engine."""

    choice: Choice
    reserve_s: float
    """What is left of the time to wait for replicas, in seconds."""
    plan_s: float
    """What is left of the time to wait for plans, in seconds."""
    pin_wait_s: float | None = None
    """How long the engine's node may be without a planner, in seconds. None: as short as the router's default."""
    replica_id: str = ""
    """Unique id of the engine's replica, once there is a reservation."""
    stage: Literal["reserve", "plan", "engine"] = "reserve"

    def after(self, error: Exception, last: frozenset[str]) -> "Attempt | None":
        """The attempt that may follow this one, which has failed; None if none may."""
        lost = is_gone(error)
        refused = isinstance(error, Unavailable | Overloaded) and not isinstance(error, QueueTimeout | TooLate)
        if not (lost or (refused and self.replica_id)):
            return None
        left = Attempt(Choice(last=last), self.reserve_s, self.plan_s)
        if self.replica_id and lost and self.stage == "plan":  # the engine itself may do, if there is no other
            left.choice, left.pin_wait_s = Choice(last=last | {self.replica_id}), max(self.reserve_s, 0.0)
        elif self.replica_id:
            left.choice = Choice(frozenset({self.replica_id}), last, waits=lost)
        return left


class TooLate(Unavailable):
    """A time that the ingress itself sets is over: a second attempt would have none left."""


class EngineClient:
    """`planners` must pin by the session ids of replica_choice.pin_to."""

    def __init__(
        self,
        engine: DeploymentHandle,
        planners: Mapping[Route, DeploymentHandle],
        reserve_timeout_s: float = RESERVE_TIMEOUT_S,
        ask_timeout_s: float = ASK_TIMEOUT_S,
        plan_timeout_s: float = PLAN_TIMEOUT_S,
        silence_limit_s: float = SILENCE_LIMIT_S,
        room_in_s: Callable[[], float] = lambda: RETRY_AFTER_S,
        checkpoint: str = "",
        clock: Callable[[], float] = time.monotonic,
    ):
        """
        Args:
            room_in_s: For a request that finds all queues full: how long until there is room, in seconds.
            checkpoint: Fingerprint of the checkpoint whose tokenizer reads the answers; plans for another one are
                refused. '' is not checked.
        """
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
        self._silence_limit_s = silence_limit_s
        self._room_in_s = room_in_s
        self._checkpoint = checkpoint
        self._clock = clock
        self._refusals = Refusals(clock)

    async def start(self, request: ChatRequest, route: Route) -> EngineStream:
        """Returns with the first chunk.

        Raises InvalidRequest, Overloaded, Unavailable, EngineFailed, Cancelled.
        """
        attempt = Attempt(Choice(last=self._refusals.recent()), self._reserve_timeout_s, self._plan_timeout_s)
        try:
            return await self._attempt(request, route, attempt)
        except Exception as error:
            first = cause_of(error)
        again = self._after(first, attempt)
        if again is None:
            raise self._answer_to(first) from None
        log.warning("request %s: trying another replica: %r", request.request_id, first)
        try:
            return await self._attempt(request, route, again)
        except NoOtherReplica:
            raise self._answer_to(first) from None
        except Exception as error:
            self._after(cause_of(error), again)
            raise self._answer_to(error) from None

    async def ask_planner(self, method: str, route: Route, *args: Any) -> Any:
        """Ask the nearest planner of a route, without any engine.

        Raises InvalidRequest, Overloaded, Unavailable.
        """
        planner = self._planners[route].options(method_name=method)
        try:
            with telling_remote_cancels():
                return await within(self._plan_timeout_s, planner.remote(*args))
        except TimeoutError:
            late = f"The request could not be prepared within {self._plan_timeout_s:g} s."
            raise Unavailable(late, RETRY_AFTER_S) from None
        except Exception as error:
            raise self._answer_to(error) from None

    async def ask_all(self, method: str, node_ids: Iterable[str]) -> tuple[list[EngineAnswer[Any]], list[SilentEngine]]:
        """What the engines on these nodes answer, and those that give no answer in time.

        One call per node: Ray's broadcast does not say who is silent.
        """
        said = await asyncio.gather(*(self._ask(method, node_id) for node_id in node_ids))
        return [s for s in said if isinstance(s, EngineAnswer)], [s for s in said if isinstance(s, SilentEngine)]

    async def _ask(self, method: str, node_id: str) -> EngineAnswer[Any] | SilentEngine:
        handle = self._questions.options(method_name=method, session_id=pin_to(node_id))
        try:
            with telling_remote_cancels():
                return await within(self._ask_timeout_s, handle.remote())
        except TimeoutError:
            return SilentEngine(node_id, f"no answer within {self._ask_timeout_s:g} s")
        except Exception as error:
            log.warning("the engine on node %s did not answer %s: %s", node_id, method, error)
            return SilentEngine(node_id, why_silent(error))

    def _after(self, error: Exception, attempt: Attempt) -> Attempt | None:
        """Remembers which engine has failed, if one has. Returns the attempt that may follow."""
        again = attempt.after(error, self._refusals.recent())
        if again is not None and attempt.replica_id:
            refused = isinstance(error, Unavailable | Overloaded)
            last_s = min(max(error.retry_after_s, MIN_REFUSAL_S), MAX_REFUSAL_S) if refused else LOSS_S
            self._refusals.note(attempt.replica_id, last_s)
        return again

    async def _attempt(self, request: ChatRequest, route: Route, attempt: Attempt) -> EngineStream:
        with telling_remote_cancels():
            async with AsyncExitStack() as resources:
                selection = await self._reserve(resources, attempt)
                plan = await self._plan(request, route, selection, attempt)
                attempt.stage = "engine"
                engine_request, plan = plan.request, replace(plan, request=plan.request.without_pixels())
                chunks: Any
                if selection is None:
                    chunks = self._engine.remote(engine_request)
                    resources.callback(cancel_call, chunks)  # before the reservation ends
                else:
                    chunks = self._engine.dispatch(selection, engine_request)
                    resources.push_async_callback(end_dispatch, chunks, selection)
                    # Ray sends the call in a task of its own. Cancelled before its first step, that would lose the
                    # slot; it makes that step now.
                    await asyncio.sleep(0)
                del engine_request  # the call alone holds the pixels, until it is sent
                reader = ChunkReader(chunks, self._silence_limit_s)
                resources.callback(reader.close)
                first = await reader.next()
                if first is None:
                    raise EngineFailed("The engine ended the answer before its first token.")
                if (error := failure_of(first, plan.request)) is not None:
                    raise error
                self._refusals.forget(attempt.replica_id)
                node_id = selection.node_id if selection else ""
                note_loss = partial(self._refusals.note, attempt.replica_id, LOSS_S)
                return EngineStream(plan, node_id, first, reader, resources.pop_all(), note_loss)

    async def _reserve(self, resources: AsyncExitStack, attempt: Attempt) -> Any | None:
        """A slot on the replica that will answer; None in Serve's local testing mode, which cannot choose."""
        began = self._clock()
        try:
            async with asyncio.timeout(max(attempt.reserve_s, 0)):
                choosing = self._engine.choose_replica(choice=attempt.choice)
                selection: Any = await resources.enter_async_context(choosing)
        except NotImplementedError:
            return None
        except NoReplicaYet:
            raise TooLate("No engine is ready: the model is being loaded.", RETRY_AFTER_S) from None
        except TimeoutError:
            late = f"No engine took the request within {self._reserve_timeout_s:g} s."
            raise TooLate(late, RETRY_AFTER_S) from None
        finally:
            attempt.reserve_s -= self._clock() - began
        attempt.replica_id, attempt.stage = selection.replica_id, "plan"
        return selection

    async def _plan(self, request: ChatRequest, route: Route, selection: Any | None, attempt: Attempt) -> Plan:
        planner = self._planners[route]
        began = self._clock()
        try:
            if selection is None:
                plan = await within(attempt.plan_s, planner.remote(request))
            else:
                planner = planner.options(session_id=pin_to(selection.node_id, attempt.pin_wait_s))
                planning = within(max(attempt.plan_s, 0), planner.remote(request))
                plan = await while_running(planner, selection.node_id, asyncio.ensure_future(planning))
        except TimeoutError:
            late = f"The request could not be prepared within {self._plan_timeout_s:g} s."
            raise TooLate(late, RETRY_AFTER_S) from None
        finally:
            attempt.plan_s -= self._clock() - began
        if self._checkpoint and plan.request.checkpoint not in ("", self._checkpoint):
            other = "The model is being replaced: the prompt was prepared for another one. Please send it again."
            raise Unavailable(other, RETRY_AFTER_S)
        return plan

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
        if isinstance(error, TooLate):
            return Unavailable(*error.args)
        if is_gone(error) or isinstance(error, DeploymentUnavailableError):
            lost = "The engine was lost before the first token. Please send the request again."
            return Unavailable(lost, RETRY_AFTER_S)
        return error


async def while_running(
    handle: Any, node_id: str, work: asyncio.Task[Any], period_s: float = LOOK_PERIOD_S, grace_s: float = LEFT_GRACE_S
) -> Any:
    """What the work on a node returns, as long as the deployment has a replica there.

    A call to a node that was cut off would hang until its timeout. Ray notices the loss of a node within seconds, and
    Serve then takes its replicas from the running ones; but not from the calls that they have not answered.

    Raises Silent when the node has had no replica for grace_s, and what the work raises.
    """
    work.add_done_callback(lambda task: task.cancelled() or task.exception())  # also if it is not read below
    has_been_there, missing_s = False, 0.0
    try:
        while not (await asyncio.wait({work}, timeout=period_s))[0]:
            nodes = running_nodes(handle)
            if nodes is None or node_id in nodes:
                has_been_there, missing_s = True, 0.0
            elif has_been_there:
                missing_s += period_s
                if missing_s >= grace_s:
                    raise Silent(f"node {node_id} has left, and with it the replica that had the request")
        return work.result()
    finally:
        if not work.done():
            work.cancel()
            await asyncio.wait({work}, timeout=period_s)


def failure_of(chunk: TokenChunk, request: EngineRequest) -> OrchardError | None:
    """Why a choice of the request ended with this chunk, if not as it should."""
    if chunk.finish_reason is FinishReason.ABORT:
        return Cancelled(chunk.error or "The request was cancelled.")
    if chunk.finish_reason is not FinishReason.ERROR:
        return None
    message = chunk.error or "The engine gave up the request."
    if message.startswith(GRAMMAR_FAILED) and request.grammar is not None:
        return InvalidRequest(f"The answer cannot be constrained any further: {message}.", request.grammar.field)
    return EngineFailed(message) if chunk.retry_after_s is None else Unavailable(message, chunk.retry_after_s)
