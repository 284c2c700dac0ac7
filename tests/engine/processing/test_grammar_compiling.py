"""Compiling grammars: limits, many at a time, the same one at a time, and what is kept."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from engine.config import GrammarConfig
from engine.core.row import Matcher
from engine.errors import EngineFailed, InvalidRequest, Overloaded
from engine.processing import grammar as grammar_module
from engine.processing import grammar_build
from engine.processing.checkpoint import DEMO_MODEL
from engine.processing.free_limits import FreeLimits
from engine.processing.grammar import MAX_PENDING, GrammarCompiler
from engine.protocol import GrammarSpec
from tests.engine.processing.walks import NUM_TOKENS, STOPS, VOCAB_SIZE, accepts, compiled, encode, json_schema

CODES = GrammarSpec("regex", "[A-Z]{2}-[0-9]{2}")
SLOW = json_schema({"enum": [{"a": i} for i in range(8000)]})  # a few tenths of a second


def slow(number: int) -> GrammarSpec:
    return json_schema({"enum": [{"a": i, "b": number} for i in range(3000)]})


def compiler_with(**config: Any) -> GrammarCompiler:
    return GrammarCompiler(DEMO_MODEL, VOCAB_SIZE, STOPS, GrammarConfig(**config))


def test_a_grammar_that_is_too_large_is_refused_before_it_is_read() -> None:
    compiler = compiler_with(max_bytes=1024)

    with pytest.raises(InvalidRequest, match="the grammar has 1025 bytes; the limit is 1024"):
        asyncio.run(compiler.compile(GrammarSpec("regex", "é" + "a" * 1023)))


def test_a_slow_grammar_times_out_and_serves_a_later_request_once_compiled() -> None:
    compiler = compiler_with(compile_timeout_s=0.01)
    with pytest.raises(InvalidRequest, match=r"takes longer than 0\.01 s"):
        asyncio.run(compiler.compile(SLOW))

    deadline = time.monotonic() + 60
    while True:
        try:
            assert isinstance(asyncio.run(compiler.compile(SLOW)).masks(), np.ndarray)
            break
        except InvalidRequest:
            assert time.monotonic() < deadline
    compiler.close()


@pytest.fixture
def go_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No grammar is compiled before it is set."""
    event = threading.Event()
    source = grammar_module._source

    def held(*args: Any) -> str:
        event.wait()
        return source(*args)

    monkeypatch.setattr(grammar_module, "_source", held)
    yield event
    event.set()


def test_grammars_queued_behind_slow_ones_are_refused_with_a_retry_time(go_on: threading.Event) -> None:
    async def main() -> None:
        compiler = compiler_with(compile_timeout_s=1)
        results = await asyncio.gather(*(compiler.compile(slow(i)) for i in range(4)), return_exceptions=True)
        compiler.close()

        assert [type(result) for result in results] == [InvalidRequest, InvalidRequest, Overloaded, Overloaded]
        assert isinstance(results[2], Overloaded) and results[2].retry_after_s == 1

    asyncio.run(main())


