"""Arguments of calls are JSON of the types that the schema allows."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.processing.tool_arguments import ToolTypes, dump_json

PROPERTIES: dict[str, Any] = {
    "s": {"type": "string"},
    "i": {"type": "integer"},
    "n": {"type": "number"},
    "b": {"type": "boolean"},
    "o": {"type": "object"},
    "l": {"type": "array"},
    "maybe": {"type": ["string", "null"]},
    "union": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
    "ref": {"$ref": "#/$defs/point"},
    "enum": {"enum": ["1", 2, "null"]},
    "loop": {"$ref": "#/properties/loop"},
    "free": {},
}
SCHEMA = {"type": "object", "properties": PROPERTIES, "$defs": {"point": {"type": "object"}}}
TYPES = ToolTypes([{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}])

TYPED = [
    ("s", "123", "123"),
    ("s", "null", "null"),
    ("s", '{"a": 1}', '{"a": 1}'),
    ("i", "123", 123),
    ("i", " 5.0 ", 5),
    ("i", "12345678901234567890", 12345678901234567890),
    ("i", "five", "five"),
    ("n", "1.5", 1.5),
    ("n", "2", 2),
    ("n", "1e999", "1e999"),
    ("n", "NaN", "NaN"),
    ("b", "True", True),
    ("b", "false", False),
    ("o", '{"a": [1, "x"]}', {"a": [1, "x"]}),
    ("o", "{broken", "{broken"),
    ("l", "[1,\n 2]", [1, 2]),
    ("l", "[1e999]", "[1e999]"),
    ("maybe", "null", None),
    ("maybe", "12", "12"),
    ("union", "12", 12),
    ("union", "twelve", "twelve"),
    ("ref", '{"x": 1}', {"x": 1}),
    ("enum", "1", "1"),
    ("enum", "2", 2),
    ("enum", "null", "null"),
    ("loop", "1", "1"),
    ("free", "12", "12"),
    ("free", "[1]", [1]),
    ("undeclared", "12", "12"),
    ("i", "[" * 5000, "[" * 5000),
]


@pytest.mark.parametrize(("key", "text", "value"), TYPED)
def test_a_text_becomes_a_value_of_the_schemas_type(key: str, text: str, value: Any):
    arguments = json.loads(TYPES.call_of_texts("f", {key: text}).arguments)
    assert arguments == {key: value} and type(arguments[key]) is type(value)


def test_arguments_that_came_as_json_keep_their_types():
    call = TYPES.call("f", {"s": "12", "i": 3, "undeclared": "4", "o": '{"a": 1}', "free": "[1]"})
    assert json.loads(call.arguments) == {"s": "12", "i": 3, "undeclared": "4", "o": {"a": 1}, "free": "[1]"}


@pytest.mark.parametrize("tools", [[], [{}], [{"function": {"name": "f", "parameters": {"properties": 3}}}]])
def test_arguments_of_tools_without_a_schema_stay_text(tools: list[Any]):
    assert ToolTypes(tools).call_of_texts("f", {"a": "1"}).arguments == '{"a": "1"}'


@given(text=st.text(max_size=20), key=st.sampled_from(sorted(PROPERTIES)))
def test_arguments_are_always_valid_json(text: str, key: str):
    arguments = TYPES.call_of_texts("f", {key: text}).arguments
    assert isinstance(json.loads(arguments), dict) and arguments.encode()


def test_half_a_surrogate_pair_is_escaped_so_that_it_can_be_encoded():
    assert dump_json({"a": "\ud800", "b": "é"}).encode()
