"""The pinned prompts of an engine, prefilled before it is ready."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from engine.config import EngineConfig
from engine.errors import EngineFailed
from engine.processing.checkpoint import resolve_checkpoint
from engine.processing.pinned import pinned_requests
from engine.processing.tokenizer import ChatTokenizer
from engine.protocol import EngineRequest, TokenChunk
from engine.start_phase import StartPhase
from engine.status import CacheStatus, EngineCounters

log = logging.getLogger("orchard.engine")


class PinnedPrompts:
    """The prompts of `prefix_cache.pinned`.

    Args:
        config: The engine's configuration.
        generate: AsyncEngine.generate.
        cache_status: AsyncEngine.cache_status.
    """

    def __init__(
        self,
        config: EngineConfig,
        generate: Callable[[EngineRequest], AsyncIterator[TokenChunk]],
        cache_status: Callable[[], Awaitable[CacheStatus]],
    ):
        self._config = config
        self._generate = generate
        self._cache_status = cache_status
        self._requests: list[EngineRequest] = []

    async def render(self) -> None:
        """Render and tokenize the prompts."""
        self._requests = await asyncio.to_thread(self._render)

    def _render(self) -> list[EngineRequest]:
        tokenizer = ChatTokenizer(resolve_checkpoint(self._config.model, self._config.revision, weights=False))
        return pinned_requests(self._config.prefix_cache.pinned, tokenizer)

    async def prefill(self) -> None:
        """Prefill the prompts, one after the other.

        Raises:
            EngineFailed: The system part of one is not pinned afterwards.
        """
        with StartPhase("warming pinned prompts") as phase:
            for i, request in enumerate(self._requests):
                phase.progress = i / len(self._requests)
                await self._prefill(request)
                num_tokens = len(request.token_ids)
                log.info("pinned prompt %d of %d is prefilled: %d tokens", i + 1, len(self._requests), num_tokens)

    async def _prefill(self, request: EngineRequest) -> None:
        chunks = [chunk async for chunk in self._generate(request)]
        status = await self._cache_status()
        if not any(entry.pinned and entry.num_tokens == len(request.token_ids) - 1 for entry in status.entries):
            refused = (
                f"{status.num_rejected} snapshots were rejected; the limit of the cache is {status.max_bytes} bytes "
                "(prefix_cache.max_gb)"
            )
            reason = chunks[-1].error or status.off_reason or refused
            raise EngineFailed(f"{request.request_id} ({len(request.token_ids)} tokens) cannot be pinned: {reason}")

    def progress(self, stats: EngineCounters) -> float:
        """Return the part of the prompts' tokens that is prefilled, 0 to 1."""
        num_tokens = sum(len(request.token_ids) for request in self._requests)
        return min(1.0, (stats.num_prompt_tokens + stats.num_cached_tokens) / num_tokens)
