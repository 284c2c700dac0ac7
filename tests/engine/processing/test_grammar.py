"""Grammars of the demo model: what the masks allow, drafts, forks, the end, and compiling under load."""

import json
import re
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InvalidRequest
from engine.protocol import GrammarSpec
from tests.engine.processing.walks import (
    END_OF_TEXT,
    IM_END,
    NUM_TOKENS,
    STOPS,
    TOKENIZER,
    VOCAB_SIZE,
    accepted_part,
    accepts,
    allowed,
    compiled,
    decode,
    encode,
    json_schema,
    walk,
)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"enum": ["new", "old"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
ANY_OBJECT = GrammarSpec("json_object")
CODES = GrammarSpec("regex", r"([A-Zα-ω]{1,3}-[0-9]{2}|é😀+)( or (yes|no))?")
SPECS = [json_schema(PERSON), ANY_OBJECT, CODES]
CONTROL = frozenset(TOKENIZER.get_added_tokens_decoder()) - set(STOPS)


def refusal(spec: GrammarSpec) -> str:
    with pytest.raises(InvalidRequest) as error:
        compiled(spec)
    assert error.value.field == spec.field
    return error.value.message


def is_object(text: str) -> bool:
    return isinstance(json.loads(text), dict)


def is_person(text: str) -> bool:
    person = json.loads(text)
    return list(person)[:2] == ["name", "age"] and set(person.get("tags", [])) <= {"new", "old"}


def is_code(text: str) -> bool:
    return re.fullmatch(CODES.text, text) is not None


@pytest.mark.parametrize(("spec", "holds"), list(zip(SPECS, [is_person, is_object, is_code], strict=True)))
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_text_allowed_by_the_masks_matches_the_grammar(
    spec: GrammarSpec, holds: Callable[[str], bool], seed: int
) -> None:
    token_ids = walk(compiled(spec), seed)

    assert token_ids is None or holds(decode(token_ids))


@pytest.mark.parametrize("spec", SPECS)
def test_at_least_half_of_the_random_walks_complete_the_output(spec: GrammarSpec) -> None:
    assert sum(walk(compiled(spec), seed) is not None for seed in range(20)) >= 10


@pytest.mark.parametrize("spec", SPECS)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), start=st.integers(0, 20), noise=st.lists(st.integers(0, VOCAB_SIZE + 5), max_size=2))
def test_masks_of_a_draft_equal_those_of_single_steps(
    spec: GrammarSpec, seed: int, start: int, noise: list[int]
) -> None:
    matcher = compiled(spec)
    token_ids = (*(walk(matcher, seed) or ()), IM_END)
    matcher.advance(token_ids[:start])
    draft = (*token_ids[start : start + 6], *noise)
    before = matcher.masks()

    masks = matcher.masks(draft)

    stepped = matcher.fork()
    for i, row in enumerate(masks):
        assert np.array_equal(stepped.masks()[0], row)
        if i + 1 < len(masks):
            stepped.advance((draft[i],))
    assert len(masks) == len(draft) + 1 or draft[len(masks) - 1] not in allowed(masks[-1])
    assert np.array_equal(matcher.masks(), before)