def test_the_number_of_waiting_grammars_is_limited(go_on: threading.Event) -> None:
    async def main() -> None:
        compiler = compiler_with()
        waiting = [asyncio.create_task(compiler.compile(slow(i))) for i in range(MAX_PENDING)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match=f"{MAX_PENDING} grammars are queued"):
            await compiler.compile(CODES)
        compiler.close()
        go_on.set()
        results = await asyncio.gather(*waiting, return_exceptions=True)

        assert {type(result) for result in results[3:]} == {EngineFailed}

    asyncio.run(main())


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts of the grammars that were compiled."""
    texts: list[str] = []
    source = grammar_module._source

    def counting(spec: GrammarSpec, *limits: Any) -> str:
        texts.append(spec.text)
        time.sleep(0.02)
        return source(spec, *limits)

    monkeypatch.setattr(grammar_module, "_source", counting)
    return texts


def test_requests_for_the_same_grammar_compile_it_once(builds: list[str]) -> None:
    compiler = compiler_with()

    async def main() -> list[Matcher]:
        return [*await asyncio.gather(*(compiler.compile(CODES) for _ in range(8))), await compiler.compile(CODES)]

    matchers = asyncio.run(main())

    assert builds == [CODES.text]
    matchers[0].advance(encode("A"))
    assert all(accepts(matcher, "AB-12") for matcher in matchers[1:])


def test_a_cancelled_request_does_not_stop_the_compile_of_another(builds: list[str]) -> None:
    compiler = compiler_with()

    async def main() -> Matcher:
        leaving, staying = (asyncio.create_task(compiler.compile(CODES)) for _ in range(2))
        await asyncio.sleep(0.005)
        leaving.cancel()
        return await staying

    assert accepts(asyncio.run(main()), "AB-12")
    assert builds == [CODES.text]


def test_the_least_recently_used_grammars_are_forgotten(builds: list[str]) -> None:
    compiler = compiler_with()

    async def main() -> None:
        for number in range(grammar_module.CACHE_SIZE):
            await compiler.compile(GrammarSpec("regex", f"a{number}"))
        await compiler.compile(GrammarSpec("regex", "a0"))  # used again: a1 is the oldest now
        await compiler.compile(GrammarSpec("regex", "b"))
        del builds[:]
        for text in ("a0", "a1"):
            await compiler.compile(GrammarSpec("regex", text))

    asyncio.run(main())

    assert builds == ["a1"]


def test_a_refused_grammar_is_refused_for_each_with_its_own_field() -> None:
    async def main() -> list[Any]:
        specs = [GrammarSpec("regex", "a(", field) for field in ("guided_regex", "response_format")]
        return await asyncio.gather(*map(compiler_with().compile, specs), return_exceptions=True)

    assert [error.field for error in asyncio.run(main())] == ["guided_regex", "response_format"]


def test_a_closed_compiler_compiles_no_more() -> None:
    compiler = compiler_with()
    compiler.close()

    with pytest.raises(EngineFailed, match="the engine is shutting down"):
        asyncio.run(compiler.compile(CODES))


def test_other_threads_keep_their_stack_size() -> None:
    before = threading.stack_size(1 << 20)
    try:
        compiled(GrammarSpec("regex", "stack"))
        assert threading.stack_size() == 1 << 20
    finally:
        threading.stack_size(before)


def test_a_model_whose_tokenizer_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match=r"tokenizer\.json.*No such file"):
        GrammarCompiler(tmp_path, VOCAB_SIZE, STOPS, GrammarConfig())
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(EngineFailed, match=r"tokenizer\.json: llguidance cannot read"):
        GrammarCompiler(tmp_path, VOCAB_SIZE, STOPS, GrammarConfig())
    with pytest.raises(EngineFailed, match="no stop token"):
        GrammarCompiler(DEMO_MODEL, VOCAB_SIZE, (), GrammarConfig())


def test_tokens_without_a_logit_are_not_allowed(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    tokenizer.add_special_tokens(["<im_patch>", "<im_end>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    compiler = GrammarCompiler(tmp_path, NUM_TOKENS, STOPS, GrammarConfig())
    matcher = asyncio.run(compiler.compile(CODES))
    assert accepts(matcher, "AB-12") and not accepts(matcher, "AB-1")
    assert matcher.masks().shape == (1, -(-NUM_TOKENS // 32))


def test_a_grammar_that_grows_too_large_while_matching_fails_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_build, "MAX_ITEMS_IN_ROW", 300)
    wide = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(200)}}
    matcher = asyncio.run(compiler_with().compile(json_schema(wide)))

    now, behind = matcher.masks(encode("{"))
    assert now.any() and not behind.any(), "a draft that may be rejected yet fails nobody"
    with pytest.raises(ValueError, match="max is 300"):
        matcher.advance(encode("{"))
        matcher.masks()


@pytest.mark.parametrize(
    ("schema", "accepted", "refused"),
    [
        ({"type": "string"}, "abcd", "abcde"),
        ({"type": ["string", "null"]}, "abcd", "abcde"),
        ({"type": "string", "maxLength": 6}, "abcdef", "abcdefg"),
        ({"type": "string", "minLength": 5}, "abcde", "abcdef"),
        ({"type": "string", "enum": ["a long choice"]}, "a long choice", "a long"),
        ({"type": "string", "format": "date"}, "2026-01-31", "2026"),
        ({"type": "array", "items": {"type": "integer"}}, [1, 2], [1, 2, 3]),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 3}, [1, 2, 3], [1, 2, 3, 4]),
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 3}, [1, 2, 3], [1, 2, 3, 4]),
        (
            {"type": "array", "prefixItems": [{"type": "integer"}] * 3, "items": {"type": "string"}},
            [1, 2, 3],
            [1, 2, 3, "a"],
        ),
        ({"$ref": "#/$defs/s"}, ["abcd"], ["abcde"]),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "abcd", "abcde"),
        ({"type": "string", "anyOf": [{"const": "abcdef"}, {"const": "b"}]}, "abcdef", "a"),
        ({"allOf": [{"type": "string"}, {"minLength": 6}]}, "abcdef", "abcde"),
        (
            {"type": "object", "properties": {"anyOf": {"type": "array", "items": {"type": "string"}}}},
            {"anyOf": ["abcd"]},
            {"anyOf": ["abcde"]},
        ),
        ({"minLength": 6, "anyOf": [{"type": "string"}, {"type": "null"}]}, "abcdef", "abcde"),
    ],
)
def test_free_values_end_at_the_limits_of_a_model(schema: Any, accepted: Any, refused: Any) -> None:
    limits = FreeLimits(max_characters=4, max_items=2)
    compiler = GrammarCompiler(DEMO_MODEL, VOCAB_SIZE, STOPS, GrammarConfig(), limits)
    strings = {"s": {"type": "array", "items": {"type": "string"}}}
    spec = json_schema({"type": "object", "properties": {"v": schema}, "required": ["v"], "$defs": strings})

    assert accepts(asyncio.run(compiler.compile(spec)), json.dumps({"v": accepted}))
    assert not accepts(asyncio.run(compiler.compile(spec)), json.dumps({"v": refused}))
    compiler.close()


def test_malformed_sizes_are_refused_with_limits_too() -> None:
    compiler = GrammarCompiler(DEMO_MODEL, VOCAB_SIZE, STOPS, GrammarConfig(), FreeLimits(4, 2))
    for schema in ({"type": "string", "minLength": "a"}, {"type": "array", "minItems": {}, "prefixItems": 1}):
        with pytest.raises(InvalidRequest):
            asyncio.run(compiler.compile(json_schema(schema)))
    compiler.close()
