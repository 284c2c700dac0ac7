"""Groups of requests with one result each: how many are open at once, order, errors, and what a cancellation frees."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.errors import ContextLengthExceeded, EngineFailed, InvalidRequest, OrchardError
from engine.protocol import EngineRequest, FinishReason, GroupEnds, SamplingParams, TokenChunk
from engine.request_group import generate_group
from tests.support.cold_runner import load_cold
from tests.support.fake_runner import until


def ids(start: int, end: int) -> np.ndarray:
    return np.arange(start, end, dtype=np.int32)


def text(index: int, num_tokens: int = 3) -> EngineRequest:
    return EngineRequest(f"r-{index}", np.full(num_tokens, 5, np.int32), SamplingParams(1), (), pooling="last")


class HeldEngine:
    """An engine whose requests end when the test says so.

    Attributes:
        open: Requests without an end, by id.
        most: Most requests that were open at once.
        num_others: Choices of other requests.
    """

    def __init__(self, **config: Any):
        self.config = EngineConfig(**config)
        self.open: dict[str, asyncio.Future[TokenChunk]] = {}
        self.begun: list[EngineRequest] = []
        self.most = self.num_others = 0

    @property
    def num_open_choices(self) -> int:
        return len(self.open) + self.num_others

    async def generate(self, request: EngineRequest) -> AsyncIterator[TokenChunk]:
        self.open[request.request_id] = asyncio.get_running_loop().create_future()
        self.begun.append(request)
        self.most = max(self.most, len(self.open))
        try:
            yield await self.open[request.request_id]
        finally:
            del self.open[request.request_id]

    def end(self, index: int, error: Exception | None = None) -> None:
        end = self.open[f"r-{index}"]
        if error is not None:
            end.set_exception(error)
        else:
            end.set_result(TokenChunk((), FinishReason.STOP, embedding=b"%d" % index))


async def read(
    engine: HeldEngine, requests: list[EngineRequest], num_parallel: int = 4, max_open: int | None = None
) -> dict[int, Any]:
    """All ends of a group; whatever is open ends, the last one first, once nothing else begins."""
    found: dict[int, Any] = {}

    async def answer() -> None:
        while True:
            await asyncio.sleep(0.001)
            for request_id in sorted(engine.open, key=lambda one: -int(one[2:])):
                if not engine.open[request_id].done():
                    engine.end(int(request_id[2:]))

    answering = asyncio.ensure_future(answer())
    try:
        async with asyncio.timeout(60):
            async for message in generate_group(engine, requests, num_parallel, 5.0, max_open):
                assert not message.is_heartbeat
                found |= dict(message.ends)
    finally:
        answering.cancel()
    return found


def test_each_request_ends_once_under_its_index():
    found = asyncio.run(read(HeldEngine(), [text(i) for i in range(40)]))
    assert {index: end.embedding for index, end in found.items()} == {i: b"%d" % i for i in range(40)}


@pytest.mark.parametrize(
    ("num_others", "num_tokens", "most"),
    [
        (0, 3, 16),  # half of max_running
        (10, 3, 6),
        (13, 3, 4),  # num_parallel
        (500, 3, 4),
        (0, 300, 6),  # 2048 tokens, those of a step
        (0, 5000, 4),
    ],
)
def test_an_idle_engine_takes_a_steps_worth_and_a_busy_one_what_the_request_counts_for(num_others, num_tokens, most):
    engine = HeldEngine(max_running=32, prefill_chunk_tokens=2048)
    engine.num_others = num_others
    found = asyncio.run(read(engine, [text(i, num_tokens) for i in range(40)]))
    assert (len(found), engine.most) == (40, most)


@pytest.mark.parametrize(("max_queue", "most"), [(0, 4), (6, 6), (100, 16)])
def test_what_a_request_does_not_count_for_fits_beside_the_queue(max_queue, most):
    """Choices beyond max_running + max_queue are refused; the ingress has promised room for those that are counted."""
    engine = HeldEngine(max_running=32, max_queue=max_queue, prefill_chunk_tokens=2048)
    asyncio.run(read(engine, [text(i) for i in range(40)]))
    assert engine.most == most


@pytest.mark.parametrize("max_open", [1, 3, 8])
def test_an_idle_engine_takes_no_more_at_once_than_the_limit_of_the_requests_key(max_open):
    engine = HeldEngine(max_running=32, prefill_chunk_tokens=2048)
    found = asyncio.run(read(engine, [text(i) for i in range(40)], min(4, max_open), max_open))
    assert (len(found), engine.most) == (40, max_open)


def test_the_time_in_the_group_counts_as_spent_before_the_engine():
    engine = HeldEngine(max_running=1)
    asyncio.run(read(engine, [text(0), text(1)], num_parallel=1))
    first, second = engine.begun
    assert second.spent_s - first.spent_s >= 0.001


@pytest.mark.parametrize("num_parallel", [1, 4])
def test_an_error_is_the_end_of_its_request_and_cancels_the_others(num_parallel):
    async def go() -> None:
        engine, messages = HeldEngine(max_running=1), list[GroupEnds]()

        async def reading() -> None:
            async for message in generate_group(engine, [text(i) for i in range(9)], num_parallel, 60.0):
                messages.append(message)

        task = asyncio.ensure_future(reading())
        await until(lambda: len(engine.open) == num_parallel)
        engine.end(0, InvalidRequest("no", "messages"))
        await task
        [message] = messages
        [(index, error)] = message.ends
        assert (index, str(error)) == (0, "no") and isinstance(error, OrchardError)
        assert not engine.open and len(engine.begun) == num_parallel

    asyncio.run(go())


def test_an_unexpected_error_is_raised_and_a_request_without_an_end_is_a_failure():
    async def go(error: Exception | None) -> list[GroupEnds]:
        engine = HeldEngine()
        reading = asyncio.ensure_future(all_of(generate_group(engine, [text(0), text(1)], 2, 60.0)))
        await until(lambda: len(engine.open) == 2)
        if error is not None:
            engine.end(1, error)
        else:
            engine.open["r-1"].set_result(TokenChunk((7,)))
        try:
            return await reading
        finally:
            assert not engine.open

    with pytest.raises(ZeroDivisionError):
        asyncio.run(go(ZeroDivisionError()))
    [message] = asyncio.run(go(None))
    [(index, error)] = message.ends
    assert index == 1 and isinstance(error, EngineFailed)


async def all_of(messages: AsyncIterator[GroupEnds]) -> list[GroupEnds]:
    return [message async for message in messages]


def test_heartbeats_come_while_nothing_ends_and_closing_frees_all_rows():
    async def go() -> None:
        engine = HeldEngine()
        messages: Any = generate_group(engine, [text(i) for i in range(6)], 2, 0.01)
        async with asyncio.timeout(60), aclosing(messages):
            assert (await anext(messages)).is_heartbeat
            assert (await anext(messages)).is_heartbeat
            assert len(engine.open) == 6
        assert not engine.open

    asyncio.run(go())


def test_a_real_engine_gives_a_group_the_embeddings_of_its_texts_alone_bit_for_bit():
    """The demo model, a decoder with recurrent layers, in float32; texts of 1 to 16 tokens, which are not divided."""

    async def go() -> None:
        engine = AsyncEngine(EngineConfig(dtype="float32"), lambda config, progress: load_cold(config))
        try:
            await engine.wait_ready()
            requests = [
                EngineRequest(f"r-{i}", ids(5 + i, 6 + i + i % 16), SamplingParams(1), (), pooling=how)
                for i, how in enumerate(("last", "mean") * 24)
            ]
            alone = [[chunk async for chunk in engine.generate(one)][-1].embedding for one in requests]
            found: dict[int, Any] = {}
            async for message in generate_group(engine, requests, 4, 5.0):
                found |= dict(message.ends)
            assert [found[i].embedding for i in range(len(requests))] == alone and None not in alone
            too_long = EngineRequest("long", np.zeros(10**6, np.int32), SamplingParams(1), (), pooling="last")
            *_, last = [message async for message in generate_group(engine, [requests[0], too_long], 1, 5.0)]
            assert last.ends[-1][0] == 1 and isinstance(last.ends[-1][1], ContextLengthExceeded)
            assert engine.num_open_choices == 0
        finally:
            await engine.shutdown()

    asyncio.run(go())
