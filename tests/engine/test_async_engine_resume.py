"""AsyncEngine with answers that another engine began, and with answers that it gives away."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.async_engine import AsyncEngine
from engine.errors import InvalidRequest, Overloaded, Unavailable
from engine.protocol import EngineRequest, FinishReason, GrammarSpec, Progress, SamplingParams, TokenChunk
from tests.support.fake_runner import STOP, VOCAB_SIZE, FakeRunner, answer, run_engine, until


def request(request_id: str = "r", n: int = 1, max_tokens: int = 10, **sampling: Any) -> EngineRequest:
    params = SamplingParams(max_tokens, **sampling)
    return EngineRequest(request_id, np.zeros(4, np.int32), params, (STOP,), num_choices=n)


def run(test: Any, runner: FakeRunner | None = None, **config: Any) -> None:
    runner = runner or FakeRunner()
    run_engine(lambda engine: test(engine, runner), runner, config)


async def collect(engine: AsyncEngine, r: EngineRequest) -> list[TokenChunk]:
    return [chunk async for chunk in engine.generate(r)]


def tokens_by_choice(chunks: Sequence[TokenChunk]) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = defaultdict(list)
    for chunk in chunks:
        tokens[chunk.index] += chunk.token_ids
    return dict(tokens)


def test_open_choices_are_continued_and_the_stream_ends_with_the_last_of_them():
    async def test(engine, runner):
        whole = request(n=3)
        begun = replace(
            whole, progress=(Progress(tuple(answer(whole)[:4])), Progress((7,), is_finished=True), Progress())
        )
        chunks = await collect(engine, begun)
        assert tokens_by_choice(chunks) == {0: answer(whole)[4:], 2: answer(whole, 2)}
        assert [chunk.index for chunk in chunks if chunk.finish_reason] in ([0, 2], [2, 0])
        assert engine.status().num_output_tokens == 6 + 10

    run(test)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"progress": (Progress(),)}, "progress has 1 entries; it must have one per choice, 2"),
        ({"progress": (Progress(is_finished=True),) * 2}, "all 2 choices are finished; at least 1 must be open"),
        (
            {"progress": (Progress((5,) * 10), Progress())},
            r"progress\[0\] has 10 tokens .* fewer than 10 \(max_tokens\)",
        ),
        ({"progress": (Progress(), Progress((VOCAB_SIZE,)))}, r"progress\[1\]: token id 1000 is not between 0 and 999"),
        ({"progress": (Progress(), Progress((-1,)))}, r"progress\[1\]: token id -1 is not between 0 and 999"),
        ({"progress": (Progress((5, STOP, 6)), Progress())}, r"progress\[0\] contains stop token 2"),
        ({"progress": (Progress((5,)),), "num_choices": 1, "pooling": "last"}, "an embedding has no tokens"),
    ],
)
def test_progress_that_no_answer_can_have_is_refused_with_value_and_limit(wrong, message):
    async def test(engine, runner):
        with pytest.raises(InvalidRequest, match=message) as caught:
            await collect(engine, replace(request(n=2), **wrong))
        assert caught.value.field == "progress" and not runner.calls

    run(test)


def test_tokens_that_end_other_requests_are_continued_where_nothing_stops():
    async def test(engine, runner):
        endless = replace(request(), stop_token_ids=(), progress=(Progress((5, STOP, 6)),))
        assert tokens_by_choice(await collect(engine, endless)) == {0: answer(request())[3:]}

    run(test)


def test_finished_choices_leave_room_for_other_requests():
    async def test(engine, runner):
        runner.step_s = 0.002
        whole = request(n=3, max_tokens=5000)
        one_open = replace(whole, progress=(Progress((5,)), *[Progress(is_finished=True)] * 2))
        stream = engine.generate(one_open)
        await anext(stream)
        await collect(engine, request("two", n=3))
        with pytest.raises(Overloaded, match="1 choices are open and the request has 4; the limit is 4"):
            await collect(engine, request("four", n=4))
        await stream.aclose()

    run(test, max_running=4, max_queue=0)


def test_moving_ends_every_stream_with_the_tokens_that_were_published_and_refuses_new_requests():
    async def test(engine, runner):
        runner.step_s = 0.002
        wholes = [request(f"r{i}", n=2, max_tokens=5000) for i in range(4)]
        open_streams = [asyncio.create_task(collect(engine, one)) for one in wholes]
        await until(lambda: engine.status().num_running == 4 and engine.status().num_output_tokens > 20)
        await engine.move_all()
        with pytest.raises(Unavailable, match="drained"):
            await collect(engine, request("late"))
        for whole, chunks in zip(wholes, await asyncio.gather(*open_streams), strict=True):
            assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == [FinishReason.MOVED] * 2
            for index, tokens in tokens_by_choice(chunks).items():
                assert tokens == answer(whole, index)[: len(tokens)]
            assert all(chunk.timeline for chunk in chunks if chunk.finish_reason)
        await engine.drain(5.0)
        status = engine.status()
        assert (status.num_moved, status.num_running, status.num_waiting) == (8, 0, 0) and not runner.rows

    run(test, max_running=4)


def test_a_request_whose_grammar_is_being_compiled_is_moved_at_once():
    async def test(engine, runner):
        compiled = asyncio.Event()

        async def matchers(request: EngineRequest, vocab_size: int) -> list:
            await compiled.wait()
            return []

        engine._grammars.matchers = matchers
        waiting = asyncio.create_task(collect(engine, replace(request(n=2), grammar=GrammarSpec("json_object"))))
        await until(lambda: bool(engine._open.streams))
        await engine.move_all()
        chunks = await asyncio.wait_for(waiting, 60)
        assert [(chunk.index, chunk.finish_reason) for chunk in chunks] == [
            (0, FinishReason.MOVED),
            (1, FinishReason.MOVED),
        ]
        assert engine.status().num_waiting == 0 and not runner.calls

    run(test)


def test_an_aborted_stream_is_not_moved():
    async def test(engine, runner):
        runner.step_s = 0.002
        stream = engine.generate(request(max_tokens=5000))
        await anext(stream)
        assert engine.abort("r")
        await engine.move_all()
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].finish_reason is FinishReason.ABORT and engine.status().num_moved == 0

    run(test)
