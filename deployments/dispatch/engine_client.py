"""EngineClient: the path from the ingress to an engine: choose a node, plan on it, dispatch to its engine, stream.

It also makes administrative calls to all engines, such as for the state of their caches.

Plan and generation use the same node, whose engine counts the request from its booking on (placer.py). Every end of a
call (last token, error, client disconnect) cancels the engine's generator.

A request is retried at most once, and only before its first token: when its engine or planner is lost, or when another
engine exists and this one refuses (Unavailable, Overloaded). Both attempts together wait at most engine_timeout_s for
engines and plan_timeout_s for plans. Each attempt may add the time in the engine's queue (queue_timeout_s, after which
there is no retry) and the time to detect a lost replica (SILENCE_LIMIT_S). After its first token an answer goes on at
another engine, see engine_stream.py.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from deployments.calls.replica_calls import Silent, call_within, cause_of, is_replica_lost, while_running, why_silent
from deployments.calls.replica_choice import NoOtherReplica, NoReplica, NoReplicaYet, pin_to
from deployments.dispatch.engine_nodes import EngineNodes
from deployments.dispatch.engine_stream import SILENCE_LIMIT_S, AnswerPart, ChunkReader, EngineStream, failure_of
from deployments.dispatch.hand_over import HandOver
from deployments.dispatch.placer import Placer
from deployments.dispatch.replication import Replication
from deployments.dispatch.text_group import TextGroup, TextResults
from deployments.engine_ids import node_of
from deployments.http.timeline import ENGINE, current
from deployments.process import node_id
from deployments.ray_internals import LOCAL_NODE, RunningNode, cancel_call, running_nodes
from deployments.requests import ChatRequest, EngineAnswer, Plan, Route, SilentEngine
from engine import retry_after
from engine.errors import EngineFailed, Overloaded, QueueTimeout, Unavailable
from engine.placement import PrefixHolder
from engine.protocol import EngineRequest, GroupEnds, Progress, TokenChunk
from engine.timeline import RowTimeline

log = logging.getLogger("ray.serve")

T = TypeVar("T")

ENGINE_TIMEOUT_S = 30.0
"""Longest wait for an engine over both attempts, where none is running."""
PLAN_TIMEOUT_S = 120.0
ASK_TIMEOUT_S = 10.0
"""Longest wait for an engine's answer to an administrative call. It answers between steps, which may take seconds."""

NO_PLANNER_YET = "The part of the server that prepares this request is still being started."

PLANNER_PERIOD_S = 0.25
"""Time between two looks for a running planner."""

MIN_REFUSAL_S, MAX_REFUSAL_S = 1.0, 10.0
LOSS_S = 30.0
"""Time in which a lost engine is chosen last. Ray detects a dead node within 9 s, and Serve a little later."""


@dataclass
class PlacementAttempt:
    """One attempt to place a request on an engine."""

    wait_s: float
    """Remaining time to wait for an engine."""
    plan_s: float
    """Remaining time to wait for plans."""
    without: frozenset[str] = frozenset()
    """Unique ids of replicas that must not be chosen."""
    tried: tuple[str, ...] = ()
    """Engines that have been tried, or may be lost with those; they are asked for no quote, and chosen last."""
    waits: bool = True
    """Whether to wait for a new engine if all running ones are excluded."""
    pin_wait_s: float | None = None
    """Longest wait for a planner on the engine's node. None: the router's default, PIN_WAIT_S."""
    engine: RunningNode = LOCAL_NODE
    """The chosen engine."""
    stage: Literal["choose", "plan", "engine"] = "choose"
    holder: PrefixHolder | None = None
    """From where the engine may fetch more of the prompt than it has."""

    def after(self, error: Exception, neighbours: Callable[[str], Iterable[str]]) -> "PlacementAttempt | None":
        """Return the attempt that follows this failed one; None if the error that ended it is final.

        Args:
            error: The error.
            neighbours: Returns the running engines of an engine's node, which may be lost with it, or with its planner.
        """
        lost = is_replica_lost(error)
        refused = isinstance(error, Unavailable | Overloaded) and not isinstance(error, QueueTimeout | TooLate)
        if not (lost or refused) or self.stage == "choose":
            return None
        engine_id = self.engine.node_id
        is_of_node = lost or self.stage == "plan"  # the planner is that of all engines of the node
        tried = (engine_id, *neighbours(engine_id)) if is_of_node else (engine_id,)
        left = PlacementAttempt(self.wait_s, self.plan_s, tried=tried)
        if lost and self.stage == "plan":  # the planner was lost, this engine is a last resort
            left.pin_wait_s = max(self.wait_s, 0.0)
        else:
            left.without, left.waits = frozenset({self.engine.replica_id}), lost
        return left


