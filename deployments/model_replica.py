"""ModelReplica: the one process of a node that holds the weights, a thin door to engine.AsyncEngine."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import asdict
from typing import Any, TypeVar

from ray import serve

from deployments.chat import EngineAnswer
from deployments.draining import DRAIN_TIMEOUT_S, when_stopping
from deployments.replica import log_refusals_in_one_line, replica_info
from engine.config import EngineConfig
from engine.processing.checkpoint import resolve_checkpoint
from engine.processing.fingerprint import checkpoint_fingerprint
from engine.protocol import CacheCleared, CachedPrefix, CacheStatus, EngineRequest, TokenChunk, Unavailable

log = logging.getLogger("ray.serve")

T = TypeVar("T")

PROGRESS_PERIOD_S = 5.0

HEARTBEAT_PERIOD_S = 5.0
"""A stream says so often that the engine is alive when it has nothing else to say. See SILENCE_LIMIT_S of the readers,
in engine_stream.py: several heartbeats may be lost before a stream counts as lost."""

OTHER_MODEL_RETRY_S = 5.0
"""How long until all replicas of a deployment that is replaced serve the same checkpoint."""


@serve.deployment()
class ModelReplica:
    async def __init__(self, config: EngineConfig, drain_timeout_s: float = DRAIN_TIMEOUT_S):
        """Returns when the weights are in memory; until then Serve sends no request. Raises EngineFailed."""
        log_refusals_in_one_line()
        from engine.async_engine import AsyncEngine  # brings MLX, which no other process of the graph may hold

        self._engine = AsyncEngine(config)
        loaded = asyncio.ensure_future(self._engine.wait_ready())
        while not (await asyncio.wait({loaded}, timeout=PROGRESS_PERIOD_S))[0]:
            status = self._engine.status()
            log.info("%s %s: %.0f %%", status.state, config.model, 100 * status.load_progress)
        await loaded
        model_dir = await asyncio.to_thread(resolve_checkpoint, config.model, config.revision, weights=False)
        self._checkpoint = await asyncio.to_thread(checkpoint_fingerprint, model_dir)
        log.info("%s is loaded", config.model)
        self._stopping = when_stopping(lambda: self._engine.drain(drain_timeout_s))

    async def generate(self, request: EngineRequest) -> AsyncIterator[TokenChunk]:
        """See AsyncEngine.generate: one item per step, and heartbeats; closing it at any point frees the row.

        Raises Unavailable also when the prompt was tokenized for another checkpoint.
        """
        if request.checkpoint not in ("", self._checkpoint):
            other = "The model is being replaced: the prompt was prepared for another one. Please send it again."
            raise Unavailable(other, OTHER_MODEL_RETRY_S)
        chunks: Any = self._engine.generate(request, HEARTBEAT_PERIOD_S)
        async with aclosing(chunks):
            async for chunk in chunks:
                yield chunk

    async def status(self) -> dict[str, Any]:
        return {**replica_info(), "engine": asdict(self._engine.status())}

    async def cached_prefix(self, request: EngineRequest) -> CachedPrefix:
        """See AsyncEngine.cached_prefix. Raises EngineFailed when the engine is not ready."""
        return await self._engine.cached_prefix(request)

    async def cache_status(self) -> EngineAnswer[CacheStatus]:
        """Raises EngineFailed when the engine is not ready."""
        return _from_here(await self._engine.cache_status())

    async def clear_cache(self) -> EngineAnswer[CacheCleared]:
        """Raises EngineFailed when the engine is not ready."""
        return _from_here(await self._engine.clear_cache())

    async def check_health(self) -> None:
        self._engine.check_health()

    async def __del__(self) -> None:
        """Serve awaits it once the open requests are answered."""
        await self._engine.shutdown()


def _from_here(answer: T) -> EngineAnswer[T]:
    info = replica_info()
    return EngineAnswer(info["node_id"], info["replica_id"], answer)
