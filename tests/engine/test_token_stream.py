"""An engine that has nothing to say about a request says that it is alive, whatever keeps the request waiting. With
many requests it says several tokens at once."""

import asyncio
from typing import Any

import pytest

from engine import async_engine
from engine.protocol import HEARTBEAT, FinishReason, TokenChunk
from engine.token_stream import TokenStream
from tests.engine.test_async_engine import CountingRunner, request, run
from tests.support.fake_runner import until

PERIOD_S = 0.05


async def chunks_of(engine: Any, *arguments: Any, **options: Any) -> list[TokenChunk]:
    return [chunk async for chunk in engine.generate(request(*arguments, **options), PERIOD_S)]


def tokens(chunks: list[TokenChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def test_only_a_chunk_without_tokens_reason_or_counts_is_a_heartbeat():
    assert HEARTBEAT.is_heartbeat
    for chunk in (
        TokenChunk((0,)),
        TokenChunk((), FinishReason.STOP),
        TokenChunk((), FinishReason.ERROR, "broken"),
        TokenChunk((), num_drafted=3),
    ):
        assert not chunk.is_heartbeat


def test_a_queued_request_gets_heartbeats_and_then_its_own_tokens():
    async def test(engine: Any) -> None:
        first = asyncio.create_task(chunks_of(engine, "first", max_tokens=900))
        await until(lambda: engine.status().num_running == 1)
        queued = asyncio.create_task(chunks_of(engine, "queued", max_tokens=20))
        await until(lambda: engine.status().num_waiting == 1)
        await asyncio.sleep(6 * PERIOD_S)
        assert not queued.done()
        first.cancel()
        chunks = await queued
        assert chunks[0] == chunks[1] == HEARTBEAT and tokens(chunks) == list(range(20))
        assert chunks[-1].finish_reason is FinishReason.LENGTH

    run(test, CountingRunner(step_s=0.02), max_running=1)


def test_heartbeats_continue_while_a_step_hangs():
    runner = CountingRunner()

    async def test(engine: Any) -> None:
        stream = engine.generate(request(max_tokens=900), PERIOD_S)
        await anext(stream)
        runner.hold = 1.0  # on the device thread
        beats = 0
        while beats < 5:
            beats += (await anext(stream)).is_heartbeat
        runner.hold = 0.0
        await stream.aclose()

    run(test, runner)


def test_a_grammar_that_is_being_compiled_does_not_keep_heartbeats_back(monkeypatch: pytest.MonkeyPatch):
    async def test(engine: Any) -> None:
        compiled = asyncio.Event()

        async def compile_slowly(*arguments: Any) -> list[Any]:
            await compiled.wait()
            return []

        monkeypatch.setattr(engine._grammars, "matchers", compile_slowly)
        stream = engine.generate(request(max_tokens=3), PERIOD_S)
        assert [await anext(stream) for _ in range(3)] == [HEARTBEAT] * 3
        compiled.set()
        assert tokens([chunk async for chunk in stream]) == [0, 1, 2]

    run(test)


@pytest.mark.parametrize("ends", [True, False])
def test_a_failed_grammar_compile_after_heartbeats_ends_the_stream_and_leaves_no_state(
    ends: bool, monkeypatch: pytest.MonkeyPatch
):
    async def test(engine: Any) -> None:
        failing = asyncio.Event()

        async def fail(*arguments: Any) -> list[Any]:
            await failing.wait()
            raise ZeroDivisionError

        monkeypatch.setattr(engine._grammars, "matchers", fail)
        stream = engine.generate(request(), PERIOD_S)
        assert await anext(stream) == HEARTBEAT
        failing.set()
        if ends:
            with pytest.raises(ZeroDivisionError):
                await anext(stream)
        else:
            await asyncio.sleep(0.01)
            await stream.aclose()
        assert not engine._open.streams

    run(test)


def test_a_stream_closed_at_a_heartbeat_frees_its_row():
    async def test(engine: Any) -> None:
        stream = engine.generate(request(max_tokens=900), PERIOD_S)
        while not (await anext(stream)).is_heartbeat:
            pass
        await stream.aclose()
        await until(lambda: engine.status().num_running == 0)
        assert engine.status().num_aborted == 1

    run(test, CountingRunner(step_s=0.2))


def test_a_stream_with_tokens_to_deliver_has_no_heartbeats():
    async def test(engine: Any) -> None:
        chunks = [chunk async for chunk in engine.generate(request(max_tokens=50), 30.0)]
        assert tokens(chunks) == list(range(50)) and HEARTBEAT not in chunks

    run(test, CountingRunner(step_s=0.002))


def test_heartbeats_come_only_when_they_are_asked_for():
    async def test(engine: Any) -> None:
        chunks = [chunk async for chunk in engine.generate(request(max_tokens=3))]
        assert tokens(chunks) == [0, 1, 2] and HEARTBEAT not in chunks

    run(test, CountingRunner(step_s=0.3))


async def read(stream: TokenStream, gap_s: float, timeout_s: float | None = None) -> list[tuple[int, ...]]:
    return [chunk.token_ids for chunk in await stream.get(timeout_s, gap_s)]


def test_tokens_within_the_gap_come_together():
    async def test() -> None:
        stream, loop = TokenStream(1), asyncio.get_running_loop()
        stream.put(TokenChunk((0,)))
        read_at = loop.time()
        assert await read(stream, 0.2) == [(0,)]
        stream.put(TokenChunk((1,)))
        second = asyncio.create_task(read(stream, 0.0))
        await asyncio.sleep(0)
        stream.put(TokenChunk((2,)))
        assert await second == [(1, 2)]
        assert loop.time() >= read_at + 0.2
        stream.put(TokenChunk((3,)))
        assert await read(stream, 0.0) == [(3,)]

    asyncio.run(test())


def test_no_gap_delays_the_end_or_a_heartbeat():
    async def test() -> None:
        stream = TokenStream(2)
        stream.put(TokenChunk((0,)))
        assert await read(stream, 3600) == [(0,)]
        assert await read(stream, 3600, timeout_s=0.01) == []
        stream.put(TokenChunk((1,)))
        held = asyncio.create_task(read(stream, 3600))
        await asyncio.sleep(0.01)
        assert not held.done()
        stream.put(TokenChunk((2,), index=1))
        assert await held == [(1,), (2,)], "the other choice begins"
        stream.put(TokenChunk((3,), FinishReason.STOP))
        assert await read(stream, 3600) == [(3,)], "a choice ends"
        stream.put(TokenChunk((4,), index=1))
        assert await read(stream, 3600, timeout_s=0.01) == [(4,)], "no heartbeat in place of output"
        stream.end(FinishReason.ABORT)
        assert [chunk.finish_reason for chunk in await stream.get(None, 3600)] == [FinishReason.ABORT]

    asyncio.run(test())


def test_output_that_was_read_late_wakes_no_reader_again():
    async def test() -> None:
        stream, loop = TokenStream(1), asyncio.get_running_loop()
        stream.put(TokenChunk((0,)))
        assert await read(stream, 0.01) == [(0,)]
        read_at = loop.time()
        stream.put(TokenChunk((1,)))  # not yet due: a timer is set
        while loop.time() < read_at + 0.02:  # the loop is late
            pass
        assert await read(stream, 0.0) == [(1,)]
        following = asyncio.create_task(read(stream, 0.0))
        await asyncio.sleep(0.03)
        assert not following.done()
        stream.put(TokenChunk((2,)))
        assert await following == [(2,)]

    asyncio.run(test())


def test_an_answer_held_back_has_every_token_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(async_engine, "MESSAGE_S", 3600)
    monkeypatch.setattr(async_engine, "MAX_GAP_S", 3600)

    async def answer(engine: Any, i: int) -> list[TokenChunk]:
        return [chunk async for chunk in engine.generate(request(str(i), max_tokens=20 + i))]

    async def test(engine: Any) -> None:
        for i, chunks in enumerate(await asyncio.gather(*(answer(engine, i) for i in range(4)))):
            assert tokens(chunks) == list(range(20 + i)) and chunks[-1].finish_reason is FinishReason.LENGTH
            assert len(chunks) < 10, "held back from the step on in which a row decodes"

    run(test, CountingRunner(step_s=0.005), max_running=4)
