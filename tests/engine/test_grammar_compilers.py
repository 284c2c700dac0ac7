"""Grammars of requests to AsyncEngine: when a compiler is made, who waits for it, and what is left when it fails."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import engine.grammar_compilers
from engine.async_engine import AsyncEngine
from engine.errors import EngineFailed, InvalidRequest
from engine.protocol import EngineRequest, FinishReason, GrammarSpec, SamplingParams, TokenChunk
from tests.support.fake_runner import STOP, VOCAB_SIZE, FakeRunner, run_engine, until

JSON = GrammarSpec("json_object")


def request(request_id: str = "r", n: int = 1, max_tokens: int = 10, **sampling: Any) -> EngineRequest:
    params = SamplingParams(max_tokens, **sampling)
    return EngineRequest(request_id, np.zeros(4, np.int32), params, (STOP,), num_choices=n)


def run(test: Callable[[AsyncEngine, FakeRunner], Awaitable], runner: FakeRunner | None = None, **config: Any) -> None:
    runner = runner or FakeRunner()
    run_engine(lambda engine: test(engine, runner), runner, config)


async def collect(engine: AsyncEngine, r: EngineRequest) -> list[TokenChunk]:
    return [chunk async for chunk in engine.generate(r)]


class FakeMatcher:
    def __init__(self, name: str):
        self.name = name

    def masks(self, draft=()):
        raise NotImplementedError

    def advance(self, token_ids):
        raise NotImplementedError

    def fork(self):
        return FakeMatcher(f"{self.name}'")


class FakeCompiler:
    """Counts what is made; making waits for `makes`, compiling for `gate`. The first `broken` cannot be made."""

    broken: int
    makes: threading.Event
    made: int
    compiled: int
    gate: asyncio.Event

    def __init__(self, model_dir, vocab_size, stop_token_ids, config, free_limits):
        type(self).made += 1
        assert threading.current_thread() is not threading.main_thread(), "it reads the tokenizer"
        assert self.makes.wait(60)
        if type(self).made <= self.broken:
            raise EngineFailed("there is no tokenizer.json")
        assert (vocab_size, tuple(stop_token_ids)) == (VOCAB_SIZE, (STOP,)) and model_dir.is_dir()

    async def compile(self, spec):
        type(self).compiled += 1
        await self.gate.wait()
        if spec.text == "bad":
            raise InvalidRequest("the grammar is bad", spec.field)
        return FakeMatcher(spec.text)

    def close(self):
        pass


@pytest.fixture
def compiler(monkeypatch):
    FakeCompiler.made = FakeCompiler.compiled = FakeCompiler.broken = 0
    FakeCompiler.makes = threading.Event()
    FakeCompiler.makes.set()
    FakeCompiler.gate = asyncio.Event()
    monkeypatch.setattr(engine.grammar_compilers, "GrammarCompiler", FakeCompiler)
    return FakeCompiler


def test_each_choice_has_a_matcher_of_the_compiled_grammar(compiler):
    async def test(engine, runner):
        runner.step_s = 0.002
        compiler.gate.set()
        stream = engine.generate(replace(request(n=3, max_tokens=5000), grammar=GrammarSpec("regex", "a+")))
        await anext(stream)
        assert [row.matcher.name for row in runner.rows.values()] == ["a+", "a+'", "a+'"]
        assert len({id(row.matcher) for row in runner.rows.values()}) == 3
        await stream.aclose()
        without = engine.generate(request("without", max_tokens=5000))
        await anext(without)
        assert runner.rows["without#1/0"].matcher is None
        await without.aclose()

    run(test)


def test_the_compiler_is_made_at_the_first_grammar_and_once(compiler):
    async def test(engine, runner):
        await collect(engine, request())
        assert compiler.made == 0
        compiler.gate.set()
        await asyncio.gather(*(collect(engine, replace(request(f"r{i}"), grammar=JSON)) for i in range(4)))
        assert (compiler.made, compiler.compiled) == (1, 4)

    run(test)


def test_a_compiler_that_cannot_be_made_is_an_error_for_the_request_and_tried_again(compiler):
    async def test(engine, runner):
        compiler.broken = 2
        compiler.gate.set()
        for _ in range(2):
            with pytest.raises(EngineFailed, match=r"there is no tokenizer.json"):
                await collect(engine, replace(request(), grammar=JSON))
        assert engine._open.streams == {} and compiler.made == 2
        assert await collect(engine, replace(request(), grammar=JSON))

    run(test)


def test_a_cancelled_request_does_not_stop_the_creation_of_the_compiler_for_others(compiler):
    async def test(engine, runner):
        compiler.makes.clear()
        first, second = (asyncio.create_task(collect(engine, replace(request(name), grammar=JSON))) for name in "ab")
        await until(lambda: compiler.made == 1)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        compiler.makes.set()
        compiler.gate.set()
        assert await second and compiler.made == 1

    run(test)


def test_a_request_with_a_refused_grammar_leaves_no_state(compiler):
    async def test(engine, runner):
        compiler.gate.set()
        with pytest.raises(InvalidRequest, match="the grammar is bad"):
            await collect(engine, replace(request(), grammar=GrammarSpec("regex", "bad")))
        assert engine._open.streams == engine._open._keys == {} and runner.calls == []
        assert await collect(engine, request())

    run(test)


@pytest.mark.parametrize("how", ["cancel", "abort"])
def test_a_request_cancelled_while_its_grammar_compiles_leaves_no_state(compiler, how):
    async def test(engine, runner):
        task = asyncio.create_task(collect(engine, replace(request(n=2), grammar=JSON)))
        await until(lambda: compiler.compiled == 1)
        with pytest.raises(InvalidRequest, match="in use"):
            await collect(engine, request())
        if how == "cancel":
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        else:
            assert engine.abort("r")
            compiler.gate.set()
            assert [chunk.finish_reason for chunk in await task] == [FinishReason.ABORT] * 2
        assert engine._open.streams == engine._open._keys == {}
        compiler.gate.set()
        await collect(engine, request("next"))
        assert not any("r#" in str(call) for call in runner.calls) and engine.status().num_aborted == 0

    run(test)
