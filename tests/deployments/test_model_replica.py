"""What a ModelReplica adds to the engine's answers: where they come from."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, ClassVar

import numpy as np
import pytest

from deployments import model_replica
from deployments.chat import ChatRequest, EngineAnswer
from deployments.engine_stream import SILENCE_LIMIT_S
from deployments.model_replica import ModelReplica
from deployments.planning import PromptPlanner
from engine import async_engine
from engine.config import EngineConfig
from engine.protocol import (
    HEARTBEAT,
    CacheCleared,
    CachedPrefix,
    CacheStatus,
    EngineFailed,
    EngineRequest,
    FinishReason,
    SamplingParams,
    TokenChunk,
    Unavailable,
)

STATUS = CacheStatus(max_bytes=1000, num_bytes=100)
CLEARED = CacheCleared(3, 100, 2)


class CachingEngine:
    """An engine of which nothing is there but its cache. error: what is raised instead of an answer."""

    error: Exception | None = None
    drained_for: ClassVar[list[float]] = []

    def __init__(self, config: EngineConfig):
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

    async def generate(self, request: EngineRequest, heartbeat_period_s: float | None) -> AsyncIterator[TokenChunk]:
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


def test_the_state_of_the_cache_comes_with_the_place_of_the_engine():
    assert ask(lambda replica: replica.cache_status()) == EngineAnswer("n", "r", STATUS)


def test_what_was_cleared_comes_with_the_place_of_the_engine():
    assert ask(lambda replica: replica.clear_cache()) == EngineAnswer("n", "r", CLEARED)


def test_the_engine_is_asked_what_it_has_of_a_prompt():
    request = EngineRequest("r", np.zeros(3, np.int32), SamplingParams(8), (2,))
    assert ask(lambda replica: replica.cached_prefix(request)) == CachedPrefix(3)


async def chunks_of(replica: Any, request: EngineRequest) -> list[TokenChunk]:
    return [chunk async for chunk in replica.generate(request)]


def test_the_engine_says_that_it_is_alive_and_what_it_says_is_passed_on():
    request = EngineRequest("r", np.zeros(3, np.int32), SamplingParams(8), (2,))
    assert ask(lambda replica: chunks_of(replica, request)) == [HEARTBEAT, TokenChunk((1,), FinishReason.STOP)]


def test_a_prompt_that_was_made_for_another_checkpoint_is_refused_for_a_while():
    request = EngineRequest("r", np.zeros(3, np.int32), SamplingParams(8), (2,), checkpoint="another")
    with pytest.raises(Unavailable, match="The model is being replaced") as error:
        ask(lambda replica: chunks_of(replica, request))
    assert error.value.retry_after_s >= 1


def test_a_prompt_that_was_made_for_this_checkpoint_is_not_refused():
    planner = PromptPlanner(EngineConfig())
    message = {"role": "user", "content": "What is 12 + 30?"}

    async def go(replica: Any) -> list[TokenChunk]:
        request = await planner.engine_request(ChatRequest("r", (message,)), [message])
        assert request.checkpoint != ""
        return await chunks_of(replica, request)

    assert ask(go)[-1].finish_reason is FinishReason.STOP


def test_an_engine_that_has_failed_says_so(engine: type[CachingEngine]):
    engine.error = EngineFailed("the engine is not ready: it is loading")
    with pytest.raises(EngineFailed, match="it is loading"):
        ask(lambda replica: replica.cache_status())
    with pytest.raises(EngineFailed, match="it is loading"):
        ask(lambda replica: replica.clear_cache())


def test_an_engine_whose_replica_is_stopped_gets_as_long_as_the_configuration_says(
    engine: type[CachingEngine], monkeypatch: pytest.MonkeyPatch
):
    acts: list[Callable[[], Coroutine[Any, Any, None]]] = []
    monkeypatch.setattr(model_replica, "when_stopping", acts.append)

    async def go() -> None:
        replica: Any = Replica.__new__(Replica)
        await replica.__init__(EngineConfig(), 7.5)
        (stop,) = acts
        assert engine.drained_for == []
        await stop()

    asyncio.run(go())
    assert engine.drained_for == [7.5]
