"""SpecPrefillScorer: a thin deployment over AsyncDraftScorer; the only process with the draft model."""

import asyncio
import logging
from dataclasses import asdict, replace
from typing import Any

import ray
from ray import serve

from deployments.autoscaling import nodes_offering
from deployments.calls.population import CODE, own_code
from deployments.process import node_id, replica_info
from deployments.ray_internals import by_reference, http_request_id, listen_on_node_address
from deployments.serve_log import join_serve_log
from engine.config import EngineConfig
from engine.core.spec_prefill.plan import Scored, ScoreRequest
from engine.errors import EngineFailed
from engine.spec_prefill_config import SpecPrefillConfig

log = logging.getLogger("ray.serve")


@by_reference
@serve.deployment()
class SpecPrefillScorer:
    """Scores prompts for sparse prefill.

    If the draft model cannot be loaded the replica stays up and refuses prompts, since a restart would not help.
    """

    _scorer: Any = None
    """The AsyncDraftScorer; None until it loads; Serve calls `__del__` also in a replica that is stopped before."""

    async def __init__(self, config: SpecPrefillConfig, target: EngineConfig):
        """Load the draft model; return when it is ready or has failed for good."""
        listen_on_node_address()
        join_serve_log()
        from engine.draft_scorer import AsyncDraftScorer  # imports MLX

        self._scorer = AsyncDraftScorer(config, target, await asyncio.to_thread(_beside_engine))
        try:
            await self._scorer.wait_ready()
            log.info(
                "the draft model %s is loaded; it scores prompts of up to %d tokens (max_tokens_scored is %d)",
                config.draft_model or "demo",
                self._scorer.status().max_prompt_tokens,
                config.max_tokens_scored,
            )
        except EngineFailed as error:
            log.error(
                "prompts are prefilled densely, as the draft model %s is unavailable: %s",
                config.draft_model or "demo",
                error,
            )

    def record_replica_metadata(self) -> dict[str, Any]:
        """Return what every planner knows of this scorer without asking. Serve calls this once, at the start."""
        return {CODE: own_code()}

    async def score(self, request: ScoreRequest) -> Scored:
        """Score a prompt, see AsyncDraftScorer.score; cancelling the call stops the draft model.

        Raises Overloaded, ScoringTooSlow, InvalidRequest, EngineFailed.
        """
        return await self._scorer.score(replace(request, request_id=http_request_id() or request.request_id))

    async def status(self) -> dict[str, Any]:
        return {**replica_info(), "scorer": asdict(self._scorer.status())}

    async def check_health(self) -> None:
        self._scorer.check_health()

    async def __del__(self) -> None:
        """Shut the scorer down. Serve awaits this after the last open request."""
        if self._scorer is not None:
            await self._scorer.shutdown()


def _beside_engine() -> bool:
    """Tell whether an engine shares this node; without Ray it shares the process."""
    return not ray.is_initialized() or node_id() in nodes_offering("mlx")
