"""Schemas of tools that cannot be enforced: left open and named without strict, refused by name and place with it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from engine.config import GrammarConfig
from engine.errors import InvalidRequest
from engine.processing.answer_constraint import answer_constraint
from engine.processing.checkpoint import DEMO_MODEL
from engine.processing.grammar import GrammarCompiler
from engine.processing.tokenizer import ChatTokenizer
from engine.processing.tool_schema import tool_schema
from engine.protocol import GrammarSpec
from tests.engine.processing.tool_templates import FAMILIES
from tests.engine.processing.walks import compiled, walk

DEMO = ChatTokenizer(DEMO_MODEL)


def of(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"v": schema}, "required": ["v"], **more}


def items(schema: Any) -> dict[str, Any]:
    return of({"type": "array", "items": schema})


# parameters, what of them is left open in the XML format
UNUSUAL: dict[str, tuple[Any, list[str]]] = {
    "regex that is none": (items({"type": "string", "pattern": "a("}), ["$.properties.v.items.pattern"]),
    "lookahead": (items({"type": "string", "pattern": "^(?=a)b"}), ["$.properties.v.items.pattern"]),
    "backreference": (items({"type": "string", "pattern": r"(a)\1"}), ["$.properties.v.items.pattern"]),
    "pattern of another type": (items({"type": "string", "pattern": 5}), ["$.properties.v.items.pattern"]),
    "nested quantifiers": (items({"type": "string", "pattern": "(((a{1,9}){1,9}){1,9}){1,9}"}), []),
    "type null in a list": (of({"type": ["string", "null", None]}), ["$.properties.v.type"]),
    "no types": (of({"type": []}), ["$.properties.v.type"]),
    "unknown type": (of({"type": "text"}), ["$.properties.v.type"]),
    "type of another type": (of({"type": 7}), ["$.properties.v.type"]),
    "schema true": (of(True), []),
    "schema false": (of(False), ["$.properties.v"]),
    "schema null": (of(None), ["$.properties.v"]),
    "schema string": (of("string"), ["$.properties.v"]),
    "not": (of({"not": {"type": "string"}}), ["$.properties.v.not"]),
    "dependentSchemas": (of({"type": "object", "dependentSchemas": {"a": False}}), ["$.properties.v.dependentSchemas"]),
    "unevaluated": (
        of({"type": "object", "unevaluatedProperties": False}),
        ["$.properties.v.unevaluatedProperties"],
    ),
    "if": (of({"if": {}, "then": False}), ["$.properties.v.if", "$.properties.v.then"]),
    "nullable": (of({"type": "string", "nullable": True}), ["$.properties.v.nullable"]),
    "bounds that exclude all": (of({"type": "integer", "minimum": 5, "maximum": 3}), ["$.properties.v.maximum"]),
    "sizes that exclude all": (of({"type": "array", "minItems": 9, "maxItems": 2}), ["$.properties.v.maxItems"]),
    "types that exclude all": (
        of({"allOf": [{"type": "string"}, {"type": "integer"}]}),
        ["$.properties.v.allOf.1.type"],
    ),
    "no values": (of({"enum": []}), ["$.properties.v.enum"]),
    "oneOf that overlaps": (of({"oneOf": [{"type": "integer"}, {"type": "number"}]}), ["$.properties.v.oneOf"]),
    "anyOf of another type": (of({"anyOf": 3}), ["$.properties.v.anyOf"]),
    "bound of another type": (of({"type": "integer", "minimum": "5"}), ["$.properties.v.minimum"]),
    "number that is inexact": (of({"type": "integer", "maximum": 2**63}), ["$.properties.v.maximum"]),
    "two places": (
        {"type": "object", "properties": {"a": {"enum": []}, "b": {"type": "array", "items": 5}}, "required": ["a"]},
        ["$.properties.a.enum", "$.properties.b.items"],
    ),
    "minProperties": (
        of({"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1}),
        ["$.properties.v.minProperties"],
    ),
    "patterns that overlap": (
        of({"type": "object", "patternProperties": {"a+": {"type": "integer"}, "aa+": {}}}),
        ["$.properties.v.patternProperties"],
    ),
    "reference to a page": (of({"$ref": "http://a/b"}), ["$.properties.v.$ref"]),
    "reference to nothing": (items({"$ref": "#/$defs/nope"}), ["$.properties.v.items.$ref"]),
    "reference to itself": (of({"$ref": "#/properties/v"}), []),
    "references in a circle": (
        {**of({"$ref": "#/$defs/a"}), "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        [],
    ),
    "reference to the top": ({"$ref": "#"}, ["$"]),
    "surrogate": (of({"enum": ["\ud800"]}), ["$.properties.v.enum"]),
    "keyword at the top": ({**of({}), "anyOf": [{"required": ["v"]}]}, ["$.anyOf"]),
    "array at the top": ({"type": "array", "items": {}}, ["$"]),
    "properties that are a list": ({"type": "object", "properties": ["v"]}, ["$"]),
    "required that is a text": ({**of({}), "required": "v"}, ["$"]),
    "required that is not declared": ({**of({}), "required": ["v", "w"]}, ["$.required"]),
    "deep": (json.loads('{"properties": {"v": ' + '{"items": ' * 30 + "{}" + "}" * 32), []),
    "larger than a grammar may be": (of({"enum": [f"value {i}" for i in range(20_000)]}), ["$"]),
}
NAMES = {"a b": [], "é": [], 'q"': [], "a\\": [], "": [""], "<b>": ["<b>"], "a\nb": ["a\nb"], " c": [" c"]}


def constraint(tokenizer: ChatTokenizer, parameters: Any, strict: bool = False) -> GrammarSpec:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": strict}}]
    given: dict[str, Any] = {"choice_mode": "required", "choice_names": (), "parallel": False, "grammar": None}
    grammar, _ = answer_constraint(tokenizer, tools=tools, is_thinking=False, budget=None, **given)
    assert grammar is not None
    return grammar


@pytest.mark.parametrize("name", UNUSUAL)
def test_an_unusual_schema_is_left_open_where_it_has_to_be_and_named(name: str) -> None:
    parameters, left_open = UNUSUAL[name]
    spec = constraint(DEMO, parameters)

    assert spec.left_open == tuple(f"tools (f): {place}" for place in left_open)
    for seed in range(2):
        walk(compiled(spec), seed, max_tokens=40)


@pytest.mark.parametrize(
    "name", [name for name, (_, left_open) in UNUSUAL.items() if left_open and "larger" not in name]
)
def test_an_unusual_schema_is_refused_by_name_with_strict(name: str) -> None:
    parameters, _ = UNUSUAL[name]

    with pytest.raises(InvalidRequest) as refusal:
        constraint(DEMO, parameters, strict=True)

    assert refusal.value.field == "tools[0].function.parameters"
    named = (" at $", "`$ref` is", "`type` is", "`properties` is", "`required` is", "`required` names")
    assert any(place in refusal.value.message for place in named)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_of_any_name_are_written_or_named(name: str) -> None:
    spec = constraint(DEMO, {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]})

    assert spec.left_open == tuple(f"tools (f): $.properties.{one}" for one in NAMES[name])
    assert walk(compiled(spec), 1, max_tokens=60) is not None


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> tuple[ChatTokenizer, GrammarCompiler]:
    out: Path = tmp_path_factory.mktemp("hermes") / "model"
    tokenizer = FAMILIES["hermes"].tokenizer(out)
    return tokenizer, GrammarCompiler(out, len(tokenizer._tokenizer.get_vocab()), (2,), GrammarConfig())


@pytest.mark.parametrize("name", UNUSUAL)
def test_an_unusual_schema_compiles_in_a_json_format(hermes: Any, name: str) -> None:
    tokenizer, compiler = hermes
    spec = constraint(tokenizer, UNUSUAL[name][0])

    assert asyncio.run(compiler.compile(spec)).masks().any()


def test_equal_schemas_are_searched_once_and_not_changed() -> None:
    parameters = UNUSUAL["two places"][0]
    before = json.dumps(parameters)

    first, second = tool_schema(parameters, False), tool_schema(parameters, False)
    first[0].clear()

    assert second == tool_schema(parameters, False) and json.dumps(parameters) == before
