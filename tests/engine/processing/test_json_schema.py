"""Every keyword of JSON Schema is enforced by the masks or refused by name."""

import json
from typing import Any

import jsonschema
import pytest

from engine.errors import EngineFailed, InvalidRequest
from engine.processing.free_limits import FreeLimits
from engine.processing.json_schema import lenient_schema, strict_schema
from tests.engine.processing.walks import accepts, compiled, json_schema

OBJECT = {"type": "object"}
A = {"properties": {"a": {"type": "integer"}}}
KINDS = {name: {**OBJECT, "properties": {"k": {"const": k}}, "required": ["k"]} for k, name in ((1, "a"), (2, "b"))}

# keyword: schema, an instance that is valid, one that is not
ENFORCED: list[tuple[str, Any, str, str]] = [
    ("$ref", {"$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}}, "null", "1"),
    ("$ref", {"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": {"type": "null"}}}, "null", "1"),
    ("$ref", {"properties": {"a": {"$ref": "#"}}, "type": "object"}, '{"a": {"a": {}}}', '{"a": {"a": 1}}'),
    ("$ref", {"$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}, "maxLength": 1}, '"a"', '"aa"'),
    ("$defs", {"$ref": "#/$defs/a", "$defs": {"a": {"enum": [7]}}}, "7", "8"),
    ("definitions", {"$ref": "#/definitions/a", "definitions": {"a": {"enum": [7]}}}, "7", "8"),
    ("type", {"type": "integer"}, "-12", "1.5"),
    ("type", {"type": ["string", "null"]}, "null", "true"),
    ("enum", {"enum": ["a", 2, None, {"b": []}]}, '{"b": []}', '"b"'),
    ("const", {"const": {"a": [1.5, True]}}, '{"a": [1.5, true]}', '{"a": [1.5, false]}'),
    ("allOf", {"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 4}]}, "3", "5"),
    ("anyOf", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", "true"),
    ("oneOf", {"oneOf": [{"type": "integer"}, {"type": "null"}]}, "null", "true"),
    ("oneOf", {"oneOf": [{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 5}]}, "5", "4"),
    ("oneOf", {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": KINDS}, '{"k": 2}', '{"k": 3}'),
    ("const", {"const": "a\x01b"}, '"a\\u0001b"', '"ab"'),
    ("const", {"const": ["\x7f"]}, '["\\u007f"]', '["\\u007e"]'),
    ("enum", {"enum": ["\x00", "a"]}, '"\\u0000"', '""'),
    ("pattern", {"type": "string", "pattern": "^a\\x1fb$"}, '"a\\u001fb"', '"ab"'),
    ("properties", {**OBJECT, **A}, '{"a": 1}', '{"a": "x"}'),
    ("properties", {**OBJECT, **A}, '{"a": 1, "b": 2}', '{"\\u0061": "x"}'),
    ("patternProperties", {**OBJECT, "patternProperties": {"^a": {"type": "null"}}}, '{"ab": null}', '{"ab": 1}'),
    ("additionalProperties", {**OBJECT, **A, "additionalProperties": False}, '{"a": 1}', '{"a": 1, "b": 1}'),
    ("additionalProperties", {**OBJECT, "additionalProperties": {"type": "null"}}, '{"x": null}', '{"x": 1}'),
    ("required", {**OBJECT, **A, "required": ["a"]}, '{"a": 1}', "{}"),
    ("minProperties", {**OBJECT, "minProperties": 1}, '{"a": 1}', "{}"),
    ("minProperties", {**OBJECT, "required": ["a"], "minProperties": 2}, '{"a": 1, "b": 1}', '{"a": 1}'),
    ("maxProperties", {**OBJECT, "maxProperties": 1}, '{"a": 1}', '{"a": 1, "b": 1}'),
    ("items", {"type": "array", "items": {"type": "null"}}, "[null]", "[1]"),
    ("items", {"type": "array", "items": [{"type": "null"}], "additionalItems": False}, "[null]", "[null, 1]"),
    ("additionalItems", {"items": [{}], "additionalItems": {"const": 2}, "type": "array"}, "[1, 2]", "[1, 3]"),
    ("prefixItems", {"type": "array", "prefixItems": [{"const": 1}, {"const": 2}]}, "[1, 2, 3]", "[2]"),
    ("minItems", {"type": "array", "minItems": 2}, "[1, 2]", "[1]"),
    ("maxItems", {"type": "array", "maxItems": 1}, "[1]", "[1, 2]"),
    ("minLength", {"type": "string", "minLength": 2}, '"é😀"', '"é"'),
    ("maxLength", {"type": "string", "maxLength": 2}, '"\\n😀"', '"abc"'),
    ("pattern", {"type": "string", "pattern": "^a|b$"}, '"xb"', '"xa"'),
    ("minimum", {"type": "number", "minimum": -1.5}, "-1.5", "-1.6"),
    ("maximum", {"type": "integer", "maximum": 10}, "10", "11"),
    ("exclusiveMinimum", {"type": "number", "exclusiveMinimum": 1}, "1.01", "1.0"),
    ("exclusiveMaximum", {"type": "integer", "exclusiveMaximum": 10}, "9", "10"),
    ("exclusiveMinimum", {"type": "number", "exclusiveMinimum": 0, "maximum": 0.1}, "0.05", "0"),
    ("exclusiveMinimum", {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1e-3}, "0.0001", "0"),
    ("exclusiveMaximum", {"type": "number", "exclusiveMaximum": 0, "minimum": -0.1}, "-0.05", "-0"),
    ("exclusiveMinimum", {"type": "integer", "exclusiveMinimum": 0, "minimum": -3}, "1", "0"),
    ("multipleOf", {"type": "integer", "multipleOf": 3}, "-9", "10"),
    ("multipleOf", {"type": "number", "multipleOf": 0.25}, "1.75", "1.8"),
    ("format", {"type": "string", "format": "date-time"}, '"2026-11-20T10:00:00Z"', '"2026-11-31T10:00:00Z"'),
    ("format", {"type": "string", "format": "time"}, '"10:00:00Z"', '"25:00:00Z"'),
    ("format", {"type": "string", "format": "date"}, '"2026-11-20"', '"2026-13-20"'),
    ("format", {"type": "string", "format": "duration"}, '"P1DT2H"', '"1 day"'),
    ("format", {"type": "string", "format": "email"}, '"a@b.de"', '"a.b.de"'),
    ("format", {"type": "string", "format": "hostname"}, '"a.b"', '"a..b"'),
    ("format", {"type": "string", "format": "ipv4"}, '"10.0.0.1"', '"10.0.0.256"'),
    ("format", {"type": "string", "format": "ipv6"}, '"::1"', '"::g"'),
    ("format", {"type": "string", "format": "uuid"}, f'"{"0" * 8}-0000-0000-0000-{"0" * 12}"', '"00"'),
    ("format", {"type": "string", "format": "uri"}, '"http://a/b"', '"a b"'),
]

REFUSED: list[tuple[str, Any]] = [
    ("not", {"not": {"type": "string"}}),
    ("if", {"if": {"type": "string"}, "then": {"minLength": 2}}),
    ("then", {"then": {"minLength": 2}}),
    ("else", {"else": {"minLength": 2}}),
    ("contains", {"type": "array", "contains": {"const": 1}}),
    ("minContains", {"type": "array", "minContains": 2}),
    ("maxContains", {"type": "array", "maxContains": 2}),
    ("uniqueItems", {"type": "array", "uniqueItems": True}),
    ("propertyNames", {**OBJECT, "propertyNames": {"maxLength": 2}}),
    ("dependentRequired", {**OBJECT, "dependentRequired": {"a": ["b"]}}),
    ("dependentSchemas", {**OBJECT, "dependentSchemas": {"a": False}}),
    ("dependencies", {**OBJECT, "dependencies": {"a": ["b"]}}),
    ("unevaluatedProperties", {**OBJECT, "unevaluatedProperties": False}),
    ("unevaluatedItems", {"type": "array", "unevaluatedItems": False}),
    ("$dynamicRef", {"$dynamicRef": "#a"}),
    ("$dynamicAnchor", {"$dynamicAnchor": "a"}),
    ("$anchor", {"$anchor": "a"}),
    ("$recursiveRef", {"$recursiveRef": "#"}),
    ("$vocabulary", {"$vocabulary": {}}),
    ("nullable", {"type": "string", "nullable": True}),
    ("maxlength", {"type": "string", "maxlength": 3}),
    ("x-guidance", {**OBJECT, "x-guidance": {"lenient": True}}),
    ("$id", {**OBJECT, "properties": {"a": {"$id": "http://a/b"}}}),
    ("$ref", {"$ref": "http://a/b"}),
    ("$ref", {"$ref": "file:///etc/passwd"}),
    ("$ref", {"$ref": "other.json#/a"}),
    ("$ref", {"$ref": "#name"}),
    ("$ref", {"$ref": "#/$defs/a"}),
    ("$ref", {"$ref": "#/examples/0", "examples": [{"not": {}}]}),
    ("format", {"type": "string", "format": 3}),
    ("patternProperties", {**OBJECT, **A, "patternProperties": {"^a$": {}}, "additionalProperties": False}),
    ("patternProperties", {**OBJECT, **A, "patternProperties": {"x": {}, "^[a-c]": {}}}),
    ("const", {**OBJECT, "properties": {"v": {"const": "a\x01b"}}}),
    ("additionalItems", {"type": "array", "prefixItems": [{}], "additionalItems": False}),
    ("prefixItems", {"type": "array", "prefixItems": [{"const": 1}], "items": [{"const": 2}]}),
    ("minProperties", {**OBJECT, "minProperties": 2}),
    ("const", {"const": 2**53 + 1}),
    ("enum", {"enum": [[{"a": 12345678901234567890}]]}),
    ("maximum", {"type": "integer", "maximum": 1e300}),
    ("multipleOf", {"type": "integer", "multipleOf": 1000003}),
    ("multipleOf", {"type": "number", "multipleOf": 1e-10}),
    ("multipleOf", {"allOf": [{"multipleOf": 99991}, {"multipleOf": 99989}]}),
    ("multipleOf", {"type": "integer", "multipleOf": 0}),
]

HARMLESS = {
    **{"$schema": "http://json-schema.org/draft-04/schema#", "$id": "http://a/b", "$comment": "c", "title": "t"},
    **{"description": "d", "default": 1, "examples": [1], "deprecated": True, "readOnly": True, "writeOnly": True},
    **{"format": "uint32", "pattern": None, "required": None, "properties": None, "additionalProperties": None},
    **{"contentMediaType": "text/plain", "contentEncoding": "base64", "contentSchema": {}, "x-order": 3},
}

DRAFT_2020_12 = """$schema $id $ref $anchor $dynamicRef $dynamicAnchor $vocabulary $comment $defs
    prefixItems items contains additionalProperties properties patternProperties dependentSchemas propertyNames
    if then else allOf anyOf oneOf not unevaluatedItems unevaluatedProperties
    type enum const multipleOf maximum exclusiveMaximum minimum exclusiveMinimum maxLength minLength pattern
    maxItems minItems uniqueItems maxContains minContains maxProperties minProperties required dependentRequired
    format contentEncoding contentMediaType contentSchema
    title description default deprecated readOnly writeOnly examples"""


def is_valid(schema: Any, instance: Any) -> bool:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    return jsonschema.Draft202012Validator(schema, format_checker=checker).is_valid(instance)


@pytest.mark.parametrize(("keyword", "schema", "valid", "invalid"), ENFORCED)
def test_a_keyword_is_enforced(keyword: str, schema: Any, valid: str, invalid: str) -> None:
    matcher = compiled(json_schema(schema))

    assert accepts(matcher, valid)
    assert not accepts(matcher, invalid)


@pytest.mark.parametrize(("keyword", "schema", "valid", "invalid"), ENFORCED)
def test_the_enforced_cases_agree_with_the_jsonschema_library(
    keyword: str, schema: Any, valid: str, invalid: str
) -> None:
    draft = jsonschema.Draft7Validator if isinstance(schema.get("items"), list) else jsonschema.Draft202012Validator

    assert keyword in json.dumps(schema)
    assert draft(schema).is_valid(json.loads(valid))
    assert keyword == "format" or not draft(schema).is_valid(json.loads(invalid))


def test_digits_in_patterns_are_those_of_ecmascript() -> None:
    matcher = compiled(json_schema({"type": "string", "pattern": r"^\d+$"}))

    assert accepts(matcher, '"12"') and not accepts(matcher, '"٣"')


@pytest.mark.parametrize(("keyword", "schema"), REFUSED)
@pytest.mark.parametrize("place", ["$", "$.properties.x"])
def test_a_keyword_is_refused_by_name_and_place(keyword: str, schema: Any, place: str) -> None:
    whole = schema if place == "$" else {"type": "object", "properties": {"x": schema}}

    with pytest.raises(InvalidRequest) as refusal:
        compiled(json_schema(whole))

    assert refusal.value.message.startswith(f"`response_format`: the schema uses `{keyword}` at {place}")
    assert refusal.value.field == "response_format"


def test_annotations_do_not_change_the_enforced_schema() -> None:
    assert strict_schema({**HARMLESS, "type": "null"}) == {"type": "null"}
    assert accepts(compiled(json_schema({**HARMLESS, "const": 3})), "3")
    assert not accepts(compiled(json_schema({**HARMLESS, "const": 3})), "4")


def test_every_keyword_of_the_draft_has_a_test_case() -> None:
    cases = {case[0] for case in [*ENFORCED, *REFUSED]} | set(HARMLESS)

    assert set(DRAFT_2020_12.split()) <= cases


@pytest.mark.parametrize("value", [True, 3, [], None])
def test_a_schema_must_be_an_object(value: Any) -> None:
    with pytest.raises(ValueError, match="expected an object"):
        strict_schema(value)


def test_the_lenient_form_drops_unenforceable_keywords_and_does_not_change_the_original() -> None:
    schema = {
        "type": "array",
        "uniqueItems": True,
        "items": {"type": "string", "format": "color", "maxLength": 2, "$ref": "http://a/b"},
    }
    before = json.dumps(schema)

    assert lenient_schema(schema) == (
        {"type": "array", "items": {"type": "string", "maxLength": 2}},
        ["$.uniqueItems", "$.items.$ref"],
    )
    assert json.dumps(schema) == before


def test_references_are_dropped_when_the_lenient_form_drops_their_target() -> None:
    schema = {"items": [{"type": "null"}], "prefixItems": [{"type": "null"}], "not": {"$ref": "#/prefixItems/0"}}
    schema["additionalProperties"] = {"$ref": "#/prefixItems/0"}

    assert lenient_schema(schema) == (
        {"items": [{"type": "null"}], "additionalProperties": {}},
        ["$.prefixItems", "$.not", "$.additionalProperties.$ref"],
    )


@pytest.mark.parametrize(
    "value",
    [
        5,
        [],
        {},
        {"max_characters": 40},
        {"max_characters": 40, "max_items": 0},
        {"max_characters": 40, "max_items": True},
        {"max_characters": "40", "max_items": 3},
        {"max_characters": 40, "max_items": 3, "max_depth": 2},
    ],
)
def test_limits_of_a_model_that_are_not_two_positive_integers_are_named(value: Any):
    with pytest.raises(EngineFailed) as failed:
        FreeLimits.of(value)
    assert json.dumps(value) in str(failed.value)
    assert "positive integers max_characters and max_items" in str(failed.value)


def test_limits_of_a_model_are_read():
    assert FreeLimits.of({"max_items": 3, "max_characters": 40}) == FreeLimits(40, 3)
