"""ScorerClient: what a planner asks others for a sparse plan: its node's engine what is cached, a scorer what matters.

Whatever keeps an answer from coming is a `NoPlan`: the prompt is then taken in densely. A call that is cancelled here
is cancelled where it runs.
"""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any, Literal, NamedTuple

from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle

from deployments.ray_seams import cancel_call, end_dispatch
from deployments.replica import node_id
from deployments.replica_calls import NoAnswer, cause_of, is_gone, within
from deployments.replica_choice import pin_to
from engine.core.spec_prefill.plan import Scored, ScoreRequest
from engine.protocol import (
    CachedPrefix,
    EngineFailed,
    EngineRequest,
    InvalidRequest,
    OrchardError,
    Overloaded,
    ScoringTooSlow,
)

RESERVE_TIMEOUT_S = 1.0
"""A prompt does not wait for a scorer to start: it is taken in meanwhile."""
ENGINE_TIMEOUT_S = 10.0
"""An engine answers between two steps, and a step of a long prompt may last for seconds."""


class NoPlan(Exception):
    """No sparse plan for a prompt. category: for the counters. reason: for the client. is_failure: nobody wanted it."""

    def __init__(self, category: str, reason: str, is_failure: bool = False):
        super().__init__(category, reason, is_failure)
        self.category, self.reason, self.is_failure = category, reason, is_failure


class Answer(NamedTuple):
    """node_id: of the scorer that gave it; it remembers the prompt. '' without Ray."""

    scored: Scored
    node_id: str


class ScorerClient:
    def __init__(self, engine: DeploymentHandle, scorer: DeploymentHandle):
        self._engine = engine.options(method_name="cached_prefix", session_id=pin_to(node_id()))
        self._scorer = scorer.options(method_name="score")

    async def cached_prefix(self, request: EngineRequest) -> CachedPrefix:
        """Of the engine on this node. Raises NoPlan."""
        with _no_plan_without("engine"):
            try:
                return await within(ENGINE_TIMEOUT_S, self._engine.remote(request.without_pixels()))
            except NoAnswer:
                raise _unavailable(f"the engine gave no answer within {ENGINE_TIMEOUT_S:g} s") from None

    async def score(self, request: ScoreRequest, node_id: str | None = None) -> Answer:
        """By the scorer on that node; without one, by that of this node or else by the least loaded. Raises NoPlan."""
        with _no_plan_without("scorer"):
            async with AsyncExitStack() as resources:
                selection = await self._reserve(node_id, resources)
                response: Any
                if selection is None:
                    response = self._scorer.remote(request)
                else:
                    response = self._scorer.dispatch(selection, request)
                try:
                    await asyncio.sleep(0)  # the dispatch makes its first step: see EngineClient
                    return Answer(await response, selection.node_id if selection else "")
                except asyncio.CancelledError:
                    if selection is None:
                        cancel_call(response)
                    else:
                        await end_dispatch(response, selection)
                    raise

    async def _reserve(self, node_id: str | None, resources: AsyncExitStack) -> Any | None:
        """A slot on the scorer that will answer; None in Serve's local testing mode, which cannot choose."""
        scorer = self._scorer if node_id is None else self._scorer.options(session_id=pin_to(node_id))
        scope = asyncio.timeout(RESERVE_TIMEOUT_S)
        try:
            async with scope:
                return await resources.enter_async_context(scorer.choose_replica())
        except NotImplementedError:
            return None
        except TimeoutError:
            if not scope.expired():
                raise
            raise _unavailable(f"no scorer took the prompt within {RESERVE_TIMEOUT_S:g} s") from None


def _unavailable(why: str) -> NoPlan:
    return NoPlan("unavailable", f"unavailable: {why}", is_failure=True)


_ONE = {"engine": "an engine", "scorer": "a scorer"}


@contextmanager
def _no_plan_without(who: Literal["engine", "scorer"]) -> Iterator[None]:
    """What another process raises may tell of paths and hosts: the client reads only what stands here, and what is
    written for clients."""
    try:
        yield
    except NoPlan:
        raise
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise _unavailable(f"the {who} is gone") from None  # Ray says so when the call was cancelled over there
    except Exception as error:
        cause = cause_of(error)
        if isinstance(cause, InvalidRequest):
            raise NoPlan("unfit_prompt", cause.message) from cause
        if isinstance(cause, ScoringTooSlow):
            raise NoPlan("no_gain", f"no gain: {cause}") from cause
        if isinstance(cause, Overloaded):
            raise NoPlan("busy", f"busy: {cause.message}", is_failure=True) from cause
        if isinstance(cause, BackPressureError):
            raise NoPlan("busy", f"busy: too many prompts are waiting for {_ONE[who]}", is_failure=True) from cause
        if is_gone(cause) or isinstance(cause, DeploymentUnavailableError | RequestCancelledError):
            raise _unavailable(f"the {who} is gone") from cause
        if isinstance(cause, EngineFailed):
            raise _unavailable(f"the {who} has failed or is not ready, see /v1/status") from cause
        if isinstance(cause, OrchardError | TimeoutError):
            raise NoPlan("failed", "failed", is_failure=True) from cause
        raise