class TooLate(Unavailable):
    """A time limit of the ingress itself is used up, so a second attempt is pointless."""


class EngineClient:
    """Places requests on engines. The planners' router must pin by the session ids of replica_choice.pin_to."""

    def __init__(
        self,
        engine: DeploymentHandle,
        planners: Mapping[Route, DeploymentHandle],
        engine_timeout_s: float = ENGINE_TIMEOUT_S,
        ask_timeout_s: float = ASK_TIMEOUT_S,
        plan_timeout_s: float = PLAN_TIMEOUT_S,
        silence_limit_s: float = SILENCE_LIMIT_S,
        checkpoint: str = "",
        clock: Callable[[], float] = time.monotonic,
    ):
        """Connect to the engines and the planners; `hand_over` and `replication` move snapshots between the engines.

        Args:
            engine: Handle of the engine.
            planners: Handle of the planner of each route.
            engine_timeout_s: Longest wait of a request for an engine where none is running, over both attempts.
            ask_timeout_s: Longest wait for an engine's answer to an administrative call.
            plan_timeout_s: Longest wait of a request for plans, over both attempts.
            silence_limit_s: Longest wait for the next item of an answer, heartbeats included.
            checkpoint: Fingerprint of the checkpoint whose tokenizer decodes the answers; plans for another one are
                refused. '' disables the check.
            clock: Monotonic seconds.
        """
        # options() connects a handle to its deployment, so that the first request does not wait for the connection.
        # Chunks are plain dataclasses: pickle costs a fifth less of the engine's CPU per item than cloudpickle.
        self._engine = engine.options(
            stream=True, _by_reference=False, method_name="generate", response_serialization="pickle"
        )
        self._groups = self._engine.options(method_name="generate_group")
        self._groups_at = Counter[str]()  # groups under way, by the node of their engine
        self._planners = {route: planner.options(method_name="plan") for route, planner in planners.items()}
        self._questions = engine
        self._placer = Placer(engine)
        self.nodes = EngineNodes(engine, clock)
        self.hand_over = HandOver(engine, self._placer, self._ask)
        self.replication = Replication(self._placer, self._ask)
        self._engine_timeout_s = engine_timeout_s
        self._ask_timeout_s = ask_timeout_s
        self._plan_timeout_s = plan_timeout_s
        self._silence_limit_s = silence_limit_s
        self._checkpoint = checkpoint
        self._clock = clock

    async def start(self, request: ChatRequest, route: Route, may_resume: bool = True) -> EngineStream:
        """Plan and dispatch a request; return at its first chunk.

        Args:
            request: The request.
            route: Its planner.
            may_resume: Whether the answer may go on at another engine after its first token.

        Raises InvalidRequest, Overloaded, Unavailable, EngineFailed, Cancelled.
        """
        return await self._retried(
            request.request_id, lambda attempt: self._attempt(request, route, attempt, may_resume)
        )

    async def compute(
        self, texts: Sequence[ChatRequest], num_parallel: int, max_open: int | None = None
    ) -> TextResults:
        """Compute the embeddings or scores of a group of texts, all on one engine.

        If it is lost or refuses a text, those left are computed on another one.

        Args:
            texts: The texts.
            num_parallel: Texts that the engine takes at once while it is busy.
            max_open: Most texts that it takes at once while it is idle; None: any number.

        Raises InvalidRequest, which names the text, Overloaded, Unavailable, EngineFailed, Cancelled.
        """
        group, limits = TextGroup(texts), (num_parallel, max_open)
        await self._retried(texts[0].request_id, lambda attempt: self._attempt_group(group, limits, attempt))
        return group.results

    async def _retried(self, request_id: str, make: Callable[[PlacementAttempt], Awaitable[T]]) -> T:
        """Attempt a request, and once more where the first attempt's error allows it."""
        attempt = PlacementAttempt(self._engine_timeout_s, self._plan_timeout_s)
        try:
            return await make(attempt)
        except Exception as error:
            first = cause_of(error)
        again = self._after(first, attempt)
        if again is None:
            raise self._answer_to(first) from None
        log.warning("request %s: retrying on another replica after %r", request_id, first)
        current().lap("retry", after=type(first).__name__)
        try:
            return await make(again)
        except NoOtherReplica:
            raise self._answer_to(first) from None
        except Exception as error:
            self._after(cause_of(error), again)
            raise self._answer_to(error) from None

    async def ask_planner(self, method: str, route: Route, *args: Any) -> Any:
        """Call a method of a planner of a route: of this node's if one runs here, else, or if it is lost, of another's.

        Raises InvalidRequest, Overloaded, Unavailable.
        """
        handle = self._planners[route].options(method_name=method)
        until, tried = self._clock() + self._plan_timeout_s, set[str]()
        while (there := await self._planner(handle, tried)) is not None:
            tried.add(there.replica_id)
            planner = handle.options(session_id=pin_to(there.node_id))
            asking = call_within(max(until - self._clock(), 0), planner.remote(*args))
            try:
                return await while_running(planner, there.node_id, asyncio.ensure_future(asking))
            except TimeoutError:
                late = f"The request could not be prepared within {self._plan_timeout_s:g} s."
                raise Unavailable(late, retry_after.REPLICA_LOST_S) from None
            except Exception as error:
                if not isinstance(error, NoReplica | Silent) and not is_replica_lost(cause_of(error)):
                    raise self._answer_to(error) from None
                log.warning("the planner on node %s did not answer %s: %r", there.node_id, method, error)
        raise Unavailable(NO_PLANNER_YET, retry_after.NOT_READY_S)

    async def _planner(self, handle: DeploymentHandle, tried: set[str]) -> RunningNode | None:
        """Return a running planner, this node's first; None if for engine_timeout_s none but the tried ones runs."""
        until, own = self._clock() + self._engine_timeout_s, node_id()
        while True:
            running = running_nodes(handle)
            known = [LOCAL_NODE] if running is None else running  # without knowledge, Ray chooses
            left = [one for one in known if one.replica_id not in tried]
            if left or self._clock() >= until:
                return min(left, key=lambda one: one.node_id != own, default=None)
            await asyncio.sleep(PLANNER_PERIOD_S)

    async def timelines(self, engine_id: str, request_id: str) -> tuple[RowTimeline, ...]:
        """Ask an engine for the timelines of a request's choices that have ended. () without an answer."""
        handle = self._questions.options(method_name="timelines", session_id=pin_to(engine_id))
        try:
            return await call_within(self._ask_timeout_s, handle.remote(request_id))
        except Exception as error:
            log.info("the engine %s did not tell the timeline of %s: %r", engine_id, request_id, error)
            return ()

    async def leave(self, engine_id: str, is_back: bool) -> SilentEngine | None:
        """Let an engine give all its answers to others, or take requests again.

        Returns it if it does not confirm that.
        """
        said = await self._ask("come_back" if is_back else "leave", engine_id)
        return said if isinstance(said, SilentEngine) else None

    async def ask_all(
        self, method: str, engine_ids: Iterable[str]
    ) -> tuple[list[EngineAnswer[Any]], list[SilentEngine]]:
        """Call a method of each engine. Returns the answers, and the engines without one.

        One call per engine, because Ray's broadcast does not tell which replica did not answer.
        """
        said = await asyncio.gather(*(self._ask(method, engine_id) for engine_id in engine_ids))
        return [s for s in said if isinstance(s, EngineAnswer)], [s for s in said if isinstance(s, SilentEngine)]

    async def _ask(
        self, method: str, engine_id: str, *args: Any, timeout_s: float | None = None
    ) -> EngineAnswer[Any] | SilentEngine:
        handle = self._questions.options(method_name=method, session_id=pin_to(engine_id))
        limit_s = self._ask_timeout_s if timeout_s is None else timeout_s
        try:
            return await call_within(limit_s, handle.remote(*args))
        except TimeoutError:
            return SilentEngine(engine_id, f"no answer within {limit_s:g} s")
        except Exception as error:
            log.warning("the engine %s did not answer %s: %s", engine_id, method, error)
            return SilentEngine(engine_id, why_silent(error))

    def _after(self, error: Exception, attempt: PlacementAttempt) -> PlacementAttempt | None:
        """Record a failed engine. Returns the attempt that follows; None if the error is final."""
        again = attempt.after(error, self._neighbours)
        if again is not None:
            refused = isinstance(error, Unavailable | Overloaded)
            last_s = min(max(error.retry_after_s, MIN_REFUSAL_S), MAX_REFUSAL_S) if refused else LOSS_S
            self.nodes.note(attempt.engine.replica_id, last_s)
        return again

    def _neighbours(self, engine_id: str) -> list[str]:
        """Return the other running engines of an engine's node."""
        running = running_nodes(self._questions) or ()
        own = node_of(engine_id)
        return [one.node_id for one in running if node_of(one.node_id) == own and one.node_id != engine_id]

    async def _attempt(
        self, request: ChatRequest, route: Route, attempt: PlacementAttempt, may_resume: bool
    ) -> EngineStream:
        timeline = current()
        engine = await self._choose(request, route, attempt)
        plan = await self._plan(request, route, attempt)
        timeline.lap("plan", **_planned(plan))
        timeline.asked = _asked(plan.request)
        self._placer.planned(request, len(plan.request.token_ids))
        attempt.stage = "engine"
        engine_request, plan = plan.request, replace(plan, request=plan.request.without_pixels())
        opening = self._open(engine, replace(engine_request, spent_s=timeline.spent_s, holder=attempt.holder))
        del engine_request  # now only the call references the pixels, until it is sent
        part = await opening
        timeline.first_token_s = timeline.seconds
        self.nodes.forget(engine.replica_id)
        move = partial(self._move, _kept(request, route), route, plan) if may_resume else None
        return EngineStream(plan, part, move, lambda replica_id: self.nodes.note(replica_id, LOSS_S))

    async def _attempt_group(self, group: TextGroup, limits: tuple[int, int | None], attempt: PlacementAttempt) -> None:
        """Compute the texts of a group that are left on one engine. limits: num_parallel, max_open, see `compute`."""
        texts = group.left
        attempt.tried += tuple(self._groups_at)  # engines with other groups are chosen last
        engine = await self._choose(texts[0], Route.TEXT, attempt)
        with ExitStack() as resources:
            self._groups_at[engine.node_id] += 1
            resources.callback(self._group_ended, engine.node_id)
            await self._compute_group(group, texts, limits, engine, attempt)
        self.nodes.forget(engine.replica_id)

    def _group_ended(self, node_id: str) -> None:
        self._groups_at[node_id] -= 1
        self._groups_at += Counter()  # without those that have none

    async def _compute_group(
        self,
        group: TextGroup,
        texts: Sequence[ChatRequest],
        limits: tuple[int, int | None],
        engine: RunningNode,
        attempt: PlacementAttempt,
    ) -> None:
        """Plan texts, and compute them on the engine until the group is complete."""
        timeline = current()
        planner = self._planners[Route.TEXT].options(method_name="plan_group")
        requests = group.planned(await self._planned(planner, attempt, texts))
        self._check_checkpoint(requests[0])
        timeline.lap("plan", num_texts=len(requests), num_tokens=sum(len(one.token_ids) for one in requests))
        timeline.asked = _asked(requests[0])
        attempt.stage = "engine"
        sent = [replace(one, spent_s=timeline.spent_s) for one in requests]
        with ExitStack() as resources:
            messages: Any = self._groups.options(session_id=pin_to(engine.node_id, 0.0)).remote(sent, *limits)
            resources.callback(cancel_call, messages)
            reader = ChunkReader[GroupEnds](messages, self._silence_limit_s)
            resources.callback(reader.close)
            while not group.is_complete:
                message = await reader.next()
                timeline.lap(ENGINE)
                if message is None:
                    raise EngineFailed("The engine ended the requests before their last result.")
                for _, end in message.ends:
                    if isinstance(end, TokenChunk) and end.timeline is not None:
                        timeline.add_row(end.timeline)
                group.take(message)
                timeline.first_token_s = timeline.seconds
            await reader.read_end(texts[0].request_id)

    async def _open(self, engine: RunningNode, request: EngineRequest) -> AnswerPart:
        """Dispatch a request to an engine, and return at its first chunk, which is no failure."""
        without_pixels, timeline = request.without_pixels(), current()
        async with AsyncExitStack() as resources:
            chunks: Any = self._engine.options(session_id=pin_to(engine.node_id, 0.0)).remote(request)
            del request
            resources.callback(cancel_call, chunks)
            reader = ChunkReader[TokenChunk](chunks, self._silence_limit_s)
            resources.callback(reader.close)
            first = await reader.next()
            timeline.lap(ENGINE)
            if first is None:
                raise EngineFailed("The engine ended the answer before its first token.")
            if first.timeline is not None:
                timeline.add_row(first.timeline)
            if (error := failure_of(first, without_pixels)) is not None:
                raise error
            return AnswerPart(engine.node_id, engine.replica_id, first, reader, resources.pop_all())

    async def _move(
        self,
        request: ChatRequest,
        route: Route,
        plan: Plan,
        left: AnswerPart,
        progress: tuple[Progress, ...],
        is_lost: bool,
    ) -> AnswerPart:
        """Continue an answer on another engine, see engine_stream.Move. Images are read again."""
        attempt = PlacementAttempt(
            self._engine_timeout_s,
            self._plan_timeout_s,
            without=frozenset({left.replica_id}) if left.replica_id else frozenset(),
            tried=(left.node_id, *(self._neighbours(left.node_id) if is_lost else ())),
        )
        engine = await self._choose(request, route, attempt, holders=[left.node_id])
        continued = plan.request
        if continued.images:
            continued = replace(continued, images=(await self._plan(request, route, attempt)).request.images)
        spent_s = current().spent_s
        return await self._open(engine, replace(continued, progress=progress, spent_s=spent_s, holder=attempt.holder))

    async def _choose(
        self, request: ChatRequest, route: Route, attempt: PlacementAttempt, holders: Collection[str] = ()
    ) -> RunningNode:
        """Choose the engine of an attempt: the best one of those that are asked for a quote, else any.

        Args:
            request: The request.
            route: Its planner.
            attempt: The attempt; updated.
            holders: Nodes that are left out, but may hold its prefix.
        """
        place, facts = await self._placer.place(request, route, attempt.tried, holders), dict[str, Any]()
        if place is not None:
            attempt.holder = place.holder
            facts["num_asked"] = place.num_asked
            if (quote := place.quote) is not None:
                facts |= {"predicted_s": quote.seconds, "cached": quote.cached_tokens}
        best, last = None if place is None else place.node_id, {*attempt.tried, *self._placer.silent}
        began = self._clock()
        try:
            async with asyncio.timeout(max(attempt.wait_s, 0)):
                attempt.engine = await self.nodes.choose(attempt.without, last, best, attempt.waits)
        except NoReplicaYet:
            raise TooLate("No engine is ready: the model is being loaded.", retry_after.NOT_READY_S) from None
        except TimeoutError:
            late = f"No engine has been running for {self._engine_timeout_s:g} s."
            raise TooLate(late, retry_after.REPLICA_LOST_S) from None
        finally:
            attempt.wait_s -= self._clock() - began
        attempt.stage = "plan"
        current().node_id = attempt.engine.node_id
        current().lap("place", **facts)
        return attempt.engine

    async def _plan(self, request: ChatRequest, route: Route, attempt: PlacementAttempt) -> Plan:
        plan = await self._planned(self._planners[route], attempt, request, attempt.engine.node_id)
        self._check_checkpoint(plan.request)
        return plan

    async def _planned(self, handle: DeploymentHandle, attempt: PlacementAttempt, *args: Any) -> Any:
        """Call the planner on the node of an attempt's engine. Raises TooLate, or whatever the call raises."""
        node_id = node_of(attempt.engine.node_id)
        planner = handle.options(session_id=pin_to(node_id, attempt.pin_wait_s))
        planning = call_within(max(attempt.plan_s, 0), planner.remote(*args))
        began = self._clock()
        try:
            return await while_running(planner, node_id, asyncio.ensure_future(planning))
        except NoReplicaYet:
            raise TooLate(NO_PLANNER_YET, retry_after.NOT_READY_S) from None
        except TimeoutError:
            late = f"The request could not be prepared within {self._plan_timeout_s:g} s."
            raise TooLate(late, retry_after.REPLICA_LOST_S) from None
        finally:
            attempt.plan_s -= self._clock() - began

    def _check_checkpoint(self, request: EngineRequest) -> None:
        if self._checkpoint and request.checkpoint not in ("", self._checkpoint):
            other = "The model is being replaced: the prompt was tokenized for another one. Please send it again."
            raise Unavailable(other, retry_after.REPLACED_S)

    def _answer_to(self, error: Exception) -> Exception:
        """Convert an error to one for the client; an unexpected error is returned unchanged."""
        error = cause_of(error)
        if isinstance(error, TooLate):
            return Unavailable(*error.args)
        if isinstance(error, NoReplicaYet):
            return Unavailable(NO_PLANNER_YET, retry_after.NOT_READY_S)
        if is_replica_lost(error) or isinstance(error, DeploymentUnavailableError):
            lost = "The engine was lost before the first token. Please send the request again."
            return Unavailable(lost, retry_after.REPLICA_LOST_S)
        return error


def _kept(request: ChatRequest, route: Route) -> ChatRequest:
    """Return what a running answer keeps of its request, to go on elsewhere: the messages only if they have images."""
    return request if route is Route.MLLM else replace(request, messages=(), raw_prompt=None, tools=())


def _planned(plan: Plan) -> dict[str, Any]:
    """Return what the timeline tells about a plan."""
    facts: dict[str, Any] = {"num_tokens": len(plan.request.token_ids), "num_images": len(plan.request.images)}
    if plan.spec_prefill is not None:
        facts |= {"num_scored": plan.spec_prefill.num_scored, "dense_because": plan.spec_prefill.dense_because}
    return facts | {f"{name}_s": seconds for name, seconds in plan.seconds.items()}


def _asked(request: EngineRequest) -> dict[str, float]:
    """Return the sampling parameters of a request, by their names in OpenTelemetry's conventions."""
    sampling = request.sampling
    return {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "choice.count": request.num_choices,
    }
