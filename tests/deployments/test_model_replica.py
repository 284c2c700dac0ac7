"""A ModelReplica adds to the engine's answers where they come from."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from deployments import model_replica
from deployments.dispatch.engine_stream import SILENCE_LIMIT_S
from deployments.model_replica import ModelReplica
from deployments.planners.prompt_planner import PromptPlanner
from deployments.requests import ChatRequest, EngineAnswer
from engine import async_engine
from engine.config import EngineConfig
from engine.errors import EngineFailed, Unavailable
from engine.protocol import HEARTBEAT, CachedPrefix, EngineRequest, FinishReason, GroupEnds, SamplingParams, TokenChunk
from engine.snapshot_store.exchange import Sharing
from engine.status import CacheCleared, CacheStatus

STATUS = CacheStatus(max_bytes=1000, num_bytes=100)
CLEARED = CacheCleared(3, 100, 2)


class CachingEngine:
    """An engine of which nothing is there but its cache. error: what is raised instead of an answer."""

    error: Exception | None = None
    num_open_choices = 0
    drained_for: ClassVar[list[float]] = []

    def __init__(self, config: EngineConfig, sharing: Sharing | None):
        self.config = config

    async def drain(self, timeout_s: float) -> None:
        self.drained_for.append(timeout_s)

    async def wait_ready(self) -> None:
        pass

    async def cache_status(self) -> CacheStatus:
        if self.error is not None:
            raise self.error
        return STATUS

    async def cached_prefix(self, request: EngineRequest) -> CachedPrefix:
        return CachedPrefix(len(request.token_ids))

    async def generate(
        self, request: EngineRequest, heartbeat_period_s: float | None = None
    ) -> AsyncIterator[TokenChunk]:
        if heartbeat_period_s is not None:
            assert heartbeat_period_s == model_replica.HEARTBEAT_PERIOD_S <= SILENCE_LIMIT_S / 3, "some may be lost"
            yield HEARTBEAT
        yield TokenChunk((1,), FinishReason.STOP)

    async def clear_cache(self) -> CacheCleared:
        if self.error is not None:
            raise self.error
        return CLEARED


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> type[CachingEngine]:
    class Engine(CachingEngine):
        drained_for: ClassVar[list[float]] = []

    monkeypatch.setattr(async_engine, "AsyncEngine", Engine)
    monkeypatch.setattr(model_replica, "node_id", lambda: "n")
    monkeypatch.setattr(model_replica, "replica_info", lambda: {"node_id": "n", "replica_id": "r", "pid": 7})
    return Engine


MODEL_REPLICA: Any = ModelReplica.func_or_class


class Replica(MODEL_REPLICA):
    def __del__(self) -> None:
        """Serve awaits the one of ModelReplica; here nobody does."""


def ask(question: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
    async def go() -> Any:
        replica: Any = Replica.__new__(Replica)
        await replica.__init__(EngineConfig())
        return await question(replica)

    return asyncio.run(go())


def test_cache_status_comes_with_node_and_replica_id():
    assert ask(lambda replica: replica.cache_status()) == EngineAnswer("n", "r", STATUS)


def test_clear_cache_result_comes_with_node_and_replica_id():
    assert ask(lambda replica: replica.clear_cache()) == EngineAnswer("n", "r", CLEARED)


def test_cached_prefix_of_a_prompt_comes_from_the_engine():
    request = EngineRequest("r", np.zeros(3, np.int32), SamplingParams(8), (2,))
    assert ask(lambda replica: replica.cached_prefix(request)) == CachedPrefix(3)


async def chunks_of(replica: Any, request: EngineRequest) -> list[TokenChunk]:
    return [chunk async for chunk in replica.generate(request)]


def test_heartbeats_and_chunks_of_the_engine_are_passed_on():
    request = EngineRequest("r", np.zeros(3, np.int32), SamplingParams(8), (2,))
    assert ask(lambda replica: chunks_of(replica, request)) == [HEARTBEAT, TokenChunk((1,), FinishReason.STOP)]


def test_prompt_of_another_checkpoint_is_refused_with_a_retry_after():
    request = EngineRequest("r", np.zeros(3, np.int32), SamplingParams(8), (2,), checkpoint="another")
    with pytest.raises(Unavailable, match="The model is being replaced") as error:
        ask(lambda replica: chunks_of(replica, request))
    assert error.value.retry_after_s >= 1


def test_the_ends_of_a_group_come_from_the_engine_and_prompts_of_another_checkpoint_are_refused():
    requests = [
        EngineRequest(f"r-{i}", np.zeros(3, np.int32), SamplingParams(1), (), checkpoint=name)
        for i, name in enumerate(("", "another"))
    ]

    async def group(replica: Any, requests: Sequence[EngineRequest]) -> list[GroupEnds]:
        return [message async for message in replica.generate_group(requests, 4)]

    [found] = ask(lambda replica: group(replica, requests[:1]))
    assert found == GroupEnds(((0, TokenChunk((1,), FinishReason.STOP)),))
    with pytest.raises(Unavailable, match="The model is being replaced"):
        ask(lambda replica: group(replica, requests))


def test_prompt_of_the_same_checkpoint_is_answered():
    planner = PromptPlanner(EngineConfig())
    message = {"role": "user", "content": "What is 12 + 30?"}

    async def go(replica: Any) -> list[TokenChunk]:
        request = await planner.engine_request(ChatRequest("r", (message,)), [message])
        assert request.checkpoint != ""
        return await chunks_of(replica, request)

    assert ask(go)[-1].finish_reason is FinishReason.STOP


def test_cache_calls_to_a_failed_engine_raise_its_error(engine: type[CachingEngine]):
    engine.error = EngineFailed("the engine is not ready: it is loading")
    with pytest.raises(EngineFailed, match="it is loading"):
        ask(lambda replica: replica.cache_status())
    with pytest.raises(EngineFailed, match="it is loading"):
        ask(lambda replica: replica.clear_cache())


def test_stopped_replica_drains_its_engine_for_the_configured_time(
    engine: type[CachingEngine], monkeypatch: pytest.MonkeyPatch
):
    acts: list[Callable[[], Coroutine[Any, Any, None]]] = []
    monkeypatch.setattr(model_replica, "on_stop", acts.append)

    async def go() -> None:
        replica: Any = Replica.__new__(Replica)
        await replica.__init__(EngineConfig(), 7.5)
        (stop,) = acts
        assert engine.drained_for == []
        await stop()

    asyncio.run(go())
    assert engine.drained_for == [7.5]
