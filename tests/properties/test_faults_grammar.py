"""Rows whose grammar fails, and grammars that cannot be compiled, or not in time, while others are served."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count, product
from pathlib import Path

import pytest

from engine.errors import InvalidRequest
from engine.processing import grammar
from engine.protocol import EngineRequest, FinishReason, GrammarSpec
from tests.support.fake_runner import until
from tests.support.faults import Failing, Faults, Hanging
from tests.support.faulty_engine import DEADLINE_S, REGEX, RUNS, THREE_REGEX, TINY, WAITS, Bench, Reader
from tests.support.night import some_at_night

NUMBERS = count(1)


@pytest.fixture(scope="module")
def bench(tiny_model: Callable[..., Path]) -> Iterator[Bench]:
    """A grammar may be compiled for longer than any test lasts."""
    with Bench(tiny_model(**TINY), grammar={"compile_timeout_s": 100}) as bench:
        yield bench


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    """Seams: `compile` (inside of what answers for llguidance's errors), `tokenizer` (is read by the first request
    with its stop tokens)."""
    faults = Faults()
    monkeypatch.setattr(grammar, "_source", faults.around(grammar._source, "compile"))
    monkeypatch.setattr(grammar, "_load_tokenizer", faults.around(grammar._load_tokenizer, "tokenizer"))
    return faults


def new_grammar(seam: str = "compile") -> EngineRequest:
    """One that nobody has compiled yet; for the seam `tokenizer` with stop tokens that nobody has had."""
    number = next(NUMBERS)
    spec = GrammarSpec("regex", f"[a-z]{{40,{60 + number}}}")
    stop = (*REGEX.stop_token_ids, 20 + number) if seam == "tokenizer" else REGEX.stop_token_ids
    return replace(REGEX, request_id=f"victim {number}", grammar=spec, stop_token_ids=stop)


ERRORS = [ValueError("too hard"), RuntimeError("a panic"), MemoryError()]


@pytest.mark.parametrize(
    ("seam", "call", "request_"),
    some_at_night(
        product(("masks", "advance"), (1, 4), (REGEX, THREE_REGEX)),
        [("masks", 1, REGEX), ("masks", 4, THREE_REGEX), ("advance", 1, THREE_REGEX), ("advance", 4, REGEX)],
        "the gate has each two of seam, call and number of choices",
        are_sets=True,
    ),
)
def test_a_row_whose_grammar_fails_ends_alone(bench: Bench, seam: str, call: int, request_: EngineRequest):
    failed = request_.num_choices - 1

    async def test() -> None:
        async with bench.scene(request_) as scene:
            fault = bench.faults.arm(seam, Failing(ValueError("no way on")), call=call, of=f"victim/{failed}")
            await scene.go()
        assert fault.num_fired == 1
        whole = await bench.alone(request_)
        for index, (reason, error, got) in enumerate(
            zip(scene.victim.reasons, scene.victim.errors, scene.victim.tokens, strict=True)
        ):
            if index == failed:
                assert reason is FinishReason.ERROR and error is not None and "no way on" in error
                assert len(got) < len(whole[index]) and got == whole[index][: len(got)]
            else:
                assert reason is FinishReason.LENGTH and got == whole[index]
        assert await bench.is_undisturbed(scene.runs, RUNS) and await bench.is_undisturbed(scene.waits, WAITS)
        await bench.check(request_, 2 + request_.num_choices)

    bench.run(test)


@asynccontextmanager
async def others_are_served(bench: Bench, num_more: int = 0) -> AsyncIterator[None]:
    """Two without a grammar come while something is wrong with that of another one. num_more: rows besides."""
    for request in (RUNS, WAITS):
        await bench.alone(request)
    bench.begin()
    readers = [Reader(bench.engine, request) for request in (RUNS, WAITS)]
    yield
    for reader, request in zip(readers, (RUNS, WAITS), strict=True):
        await until(reader.task.done, DEADLINE_S)
        assert await bench.is_undisturbed(reader, request)
    await bench.check(REGEX, 2 + num_more)


@pytest.mark.parametrize(
    ("seam", "error"),
    some_at_night(
        product(("compile", "tokenizer"), ERRORS),
        [("compile", ERRORS[0]), ("compile", ERRORS[2]), ("tokenizer", ERRORS[1])],
        "the gate has each error at one of two seams",
        are_sets=True,
    ),
)
def test_a_failed_grammar_compile_ends_only_its_own_request(bench: Bench, faults: Faults, seam: str, error: Exception):
    request = new_grammar(seam)

    async def test() -> None:
        async with others_are_served(bench):
            fault = faults.arm(seam, Failing(error))
            victim = Reader(bench.engine, request)
            await until(victim.task.done, DEADLINE_S)
            assert fault.num_fired == 1 and victim.task.exception() is not None
            if seam == "compile" and not isinstance(error, MemoryError):
                assert isinstance(victim.refusal, InvalidRequest) and str(error) in victim.refusal.message
        assert not (await bench.read(request)).errors[0], "the next one finds nothing broken"

    bench.run(test)


@pytest.mark.parametrize("how", ["abort", "cancel"])
@pytest.mark.parametrize("seam", ["compile", "tokenizer"])
def test_a_request_aborted_while_its_grammar_compiles_ends_at_once(bench: Bench, faults: Faults, seam: str, how: str):
    request = new_grammar(seam)

    async def test() -> None:
        with Hanging() as hang:
            async with others_are_served(bench):
                faults.arm(seam, hang)
                victim = Reader(bench.engine, request)
                await until(hang.began.is_set)
                if how == "abort":
                    assert bench.engine.abort(victim.name)
                    await until(victim.task.done)
                    assert victim.reasons == [FinishReason.ABORT]
                else:
                    await victim.cancel()
                assert not bench.engine.abort(victim.name), "it is known no more"
        assert not (await bench.read(request)).errors[0], "the next one finds it compiled"

    bench.run(test)


def test_a_grammar_that_takes_too_long_is_refused_with_the_limit_and_others_are_compiled(bench: Bench, faults: Faults):
    other = bench.another(grammar={"compile_timeout_s": 0.5})

    async def test() -> None:
        async with others_are_served(other, 1):
            faults.arm("compile", hang)
            victim = Reader(other.engine, new_grammar())
            await until(hang.began.is_set)
            assert not (await other.read(new_grammar())).errors[0]
            await until(victim.task.done, DEADLINE_S)
            assert isinstance(victim.refusal, InvalidRequest) and "longer than 0.5 s" in victim.refusal.message

    with other, Hanging() as hang:
        other.run(test)


def test_shutdown_ends_a_request_that_waits_for_its_grammar(bench: Bench, faults: Faults):
    other = bench.another(grammar={"compile_timeout_s": 100})

    async def test() -> None:
        faults.arm("compile", hang)
        victim = Reader(other.engine, new_grammar())
        await until(hang.began.is_set)
        await other.engine.shutdown()
        await until(victim.task.done)
        assert victim.refusal is not None or victim.reasons == [FinishReason.ERROR]

    with other, Hanging() as hang:
        other.run(test)