def test_masks_have_a_bit_per_logit_and_none_beyond_the_tokenizer() -> None:
    masks = compiled(GrammarSpec("regex", r"(?s:.*)")).masks(encode("ab"))

    assert masks.dtype == np.uint32
    assert masks.shape == (len(encode("ab")) + 1, (VOCAB_SIZE + 31) // 32)
    assert max(max(allowed(row)) for row in masks) < NUM_TOKENS


@pytest.mark.parametrize("spec", [*SPECS, GrammarSpec("regex", r"(?s:.*)")])
def test_control_tokens_are_never_text(spec: GrammarSpec) -> None:
    matcher = compiled(spec)
    token_ids = walk(matcher, 7) or ()

    for row in matcher.masks(token_ids):
        assert CONTROL.isdisjoint(allowed(row))


def test_a_control_string_inside_a_json_string_is_ordinary_text() -> None:
    as_text = (*encode('{"a":"'), *encode("<th"), *encode("ink>"), *encode('"}'))
    matcher = compiled(ANY_OBJECT)

    assert "<think>" in decode(as_text)
    assert len(matcher.masks(as_text)) == len(as_text) + 1
    assert accepted_part(matcher, '{"a":"<think>"}') == '{"a":"'


@pytest.mark.parametrize("text", sorted(token.content for token in TOKENIZER.get_added_tokens_decoder().values()))
@pytest.mark.parametrize(
    "kind", ["choice", "choices", "regex", "class", "const", "enum", "key", "pattern", "json tool"]
)
def test_text_that_spells_a_control_token_is_written_in_ordinary_tokens(kind: str, text: str) -> None:
    wanted, spec = {
        "choice": (text, GrammarSpec("lark", f"%llguidance {{}}\nstart: {json.dumps(text)}\n")),
        "choices": (f"a{text}", GrammarSpec("lark", f'%llguidance {{}}\nstart: "a" {json.dumps(text)} | "b{text}"\n')),
        "regex": (text, GrammarSpec("regex", re.escape(text))),
        "class": (text, GrammarSpec("regex", f"[{text[0]}]{re.escape(text[1:])}")),
        "const": (f'"{text}"', json_schema({"const": text})),
        "enum": (f'["a{text}"]', json_schema({"enum": [[f"a{text}"]]})),
        "key": (
            f'{{"{text}":1}}',
            json_schema(
                {
                    "type": "object",
                    "properties": {text: {"const": 1}},
                    "required": [text],
                    "additionalProperties": False,
                }
            ),
        ),
        "pattern": (f'"{text}"', json_schema({"type": "string", "pattern": f"^[{text[0]}]{re.escape(text[1:])}$"})),
        "json tool": (
            f'"{text}"',
            GrammarSpec("lark", f"%llguidance {{}}\nstart: %json {json.dumps({'const': text})}"),
        ),
    }[kind]
    answers = {walk(compiled(spec), seed) for seed in range(5)} - {None}

    assert answers
    for token_ids in answers:
        assert token_ids is not None and CONTROL.isdisjoint(token_ids) and set(STOPS).isdisjoint(token_ids)
        written = "".join(decode(token_ids).split())
        assert written == wanted or (kind == "choices" and written == f"b{text}")


@pytest.mark.parametrize("stop", STOPS)
def test_every_stop_token_ends_the_output_and_later_tokens_are_ignored(stop: int) -> None:
    matcher = compiled(GrammarSpec("regex", "ab|abc"))
    matcher.advance(encode("ab"))
    assert set(STOPS) < set(allowed(matcher.masks()[0]))

    matcher.advance((stop, *encode("zzz")))

    assert allowed(matcher.masks()[0]) == sorted(STOPS)
    assert len(matcher.masks((IM_END, END_OF_TEXT, 77))) == 3
    assert allowed(matcher.fork().masks()[0]) == sorted(STOPS)


def test_a_complete_output_allows_the_stop_tokens_alone() -> None:
    matcher = compiled(GrammarSpec("regex", "abc"))
    matcher.advance(encode("abc"))

    assert allowed(matcher.masks()[0]) == sorted(STOPS)


def test_stop_tokens_are_forbidden_before_the_output_is_complete() -> None:
    matcher = compiled(json_schema(PERSON))
    masks = matcher.masks(encode('{"name": "x", "age": 3'))

    assert all(set(STOPS).isdisjoint(allowed(row)) for row in masks)


def test_a_fork_advances_independently_of_its_matcher() -> None:
    matcher = compiled(GrammarSpec("regex", "ab|cd"))
    fork = matcher.fork()

    fork.advance(encode("a"))

    assert accepts(matcher, "cd") and not accepts(fork, "d") and accepts(fork, "b")


@pytest.mark.parametrize("token_id", [encode("z")[0], IM_END, VOCAB_SIZE - 1, VOCAB_SIZE + 99])
def test_a_forbidden_token_fails_the_row_and_no_other(token_id: int) -> None:
    matcher = compiled(GrammarSpec("regex", "ab"))
    other = matcher.fork()

    with pytest.raises(ValueError, match="llguidance cannot continue"):
        matcher.advance((token_id,))
    with pytest.raises(ValueError, match="llguidance cannot continue"):
        matcher.masks()

    assert accepts(other, "ab")


@pytest.mark.parametrize(
    ("expression", "accepted"),
    [
        (r"\d{2}-\d", "12-3"),
        (r"[\d.]+x", "1.2x"),
        (r"[^\dx]", "\u0664"),
        (r"\\d", r"\d"),
        (r"[]\d]+x", "]7x"),
        (r"[a[\d]b]\d", "b0"),
        (r"[-\d]+/[\d-]x", "-1/-x"),
        (r"[\d\D]\D", "5\u0664"),
        (r"[a-z-\d]+\d{2}-\d", "q-123-4"),
    ],
)
def test_digits_of_an_expression_are_those_of_ascii(expression: str, accepted: str) -> None:
    """As in the patterns of a schema; those of other scripts are more than other programs know."""
    matcher, with_other_digits = compiled(GrammarSpec("regex", expression)), re.sub("[0-9]", "\u0664", accepted)
    assert accepted_part(matcher, accepted) == accepted
    is_refused = accepted_part(matcher, with_other_digits) != with_other_digits
    assert with_other_digits == accepted or is_refused == (r"\D" not in expression)


@pytest.mark.parametrize("expression", [r"[+-\d]+", r"[\d-x]", r"a[x\]+-\D]", r"\\\\[+-\d]"])
def test_a_range_that_begins_or_ends_with_digits_is_refused(expression: str) -> None:
    assert "range" in refusal(GrammarSpec("regex", expression))


@pytest.mark.parametrize("text", ["[" * 60_000 + r"\d-", r"[a-\d" * 8000, r"[-\d]" * 8000, r"(\d-[a])" * 6000])
def test_hostile_expressions_with_digits_are_compiled_or_refused_soon(text: str) -> None:
    began = time.perf_counter()
    with suppress(InvalidRequest):
        compiled(GrammarSpec("regex", text))
    assert time.perf_counter() - began < 30


def test_properties_come_in_the_order_of_the_schema() -> None:
    matcher = compiled(json_schema({"type": "object", "properties": {"z": {}, "a": {}}, "required": ["a", "z"]}))

    assert accepts(matcher, '{"z": 1, "a": 2}')
    assert not accepts(matcher, '{"a": 1, "z": 2}')


@pytest.mark.parametrize("text", ['{"a":1}', '{"a": 1}', '{\n  "a": 1\n}', '{ "a" :1 }', '{\n\t"a": 1\n}', "{}"])
def test_compact_and_indented_json_is_allowed(text: str) -> None:
    assert accepts(compiled(ANY_OBJECT), text)


@pytest.mark.parametrize("text", ["\n{}", " {}", '{"a":\n\n1}', '{"a":  1}', "{}\n", "[]", "1", '{"a":1,}'])
def test_extra_whitespace_and_malformed_or_other_values_are_not_allowed(text: str) -> None:
    assert not accepts(compiled(ANY_OBJECT), text)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (GrammarSpec("json_schema", "{"), "not valid JSON"),
        (GrammarSpec("json_schema", "[" * 100_000 + "]" * 100_000), "nested too deeply"),
        (GrammarSpec("json_schema", '{"items":' * 130 + "{}" + "}" * 130), "recursion limit"),
        (GrammarSpec("json_schema", '{"const": "\\ud800"}'), "hex escape"),
        (GrammarSpec("json_schema", '{"const": NaN}'), "`const` at $"),
        (json_schema({"enum": []}), "Unsatisfiable schema"),
        (json_schema({"$ref": "#"}), "no output matches"),
        (json_schema({"properties": {"a": {"oneOf": [{}, {}]}}}), "`oneOf` at $.properties.a, whose branches 0 and 1"),
        (
            json_schema({"type": "array", "items": {"minimum": 3, "maximum": 2, "type": "number"}, "minItems": 1}),
            " at $.items",
        ),
        (json_schema({"anyOf": [{"type": "nope"}, {}]}), "`type` at $.anyOf.0, which cannot be enforced"),
        (json_schema({"type": "string", "pattern": "(?=a)b"}), "look-around"),
        (json_schema({"type": "string", "minLength": "é" * 99}), "not a char boundary"),  # a panic in Rust
        (GrammarSpec("regex", "a("), "unclosed group"),
        (GrammarSpec("regex", r"[^\s\S]"), "no output matches"),
        (GrammarSpec("lark", "start: <nope>", "tools"), "unknown special token"),
        (GrammarSpec("lark", "start: nope", "tools"), "unknown name"),
    ],
)
def test_a_grammar_is_refused_with_the_reason(spec: GrammarSpec, reason: str) -> None:
    message = refusal(spec)

    assert message.startswith(f"`{spec.field}`: ")
    assert reason in message
    assert len(message) < 600 and "\n" not in message


