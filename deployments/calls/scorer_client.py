"""ScorerClient: a planner's calls for a sparse plan: to its node's engine for the cached prefix, and to a scorer.

Every failure is a `NoPlan`, and the prompt is then prefilled densely. Cancelling a call also cancels it in the replica.
"""

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from ray.serve.exceptions import DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle

from deployments.calls.population import among
from deployments.calls.replica_calls import NoAnswer, call_within, cause_of, is_replica_lost, while_running
from deployments.calls.replica_choice import pin_to
from deployments.process import node_id
from deployments.ray_internals import running_nodes
from engine.core.spec_prefill.plan import Scored, ScoreRequest
from engine.errors import EngineFailed, InvalidRequest, OrchardError, Overloaded, ScoringTooSlow
from engine.protocol import CachedPrefix, EngineRequest

ENGINE_TIMEOUT_S = 10.0
"""Longest wait for the cached prefix. An engine answers between steps, which may take seconds."""


class NoPlan(Exception):
    """There is no sparse plan for a prompt.

    Args:
        category: Key of the counters in /v1/status.
        reason: For the client.
        is_failure: Whether a fault or overload is the reason, which is logged as a warning.
    """

    def __init__(self, category: str, reason: str, is_failure: bool = False):
        super().__init__(category, reason, is_failure)
        self.category, self.reason, self.is_failure = category, reason, is_failure


class ScorerClient:
    """Calls the engines of this node and the scorers for a planner; owns the handles."""

    def __init__(self, engine: DeploymentHandle, scorer: DeploymentHandle):
        self._node_id = node_id()
        self._engine = engine.options(method_name="cached_prefix")
        self._scorer = scorer.options(method_name="score")

    async def cached_prefix(self, request: EngineRequest, engine_id: str = "") -> CachedPrefix:
        """Look up the prompt's cached prefix in an engine; '' for this node's only one. Raises NoPlan."""
        engine = self._engine.options(session_id=pin_to(engine_id or self._node_id))
        with _no_plan_without("engine"):
            try:
                return await call_within(ENGINE_TIMEOUT_S, engine.remote(request.without_pixels()))
            except NoAnswer:
                raise _unavailable(f"the engine did not answer within {ENGINE_TIMEOUT_S:g} s") from None

    async def score(self, request: ScoreRequest, node_id: str | None = None) -> tuple[Scored, str]:
        """Score a prompt.

        Args:
            request: The prompt.
            node_id: Node of the scorer; None: the one on this node if it has one, else any.

        Returns:
            The scorer's answer, and its node, which caches the prompt's state for a second call; '' without Ray.

        Raises:
            NoPlan: There is no plan. A prompt does not wait for a scorer to start.
        """
        with _no_plan_without("scorer"):
            nodes = [one.node_id for one in among(running_nodes(self._scorer) or [])]
            if node_id is None:
                node_id = self._node_id if self._node_id in nodes else random.choice(nodes) if nodes else None
            if node_id is None or node_id not in nodes:
                raise _unavailable("no scorer is running" + ("" if node_id is None else " on the prompt's node"))
            scorer = self._scorer.options(session_id=pin_to(node_id, 0.0))
            scoring = asyncio.ensure_future(call_within(None, scorer.remote(request)))
            return await while_running(scorer, node_id, scoring), node_id


def _unavailable(why: str) -> NoPlan:
    return NoPlan("unavailable", f"unavailable: {why}", is_failure=True)


@contextmanager
def _no_plan_without(who: Literal["engine", "scorer"]) -> Iterator[None]:
    """Convert every error of a call to NoPlan.

    Errors of another process may reveal paths and hosts, so the client gets only the reasons written here and messages
    that are meant for clients.
    """
    try:
        yield
    except NoPlan:
        raise
    except Exception as error:
        cause = cause_of(error)
        if isinstance(cause, InvalidRequest):
            raise NoPlan("unfit_prompt", cause.message) from cause
        if isinstance(cause, ScoringTooSlow):
            raise NoPlan("no_gain", f"no gain: {cause}") from cause
        if isinstance(cause, Overloaded):
            raise NoPlan("busy", f"busy: {cause.message}", is_failure=True) from cause
        if is_replica_lost(cause) or isinstance(cause, DeploymentUnavailableError | RequestCancelledError):
            raise _unavailable(f"the {who} was lost") from cause
        if isinstance(cause, EngineFailed):
            raise _unavailable(f"the {who} has failed or is not ready, see /v1/status") from cause
        if isinstance(cause, OrchardError | TimeoutError):
            raise NoPlan("failed", "failed", is_failure=True) from cause
        raise
