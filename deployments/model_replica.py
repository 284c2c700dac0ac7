"""ModelReplica: a thin deployment over AsyncEngine; the only process of a node that holds the weights."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import Any, TypeVar

from ray import serve

from deployments.calls.population import CODE, own_code
from deployments.dispatch.placer import FACTS
from deployments.draining import DRAIN_TIMEOUT_S, on_stop
from deployments.engine_ids import ENGINE_ID, engine_ids, number_of
from deployments.own_share import claim_share
from deployments.process import in_replica, node_id, replica_info
from deployments.ray_internals import by_reference, http_request_id, listen_on_node_address
from deployments.requests import EngineAnswer
from deployments.serve_log import join_serve_log
from deployments.snapshot_sharing import sharing_of
from deployments.status.ray_mirror import RayMirror, mirror_to_ray
from engine import retry_after
from engine.config import EngineConfig
from engine.errors import EngineFailed, Unavailable
from engine.placement import MovableSnapshot, Question, Quote, TakenOver
from engine.processing.checkpoint import resolve_checkpoint
from engine.processing.fingerprint import checkpoint_fingerprint
from engine.protocol import CachedPrefix, EngineRequest, GroupEnds, TokenChunk
from engine.request_group import generate_group
from engine.status import CacheCleared, CacheStatus
from engine.timeline import RowTimeline

log = logging.getLogger("ray.serve")

T = TypeVar("T")

HEARTBEAT_PERIOD_S = 5.0
"""Interval of the heartbeats of a stream without tokens. Readers tolerate several missing ones, see SILENCE_LIMIT_S in
engine_stream.py."""


@by_reference
@serve.deployment()
class ModelReplica:
    """The engine's replica: one AsyncEngine, and the fingerprint of its checkpoint.

    A node has one, or one per GPU.
    """

    _engine: Any = None
    """The AsyncEngine; None until it loads; Serve calls `__del__` also in a replica that is stopped before."""

    async def __init__(
        self,
        config: EngineConfig,
        drain_timeout_s: float = DRAIN_TIMEOUT_S,
        model_name: str | None = None,
        num_without_resources: int = 1,
    ):
        """Load the model; Serve sends no requests until then. Raises EngineFailed.

        Args:
            config: The engine's configuration.
            drain_timeout_s: How long open requests may take when the replica is stopped.
            model_name: Name under which the model is served; None: as in the configuration.
            num_without_resources: Engines of the only node of a cluster without resources.
        """
        listen_on_node_address()
        join_serve_log()
        share, self._number = await claim_share(num_without_resources)
        self._engine_id = engine_ids(node_id(), share.num_engines)[share.number]
        share.take_gpu(config.device)
        config, of_all = share.of(config), config
        from engine.async_engine import AsyncEngine  # imports MLX, which no other process of the graph may load

        self._engine = AsyncEngine(config, sharing=sharing_of(config, is_alone=share.num_engines == 1))
        try:
            await self._engine.wait_ready()
        except EngineFailed as error:
            if (reason := share.explained(str(error), of_all)) == str(error):
                raise
            raise EngineFailed(reason) from error
        model_dir = await asyncio.to_thread(resolve_checkpoint, config.model, config.revision, weights=False)
        self._checkpoint = await asyncio.to_thread(checkpoint_fingerprint, model_dir)
        log.info("%s is loaded", config.model)
        self._stopping = on_stop(lambda: self._engine.drain(drain_timeout_s))
        mirror = RayMirror(model_name or config.model, engine_number=number_of(self._engine_id))
        self._mirroring = asyncio.ensure_future(mirror_to_ray(self._engine, mirror)) if in_replica() else None

    async def generate(self, request: EngineRequest) -> AsyncIterator[TokenChunk]:
        """Yield chunks, each of one or more steps, and heartbeats; see AsyncEngine.generate. Closing it frees the rows.

        Raises:
            Unavailable: The prompt was tokenized for another checkpoint, or see AsyncEngine.generate.
        """
        self._check_checkpoint(request)
        request = replace(request, http_request_id=http_request_id())
        chunks: Any = self._engine.generate(request, HEARTBEAT_PERIOD_S)
        async with aclosing(chunks):
            async for chunk in chunks:
                yield chunk

    async def generate_group(
        self, requests: Sequence[EngineRequest], num_parallel: int, max_open: int | None = None
    ) -> AsyncIterator[GroupEnds]:
        """Yield the ends of requests with one result each, and heartbeats; see engine.request_group.

        Raises:
            Unavailable: The prompts were tokenized for another checkpoint.
        """
        for request in requests:
            self._check_checkpoint(request)
        http_id = http_request_id()
        named = [replace(request, http_request_id=http_id) for request in requests]
        messages: Any = generate_group(self._engine, named, num_parallel, HEARTBEAT_PERIOD_S, max_open)
        async with aclosing(messages):
            async for message in messages:
                yield message

    async def quote(self, question: Question) -> Quote:
        """Predict when the first token of a request would come here, see AsyncEngine.quote."""
        return self._engine.quote(question)

    async def book(self, question: Question) -> Quote | None:
        """Count a request as on its way; None if it is booked, else what has changed. See AsyncEngine.book."""
        return self._engine.book(question)

    def record_replica_metadata(self) -> dict[str, Any]:
        """Return what every ingress knows of this engine without asking. Serve calls this once, at the start."""
        return {FACTS: self._engine.placement_facts(), CODE: own_code(), ENGINE_ID: self._engine_id}

    async def status(self) -> dict[str, Any]:
        """Return the entry of this engine in `/v1/status`."""
        return {
            **replica_info(),
            ENGINE_ID: self._engine_id,
            "population": own_code()["population"],
            "engine": asdict(self._engine.status()),
        }

    async def figures(self) -> dict[str, Any]:
        """Return the figures for metrics, see AsyncEngine.figures."""
        return {"node_id": node_id(), ENGINE_ID: self._engine_id, "figures": self._engine.figures()}

    async def timelines(self, request_id: str) -> tuple[RowTimeline, ...]:
        """Return the timelines of a request's choices that have ended lately, see EndedRows."""
        return self._engine.ended.of_request(request_id)

    async def cached_prefix(self, request: EngineRequest) -> CachedPrefix:
        """Look up the cached prefix of a prompt, see AsyncEngine.cached_prefix. Raises EngineFailed if not ready."""
        return await self._engine.cached_prefix(request)

    async def cache_status(self) -> EngineAnswer[CacheStatus]:
        """Return the state of the prefix cache. Raises EngineFailed if the engine is not ready."""
        return self._answer(await self._engine.cache_status())

    async def clear_cache(self) -> EngineAnswer[CacheCleared]:
        """Clear the prefix cache except pinned entries. Raises EngineFailed if the engine is not ready."""
        return self._answer(await self._engine.clear_cache())

    async def leave(self) -> EngineAnswer[None]:
        """End all open requests so that other engines go on with them, and take no new ones; see AsyncEngine.move_all.

        Raises:
            EngineFailed: The engine is not ready.
        """
        log.info("this engine is drained: its answers go on elsewhere")
        return self._answer(await self._engine.move_all())

    async def is_drained(self) -> EngineAnswer[bool]:
        """Tell whether the engine takes no requests since `leave`."""
        return self._answer(self._engine.has_left)

    async def come_back(self) -> EngineAnswer[None]:
        """Take new requests again after `leave`."""
        log.info("this engine is no longer drained")
        return self._answer(self._engine.take_requests())

    async def movable_snapshots(
        self, max_snapshots: int, shared_only: bool = False
    ) -> EngineAnswer[tuple[MovableSnapshot, ...]]:
        """Return the snapshots that other engines should take over, see SnapshotTakeOver.offered."""
        return self._answer(await self._engine.take_over.offered(max_snapshots, shared_only))

    async def take_over(
        self, address: str, snapshots: Sequence[MovableSnapshot], timeout_s: float
    ) -> EngineAnswer[TakenOver]:
        """Fetch what an engine hands over that leaves, see SnapshotTakeOver.take."""
        return self._answer(await self._engine.take_over.take(address, snapshots, timeout_s))

    async def movable_conversation(self, conversation: int) -> EngineAnswer[MovableSnapshot | None]:
        """Return the last snapshot of a conversation, see SnapshotTakeOver.of_conversation."""
        return self._answer(await self._engine.take_over.of_conversation(conversation))

    async def copy(self, address: str, snapshot: MovableSnapshot, timeout_s: float) -> EngineAnswer[TakenOver]:
        """Fetch a copy of a conversation, see SnapshotTakeOver.copy."""
        return self._answer(await self._engine.take_over.copy(address, snapshot, timeout_s))

    async def warm_up(self, sources: Sequence[tuple[str, Sequence[MovableSnapshot]]]) -> EngineAnswer[None]:
        """Begin to fetch what other engines share, see SnapshotTakeOver.warm_up."""
        return self._answer(self._engine.take_over.warm_up(sources))

    def _check_checkpoint(self, request: EngineRequest) -> None:
        if request.checkpoint not in ("", self._checkpoint):
            other = "The model is being replaced: the prompt was tokenized for another one. Please send it again."
            raise Unavailable(other, retry_after.REPLACED_S)

    def _answer(self, answer: T) -> EngineAnswer[T]:
        return EngineAnswer(self._engine_id, replica_info()["replica_id"], answer)

    async def check_health(self) -> None:
        self._engine.check_health()

    async def __del__(self) -> None:
        """Shut the engine down. Serve awaits this after the last open request."""
        if self._engine is not None:
            await self._engine.shutdown()
