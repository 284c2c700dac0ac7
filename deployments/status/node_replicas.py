"""NodeReplicas: reads the figures of the replicas on this node, for its metrics."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ray.serve.handle import DeploymentHandle

from deployments.calls.cached_call import CachedCall
from deployments.calls.replica_calls import ask_replicas, call_within
from deployments.calls.replica_choice import pin_to
from deployments.engine_ids import node_of, number_of
from deployments.metrics.node_figures import NodeFigures, SparsePlans
from deployments.process import node_id
from deployments.ray_internals import running_nodes
from engine.core.spec_prefill.plan import ScorerStatus

TIMEOUT_S = 2.0
"""Longest wait for a replica; a scrape by Prometheus usually ends after 10 s."""

SHARED_S = 0.5
"""Scrapes within this time share one call to the engine."""

RARELY_S = 15.0
"""Scrapes within this time share one call to each planner and scorer: a call takes 2 to 3 ms of the ingress."""


class NodeReplicas:
    """The replicas that share this process's node.

    Args:
        model: Name under which the model is served.
        engine: Handle of the engines.
        planners: Handles of the planners by route: `text`, `media`.
        scorer: Handle of the scorers; None without sparse prefill.
    """

    def __init__(
        self,
        model: str,
        engine: DeploymentHandle,
        planners: Mapping[str, DeploymentHandle],
        scorer: DeploymentHandle | None,
    ):
        self._model = model
        self._engine = engine
        self._scorer = scorer
        self._planners = dict(planners) if scorer is not None else {}  # they have no figures without sparse prefill
        self._engine_figures = CachedCall(self._ask_engines, SHARED_S)
        self._other_figures = CachedCall(self._ask_others, RARELY_S)

    async def figures(self) -> tuple[NodeFigures, list[NodeFigures]]:
        """Return the figures of this node without those of replicas that do not answer.

        Those of engines are at most SHARED_S old, others RARELY_S.

        Returns:
            Those of the node with its first engine, and those of its other engines.
        """
        engines, others = await asyncio.gather(self._engine_figures.get(), self._other_figures.get())
        if not engines:
            return others, []
        first, *more = sorted(engines, key=lambda one: int(one.engine_number))
        return replace(others, engine=first.engine, engine_number=first.engine_number), more

    async def _ask_engines(self) -> list[NodeFigures]:
        own = node_id()
        near = [one for one in running_nodes(self._engine) or () if node_of(one.node_id) == own]
        if len(near) <= 1:
            said = [await self._ask(self._engine, "figures")]
        else:
            said = await asyncio.gather(*(self._ask_one(engine.node_id) for engine in near))
        return [
            NodeFigures(model=self._model, engine=one["figures"], engine_number=number_of(one.get("engine_id", "")))
            for one in said
            if one is not None
        ]

    async def _ask_one(self, engine_id: str) -> dict[str, Any] | None:
        handle = self._engine.options(method_name="figures", session_id=pin_to(engine_id, 0.0))
        with suppress(Exception):
            return await call_within(TIMEOUT_S, handle.remote())
        return None

    async def _ask_others(self) -> NodeFigures:
        scorer, *planners = await asyncio.gather(
            self._ask(self._scorer, "status"),
            *(self._ask(planner, "status") for planner in self._planners.values()),
        )
        plans = {
            route: _sparse_plans(said["spec_prefill"])
            for route, said in zip(self._planners, planners, strict=True)
            if said is not None and said["spec_prefill"] is not None
        }
        return NodeFigures(
            model=self._model,
            sparse_plans=plans,
            scorer=None if scorer is None else ScorerStatus(**scorer["scorer"]),
        )

    async def _ask(self, handle: DeploymentHandle | None, method: str) -> dict[str, Any] | None:
        """Call a method of the replica on this node; None without one, or without an answer."""
        if handle is None:
            return None
        own = node_id()
        asked = await ask_replicas(handle, TIMEOUT_S, method)
        try:
            for answered in asyncio.as_completed(asked):  # replicas of other nodes delay nothing
                said = await answered
                if said is not None and said["node_id"] == own:
                    return said
        finally:
            for task in asked:
                task.cancel()
        return None


def _sparse_plans(counts: Mapping[str, Any]) -> SparsePlans:
    """Convert the counts of SparsePlanner.status."""
    return SparsePlans(num_sparse=counts["sparse"], num_replanned=counts["replanned"], dense=counts["dense"])
