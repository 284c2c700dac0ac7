"""AsyncEngine: streams, limits, failures, the end."""

import asyncio
import re
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np
import pytest

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.core import progress
from engine.core.runner import PLAIN, PrefillOutput, RowOutput, StepTime
from engine.errors import ContextLengthExceeded, EngineFailed, InvalidRequest, Overloaded, Unavailable
from engine.protocol import EngineRequest, FinishReason, ImagePatches, SamplingParams
from tests.support.fake_runner import NoSnapshots, run_engine, until
from tests.support.faults import Hanging


class CountingRunner(NoSnapshots):
    """Every row gets 0, 1, 2, ...; a step takes `step_s`."""

    max_context_tokens, vocab_size, num_embeddings, capabilities = 1000, 100, 100, {"media": []}

    def __init__(self, step_s: float = 0.0):
        self.step_s, self.next, self.hold, self.closed = step_s, {}, 0.0, False

    def decode(self, drafts=PLAIN):
        time.sleep(self.step_s + self.hold)
        outputs = {row: RowOutput((n,)) for row, n in self.next.items()}
        self.next = {row: n + 1 for row, n in self.next.items()}
        return outputs

    def prefill(self, rows, max_tokens):
        self.next.update({row.id: 1 for row in rows})
        return PrefillOutput(rows[0].num_tokens, {row.id: RowOutput((0,)) for row in rows})

    def reset(self):
        self.next.clear()

    def drop(self, row_ids, lent=None):
        for row_id in row_ids:
            self.next.pop(row_id, None)

    def memory(self):
        return {"rows": len(self.next)}

    def close(self):
        self.closed = True


def request(request_id: str = "r", max_tokens: int = 10, num_prompt: int = 3) -> EngineRequest:
    return EngineRequest(request_id, np.zeros(num_prompt, np.int32), SamplingParams(max_tokens), ())


def run(test: Callable[[AsyncEngine], Awaitable], runner: CountingRunner | None = None, **config) -> None:
    run_engine(test, runner or CountingRunner(), config)


async def collect(engine: AsyncEngine, r: EngineRequest) -> list[int]:
    return [token async for chunk in engine.generate(r) for token in chunk.token_ids]


class PatientRunner(CountingRunner):
    """No step ends before the first token has come to the client."""

    def __init__(self):
        super().__init__(step_s=0.002)
        self.first_has_come = threading.Event()

    def decode(self, drafts=PLAIN):
        assert self.first_has_come.wait(60), "the first token waits for the second"
        return super().decode(drafts)


def test_tokens_come_once_and_in_order_and_the_first_alone():
    runner = PatientRunner()

    async def test(engine):
        chunks = []
        async for chunk in engine.generate(request(max_tokens=50)):
            chunks.append(chunk)
            runner.first_has_come.set()
        assert [t for c in chunks for t in c.token_ids] == list(range(50))
        assert [c.finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1].finish_reason is FinishReason.LENGTH
        assert chunks[0].token_ids == (0,)

    run(test, runner)


def test_concurrent_streams_each_get_their_own_tokens():
    async def test(engine):
        results = await asyncio.gather(*(collect(engine, request(f"r{i}", 10 + i)) for i in range(20)))
        assert results == [list(range(10 + i)) for i in range(20)]
        assert engine.status().num_running == 0

    run(test, max_running=8)


def test_requests_that_cannot_be_served_are_refused_with_the_numbers():
    async def test(engine):
        with pytest.raises(ContextLengthExceeded, match=r"1000 tokens.*1001.*991.*10"):
            await collect(engine, request(num_prompt=991))
        with pytest.raises(InvalidRequest, match="0 tokens"):
            await collect(engine, request(num_prompt=0))
        stream = engine.generate(request(max_tokens=900))
        await anext(stream)
        with pytest.raises(InvalidRequest, match="in use"):
            await collect(engine, request())
        await stream.aclose()
        assert await collect(engine, request()) == list(range(10)), "the engine lives on"

    run(test, CountingRunner(step_s=0.002))


def test_a_full_queue_refuses_with_the_limit_and_accepts_again_after_cancellations():
    async def test(engine):
        streams = [engine.generate(request(f"r{i}", 900)) for i in range(3)]
        first = [asyncio.create_task(anext(s)) for s in streams]
        await until(lambda: engine.status().num_running == 1 and engine.status().num_waiting == 2)
        with pytest.raises(Overloaded, match=r"3 choices are open and the request has 1; the limit is 3"):
            await collect(engine, request("one too many"))
        for task, stream in zip(first, streams, strict=True):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await stream.aclose()
        assert await collect(engine, request("now")) == list(range(10))

    run(test, CountingRunner(step_s=0.002), max_running=1, max_queue=2)