def chain_of_references(length: int) -> dict[str, Any]:
    links = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(length)}
    return {"$defs": {**links, f"d{length}": {"type": "null"}}, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "maxItems": 10**6, "items": {"type": "array", "minItems": 10**6}},
        {"type": "string", "minLength": 10**6, "maxLength": 10**9},
        {"type": "string", "pattern": "^(a|b)*a(a|b){25}$"},
        {"type": "string", "pattern": "(((a{1,99}){1,99}){1,99}){1,99}"},
        {"enum": [f"value {i}" for i in range(10000)]},
        {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(2000)}},
        {"allOf": [{"anyOf": [{"properties": {f"a{i}_{j}": {}}} for i in range(40)]} for j in range(6)]},
        {"allOf": [{"anyOf": [{"const": i} for i in range(300)]}, {"anyOf": [{"const": i} for i in range(300)]}]},
        {"type": "object", "patternProperties": {f"^(a|b)*{i}c(a|b){{15}}$": {} for i in range(60)}},
    ],
)
def test_hostile_schemas_are_compiled_or_refused_soon(schema: Any) -> None:
    begin = time.monotonic()
    try:
        matcher = compiled(json_schema(schema))
        for seed in range(3):
            walk(matcher, seed, max_tokens=30)
    except (InvalidRequest, ValueError):
        pass

    assert time.monotonic() - begin < 30  # measured: 1 s


def test_a_long_chain_of_references_overflows_no_stack() -> None:
    # With threads of 8 MiB this ends the process; tried for real below the largest text.
    assert accepts(compiled(json_schema(chain_of_references(3000))), '{"a": {"a": null}}')


def test_an_object_with_500_optional_properties_can_be_written() -> None:
    names = [f"p{i}" for i in range(500)]
    matcher = compiled(json_schema({"type": "object", "properties": {name: {"type": "integer"} for name in names}}))

    assert accepts(matcher, '{"p7": 1, "p499": 2}')
