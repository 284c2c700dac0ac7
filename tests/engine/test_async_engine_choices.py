"""AsyncEngine with several choices, and requests that are refused before they cost anything."""

import asyncio
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.async_engine import AsyncEngine
from engine.core.runner import PLAIN, Drafts, RowOutput
from engine.errors import InvalidRequest, Overloaded
from engine.protocol import EngineRequest, FinishReason, GrammarSpec, SamplingParams, TokenChunk
from tests.support.fake_runner import STOP, VOCAB_SIZE, FakeRunner, answer, run_engine, until

JSON = GrammarSpec("json_object")


def request(request_id: str = "r", n: int = 1, max_tokens: int = 10, **sampling: Any) -> EngineRequest:
    params = SamplingParams(max_tokens, **sampling)
    return EngineRequest(request_id, np.zeros(4, np.int32), params, (STOP,), num_choices=n)


def run(test: Callable[[AsyncEngine, FakeRunner], Awaitable], runner: FakeRunner | None = None, **config: Any) -> None:
    runner = runner or FakeRunner()
    run_engine(lambda engine: test(engine, runner), runner, config)


async def collect(engine: AsyncEngine, r: EngineRequest) -> list[TokenChunk]:
    return [chunk async for chunk in engine.generate(r)]


def tokens_by_choice(chunks: list[TokenChunk]) -> list[list[int]]:
    tokens: dict[int, list[int]] = defaultdict(list)
    for chunk in chunks:
        tokens[chunk.index] += chunk.token_ids
    return [tokens[index] for index in sorted(tokens)]


def test_every_choice_gets_its_own_tokens_and_its_own_end():
    async def test(engine, runner):
        wanted = request(n=4, max_tokens=40)
        chunks = await collect(engine, wanted)
        assert tokens_by_choice(chunks) == [answer(wanted, i) for i in range(4)]
        for index in range(4):
            reasons = [chunk.finish_reason for chunk in chunks if chunk.index == index]
            assert reasons[-1] is FinishReason.LENGTH and set(reasons[:-1]) <= {None}
        assert engine.status().num_finished == 4

    run(test)


def test_the_stream_goes_on_until_the_last_choice_has_ended():
    async def test(engine, runner):
        wanted = request(n=2, max_tokens=30)
        runner.stops_at = {0: 3}
        chunks = await collect(engine, wanted)
        assert [len(tokens) for tokens in tokens_by_choice(chunks)] == [3, 30]
        assert {c.index: c.finish_reason for c in chunks if c.finish_reason} == {
            0: FinishReason.STOP,
            1: FinishReason.LENGTH,
        }

    run(test)


def test_a_slow_reader_gets_one_chunk_per_choice_with_all_that_came():
    has_read = threading.Event()

    class Patient(FakeRunner):
        """No step begins before the first tokens have been read."""

        def decode(self, drafts: Drafts = PLAIN) -> Mapping[str, RowOutput]:
            assert has_read.wait(60), "the first tokens wait for a step"
            return super().decode(drafts)

    async def test(engine, runner):
        stream = engine.generate(request(n=3, max_tokens=12, logprobs=0))
        first = [await anext(stream) for _ in range(3)]
        has_read.set()
        await until(lambda: engine.status().num_finished == 3)
        rest = [chunk async for chunk in stream]
        assert [chunk.index for chunk in first] == [chunk.index for chunk in rest] == [0, 1, 2]
        for chunk in rest:
            assert chunk.finish_reason is FinishReason.LENGTH
            assert [-entry.logprob for entry in chunk.logprobs] == list(range(12 - len(chunk.token_ids), 12))

    run(test, Patient())


def test_draft_counts_add_up_in_chunks_merged_for_a_slow_reader():
    async def test(engine, runner):
        stream = engine.generate(request(max_tokens=21))
        first = await anext(stream)
        await until(lambda: engine.status().num_finished == 1)
        last = await anext(stream)
        status = engine.status()
        assert first.num_drafted + last.num_drafted == status.num_drafted > 0
        assert first.num_accepted + last.num_accepted == status.num_accepted > 0
        assert status.speculation["mtp"]["mode"] == "fixed"

    run(test, FakeRunner(2, accepts=lambda seed, position: position % 2 == 0), mtp={"max_draft_tokens": 2})