def with_pixels(r: EngineRequest, num_mb: int) -> EngineRequest:
    patches = np.zeros((num_mb * 2**20 // 768, 3, 16, 16), np.uint8)
    return replace(r, images=(ImagePatches(patches, (1, 1, len(patches)), len(patches) // 4, "hash"),))


def test_pixels_of_open_requests_are_counted_and_limited():
    async def test(engine):
        streams = [engine.generate(with_pixels(request(f"r{i}", 900), 25)) for i in range(2)]
        first = [asyncio.create_task(anext(s)) for s in streams]
        await until(lambda: engine.status().num_running == 1 and engine.status().num_waiting == 1)
        held = engine.status().memory["image_pixels_bytes"]
        assert 49 * 2**20 < held <= 50 * 2**20
        with pytest.raises(Overloaded, match=rf"take {held} bytes .* 15728640; the limit is 67108864") as error:
            await collect(engine, with_pixels(request("one too many"), 15))
        assert error.value.retry_after_s > 0
        queued = asyncio.create_task(collect(engine, request("text")))
        await until(lambda: engine.status().num_waiting == 2)  # a request without images is not concerned
        for task, stream in zip(first, streams, strict=True):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await stream.aclose()
        assert await queued == list(range(10))
        assert engine.status().memory["image_pixels_bytes"] == 0
        assert await collect(engine, with_pixels(request("now"), 15)) == list(range(10))

    run(test, CountingRunner(step_s=0.002), max_running=1, image_memory_mb=64)


def test_a_single_request_may_exceed_the_pixel_limit_of_all_requests():
    async def test(engine):
        assert await collect(engine, with_pixels(request(), 65)) == list(range(10))

    run(test, image_memory_mb=64)


class HangingRunner(CountingRunner):
    """Hangs in its decode steps; each was predicted to take `step_s`."""

    def __init__(self, hang: Hanging, predicted_s: float):
        super().__init__()
        self._hang = hang
        self.step_times = [StepTime(1, PLAIN, predicted_s)]

    def decode(self, drafts=PLAIN):
        self._hang()
        return super().decode(drafts)


def test_a_slow_step_within_its_prediction_is_not_treated_as_hanging():
    """Steps of a minute, with a limit of 20 ms."""

    async def test(engine):
        answer = asyncio.create_task(collect(engine, request()))
        await until(lambda: engine._thread.step_age_s > 50 * engine.config.step_timeout_s)
        engine.check_health()
        work = engine.status().work
        assert work.name == "a decode step (rows: 1, drafts: 0)" and work.seconds > 1 and not work.is_late
        assert work.predicted_s == pytest.approx(60, rel=0.1)
        hang.release()
        assert await answer == list(range(10))
        await until(lambda: engine.status().work is None)

    with Hanging() as hang:
        run(test, HangingRunner(hang, predicted_s=60.0), step_timeout_s=0.02)


def test_work_that_takes_much_longer_than_predicted_is_reported_once(monkeypatch, caplog):
    monkeypatch.setattr(progress, "MIN_LATE_S", 0.01)

    async def test(engine):
        answer = asyncio.create_task(collect(engine, request()))
        await until(lambda: bool(caplog.messages))
        work = engine.status().work
        assert work.is_late and work.seconds > 0.01
        for _ in range(3):
            engine.check_health()
        assert len(caplog.messages) == 1
        assert re.match(r"a decode step \(rows: 1, drafts: 0\) has been .* s, predicted 0\.001 s", caplog.messages[0])
        hang.release()
        assert await answer == list(range(10))

    with Hanging() as hang, caplog.at_level("WARNING", logger="orchard.engine"):
        run(test, HangingRunner(hang, predicted_s=0.001))


def test_start_that_compiles_kernels_says_so_with_its_progress():
    compiled = threading.Event()

    def slow(config, progress):
        for share in (0.5, 1.0, 0.0, 0.25):
            progress(share)
        assert compiled.wait(60)
        progress(1.0)
        return CountingRunner()

    async def main():
        engine = AsyncEngine(EngineConfig(), slow)
        await until(lambda: engine.status().state == "compiling")
        assert engine.status().load_progress == 0.25
        with pytest.raises(Unavailable, match="the engine is not ready: it is compiling"):
            await collect(engine, request())
        compiled.set()
        await engine.wait_ready()
        assert (engine.status().state, engine.status().load_progress) == ("ready", 1.0)
        await engine.shutdown()

    asyncio.run(main())


def test_a_failed_load_is_reported_to_all_waiters_with_its_reason():
    def broken(config, progress):
        progress(0.5)
        raise EngineFailed("the weights are broken")

    async def main():
        engine = AsyncEngine(EngineConfig(), broken)
        with pytest.raises(EngineFailed, match="the weights are broken"):
            await engine.wait_ready()
        assert engine.status().state == "failed" and engine.status().load_progress == 0.5
        with pytest.raises(EngineFailed, match="the weights are broken"):
            await collect(engine, request())
        with pytest.raises(EngineFailed):
            engine.check_health()
        await engine.shutdown()

    asyncio.run(main())


def test_shutdown_ends_open_streams_and_closes_the_runner_on_its_thread():
    runner = CountingRunner(step_s=0.002)

    async def main():
        engine = AsyncEngine(EngineConfig(), lambda c, p: runner)
        await engine.wait_ready()
        task = asyncio.create_task(_last(engine, request(max_tokens=900)))
        await until(lambda: bool(runner.next))
        await engine.shutdown()
        assert (await task).finish_reason is FinishReason.ERROR
        assert runner.closed and engine.status().state == "stopped"
        with pytest.raises(EngineFailed, match="shut down"):
            await collect(engine, request())

    asyncio.run(main())


async def _last(engine: AsyncEngine, r: EngineRequest):
    return [chunk async for chunk in engine.generate(r)][-1]
