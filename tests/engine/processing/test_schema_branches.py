"""Which branches of a oneOf exclude each other."""

from typing import Any

import pytest

from engine.processing.schema_branches import overlapping

PLACES = {
    "/$defs/cat": {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]},
    "/$defs/dog": {"allOf": [{"type": "object", "properties": {"kind": {"enum": ["dog"]}}, "required": ["kind"]}]},
    "/$defs/loop": {"$ref": "#/$defs/loop"},
}


def tagged(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


@pytest.mark.parametrize(
    "branches",
    [
        [],
        [{}],
        [{"type": "string"}, {"type": "number"}, {"type": ["null", "array"]}],
        [{"const": 1}, {"const": True}, {"const": "1"}, {"const": [1]}],
        [{"enum": ["a", "b"]}, {"enum": ["c"]}],
        [{"type": "integer", "maximum": 3}, {"type": "number", "exclusiveMinimum": 3}],
        [{"type": "number", "exclusiveMaximum": 3}, {"type": "integer", "minimum": 3}],
        [{"const": 5}, {"type": "number", "maximum": 4.5}],
        [False, {}],
        [tagged(kind={"const": "a"}), tagged(kind={"const": "b"}), tagged(kind={"enum": ["c", "d"]})],
        [tagged(of=tagged(kind={"const": 1})), tagged(of=tagged(kind={"const": 2}))],
        [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
        [{"anyOf": [{"type": "null"}, {"type": "boolean"}]}, {"type": "string"}],
        [{"oneOf": [{"const": 1}, {"const": 2}]}, {"enum": [3, 4]}],
    ],
)
def test_branches_that_exclude_each_other_do_not_overlap(branches: list[Any]) -> None:
    assert overlapping(branches, PLACES) is None


@pytest.mark.parametrize(
    ("branches", "pair"),
    [
        ([{}, {}], (0, 1)),
        ([True, {"type": "null"}], (0, 1)),
        ([{"type": "integer"}, {"type": "string"}, {"type": "number"}], (0, 2)),
        ([{"const": 1}, {"const": 1.0}], (0, 1)),
        ([{"const": {"a": 1, "b": 2}}, {"const": {"b": 2, "a": 1}}], (0, 1)),
        ([{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 3}], (0, 1)),
        ([{"maximum": 1}, {"minimum": 2}], (0, 1)),  # strings satisfy both
        ([{"type": "string", "maxLength": 2}, {"type": "string", "minLength": 3}], (0, 1)),  # not compared
        ([tagged(kind={"const": "a"}), {"type": "object", "properties": {"kind": {"const": "b"}}}], (0, 1)),
        ([tagged(a={"const": 1}), tagged(b={"const": 2})], (0, 1)),
        ([{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/cat"}], (0, 1)),
        ([{"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/loop"}], (0, 1)),
        ([{"$ref": "#/$defs/missing"}, {"type": "null"}], (0, 1)),
        ([{"enum": "a"}, {"const": "a"}], (0, 1)),
    ],
)
def test_the_first_branches_that_may_both_hold_are_returned(branches: list[Any], pair: tuple[int, int]) -> None:
    assert overlapping(branches, PLACES) == pair


def test_a_search_that_is_too_long_ends_without_a_promise() -> None:
    many = [{"anyOf": [{"const": f"{i}-{k}"} for k in range(40)]} for i in range(40)]

    assert overlapping(many, {}) is not None