@pytest.mark.parametrize("how", ["close", "abort"])
def test_a_closed_or_aborted_stream_frees_the_rows_of_all_choices(how):
    async def test(engine, runner):
        runner.step_s = 0.002
        stream = engine.generate(request(n=3, max_tokens=5000))
        await anext(stream)
        await until(lambda: len(runner.rows) == 3)
        if how == "close":
            await stream.aclose()
        else:
            assert engine.abort("r")
            rest = [chunk async for chunk in stream]
            assert {c.index for c in rest if c.finish_reason is FinishReason.ABORT} == {0, 1, 2}
            assert not engine.abort("r")
        await until(lambda: engine.status().num_running == 0 and not runner.rows)
        assert engine.status().num_aborted == 3

    run(test)


def test_a_choice_that_has_ended_is_not_aborted_again():
    async def test(engine, runner):
        runner.step_s, runner.stops_at = 0.002, {0: 2}
        stream = engine.generate(request(n=2, max_tokens=5000))
        seen: list[TokenChunk] = []
        while not any(chunk.finish_reason for chunk in seen):
            seen.append(await anext(stream))
        assert engine.abort("r")
        seen += [chunk async for chunk in stream]
        reasons = [(chunk.index, chunk.finish_reason) for chunk in seen if chunk.finish_reason]
        assert reasons == [(0, FinishReason.STOP), (1, FinishReason.ABORT)]

    run(test)


@pytest.mark.parametrize(
    ("wrong", "field", "message"),
    [
        ({"num_choices": 5}, "n", r"n is 5; it must be between 1 and 4 \(max_running\)"),
        ({"num_choices": 0}, "n", "n is 0; it must be between 1 and 4"),
        ({"priority": 2}, "priority", "priority is 2; it must be 0, as scheduler.policy is fifo"),
        ({"sampling": SamplingParams(5, logit_bias=((7, 1.0), (1000, 2.0)))}, "logit_bias", "token id 1000 is not"),
        ({"sampling": SamplingParams(5, logit_bias=((-1, 1.0),))}, "logit_bias", "-1 is not between 0 and 999"),
        ({"token_ids": np.array([0, VOCAB_SIZE], np.int32)}, "messages", "token id 1000 is not between 0 and 999"),
        ({"token_ids": np.array([-3, 5], np.int32)}, "messages", "token id -3 is not between 0 and 999"),
    ],
)
def test_invalid_parameters_are_refused_with_name_value_and_limit(wrong, field, message):
    async def test(engine, runner):
        with pytest.raises(InvalidRequest, match=message) as caught:
            await collect(engine, replace(request(), **wrong))
        assert caught.value.field == field and runner.calls == []

    run(test, max_running=4)


def test_an_urgent_request_preempts_under_the_priority_policy():
    async def test(engine, runner):
        runner.step_s = 0.002
        slow = asyncio.create_task(collect(engine, replace(request("slow", max_tokens=200), priority=5)))
        await until(lambda: bool(runner.rows))
        await collect(engine, replace(request("urgent"), priority=-1))
        assert not slow.done() and engine.status().num_preempted == 1
        wanted = request("slow", max_tokens=200)
        assert tokens_by_choice(await slow) == [answer(wanted)]

    run(test, max_running=1, scheduler={"policy": "priority"})


def test_each_choice_counts_towards_the_limit_of_open_answers():
    async def test(engine, runner):
        runner.step_s = 0.002
        stream = engine.generate(request(n=3, max_tokens=5000))
        await anext(stream)
        with pytest.raises(Overloaded, match="3 choices are open and the request has 3; the limit is 5"):
            await collect(engine, request("two", n=3))
        await stream.aclose()
        await collect(engine, request("three", n=3))

    run(test, max_running=3, max_queue=2)
