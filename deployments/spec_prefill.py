"""SpecPrefillScorer: the one process of a node that holds the draft model, a thin door to engine.AsyncDraftScorer."""

import asyncio
import logging
from dataclasses import asdict
from typing import Any

import ray
from ray import serve

from deployments.policies import nodes_offering
from deployments.replica import log_refusals_in_one_line, node_id, replica_info
from engine.config import EngineConfig, SpecPrefillConfig
from engine.core.spec_prefill.plan import Scored, ScoreRequest
from engine.protocol import EngineFailed

log = logging.getLogger("ray.serve")


@serve.deployment()
class SpecPrefillScorer:
    """A draft that cannot be loaded, or cannot score, is no reason to restart it: it goes on without, and says so."""

    async def __init__(self, config: SpecPrefillConfig, target: EngineConfig):
        """Returns when the draft can score, or when it is known why it never will."""
        log_refusals_in_one_line()
        from engine.draft_scorer import AsyncDraftScorer  # brings MLX

        self._scorer = AsyncDraftScorer(config, target, await asyncio.to_thread(_beside_engine))
        try:
            await self._scorer.wait_ready()
            log.info("the draft model %s is loaded", config.draft_model or "demo")
        except EngineFailed as error:
            log.error(
                "prompts are taken in densely, as the draft model %s is unavailable: %s",
                config.draft_model or "demo",
                error,
            )

    async def score(self, request: ScoreRequest) -> Scored:
        """See AsyncDraftScorer.score: cancelling stops the draft. Raises Overloaded, InvalidRequest, EngineFailed."""
        return await self._scorer.score(request)

    async def status(self) -> dict[str, Any]:
        return {**replica_info(), "scorer": asdict(self._scorer.status())}

    async def check_health(self) -> None:
        self._scorer.check_health()

    async def __del__(self) -> None:
        """Serve awaits it once the open requests are answered."""
        await self._scorer.shutdown()


def _beside_engine() -> bool:
    """Whether an engine runs on this node as well; without Ray it is in this very process."""
    return not ray.is_initialized() or node_id() in nodes_offering("mlx")
