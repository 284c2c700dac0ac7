"""Random JSON Schemas of what grammars can enforce, and random instances that lie near them."""

import random
from collections.abc import Callable
from decimal import Decimal
from typing import Any

NUMBERS = [
    *("-1000000", "-10", "-9.75", "-2.5", "-1", "-0.95", "-0.1", "0", "0.05", "0.1", "0.25", "0.5", "0.9", "0.95", "1"),
    *("1.5", "2", "2.05", "3", "7", "9.99", "10", "10.5", "12", "99", "100", "128.125", "1000", "123456.789"),
]
STRINGS = [
    *("", "a", "ab", "abc", "b", "x1", "é", "日本", "a b", 'a"b', "a\\b", "a\nb", "\t", "😀", "null", "true", "1"),
    *("</parameter>", "<think>", "[TOOL_CALLS]", "2024-02-10", "10:20:30Z", "a@b.de", "127.0.0.1", "::1"),
]
CONTROLS = ("\x01", "a\x1fb", "\x7f", "\x00\x00")
"""Strings that a grammar allows only where a schema names them."""
PATTERNS = (
    "^a",
    "b$",
    "^[a-c]+$",
    "^a|b$",
    r"^\d{1,3}$",
    "x",
    r"^[a-z]+\s?$",
    r"^[^\x00-\x1f]*$",
    "^(ab|a)*$",
    "^.{2}$",
    "é",
)
FORMATS = ("date", "time", "date-time", "email", "ipv4", "ipv6", "uuid", "duration", "hostname", "uri", "color")
NAMES = ("a", "b", "c", "ab", "d/e", "é", "x y", 'q"')
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


def random_schema(rng: random.Random) -> dict[str, Any]:
    """Return a schema whose numbers are integers and decimals, and which may refer to itself."""
    schema = _schema(rng, 3)
    if not isinstance(schema, dict):
        return {"allOf": [schema]}
    leaf = rng.choice([_number, _string, _values])(rng, 0)
    node = {"type": "object", "properties": {"a": {"$ref": "#/$defs/node"}, "b": leaf}}
    return {**schema, "$defs": {"node": node, "list": {"type": "array", "items": {"$ref": "#/$defs/list"}}}}


def _schema(rng: random.Random, depth: int) -> Any:
    makers: list[Callable[[random.Random, int], Any]] = [_number, _number, _string, _values, _any_type]
    if depth > 0:
        makers += [_array, _object, _object, _combined, _combined]
    if rng.random() < 0.04:
        return rng.random() < 0.7
    schema = rng.choice(makers)(rng, depth)
    if rng.random() < 0.08:
        schema |= {"$ref": rng.choice(["#/$defs/node", "#/$defs/list"])}
    if rng.random() < 0.03:
        schema |= rng.choice([{"not": {"type": "null"}}, {"uniqueItems": True}, {"if": {"minimum": 2}, "then": False}])
    if rng.random() < 0.1:
        schema |= {"description": "d", "examples": [1], "title": None}
    return schema


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": rng.choice(["integer", "number", "number", ["number", "null"]])}
    for keyword in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        if rng.random() < 0.4:
            schema[keyword] = _decimal(rng)
    if rng.random() < 0.15:
        schema["multipleOf"] = rng.choice(
            [1, 2, 3, 7, 10, Decimal("0.5"), Decimal("0.01"), Decimal("0.1"), Decimal("2.5")]
        )
    if rng.random() < 0.2:
        del schema["type"]
    return schema


def _decimal(rng: random.Random) -> Any:
    number = Decimal(rng.choice(NUMBERS))
    if rng.random() < 0.3:
        number = Decimal(rng.randrange(-3000, 3000)).scaleb(-rng.randrange(4))
    return int(number) if number == int(number) else number


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": rng.choice(["string", "string", ["string", "integer"]])}
    if rng.random() < 0.3:
        schema["minLength"] = rng.randrange(4)
    if rng.random() < 0.3:
        schema["maxLength"] = rng.choice([0, 1, 2, 3, 6, 6.0])
    if rng.random() < 0.3:
        schema["pattern"] = rng.choice(PATTERNS)
    if rng.random() < 0.2:
        schema["format"] = rng.choice(FORMATS)
    return schema


def _values(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.4:
        return {"const": rng.choice(CONTROLS) if rng.random() < 0.1 else random_value(rng, 2)}
    more = rng.sample(CONTROLS, 1) if rng.random() < 0.1 else []
    return {"enum": [random_value(rng, 2) for _ in range(rng.randrange(1, 5))] + more}


def _any_type(rng: random.Random, depth: int) -> dict[str, Any]:
    some = rng.sample(TYPES, rng.randrange(1, 4))
    return rng.choice([{}, {"type": some}, {"type": some[0]}])


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array"} if rng.random() < 0.9 else {}
    if rng.random() < 0.7:
        schema["items"] = _schema(rng, depth - 1)
    if rng.random() < 0.4:
        schema["prefixItems"] = [_schema(rng, depth - 1) for _ in range(rng.randrange(1, 3))]
    if rng.random() < 0.3:
        schema["minItems"] = rng.randrange(3)
    if rng.random() < 0.3:
        schema["maxItems"] = rng.choice([0, 1, 2, 3, 2.0])
    return schema


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"} if rng.random() < 0.9 else {}
    names = rng.sample(NAMES, rng.randrange(4))
    if names:
        schema["properties"] = {name: _schema(rng, depth - 1) for name in names}
    if rng.random() < 0.5:
        schema["required"] = rng.sample(NAMES, 1) if rng.random() < 0.15 else [n for n in names if rng.random() < 0.6]
    if rng.random() < 0.6:
        schema["additionalProperties"] = rng.choice([False, False, True, _schema(rng, depth - 1)])
    if rng.random() < 0.2:
        patterns = rng.sample(["^a", "^x", "b$", "^[c-e]", "^z+$"], rng.randrange(1, 3))
        schema["patternProperties"] = {pattern: _schema(rng, depth - 1) for pattern in patterns}
    if rng.random() < 0.15:
        schema["minProperties"] = rng.randrange(3)
    if rng.random() < 0.15:
        schema["maxProperties"] = rng.randrange(4)
    return schema


def _combined(rng: random.Random, depth: int) -> dict[str, Any]:
    keyword = rng.choice(["anyOf", "oneOf", "oneOf", "allOf"])
    schema = {keyword: [_schema(rng, depth - 1) for _ in range(rng.randrange(1, 4))]}
    if rng.random() < 0.3:
        schema |= rng.choice([_number, _string, _object, _array])(rng, depth - 1)
    if rng.random() < 0.1:
        schema |= {rng.choice(["anyOf", "allOf"]): [_schema(rng, depth - 1)]}
    return schema


def random_value(rng: random.Random, depth: int) -> Any:
    """Return a JSON value with at most `depth` levels of arrays and objects."""
    kind = rng.randrange(7 if depth > 0 else 5)
    if kind == 0:
        return rng.choice([None, True, False])
    if kind in (1, 2):
        return _decimal(rng)
    if kind in (3, 4):
        return rng.choice(STRINGS)
    parts = [random_value(rng, depth - 1) for _ in range(rng.randrange(3))]
    return parts if kind == 5 else dict(zip(rng.sample(NAMES, len(parts)), parts, strict=True))


def near_value(rng: random.Random, schema: Any, root: dict[str, Any], depth: int = 5) -> Any:
    """Return a value that satisfies many keywords of a schema, though rarely all."""
    if not isinstance(schema, dict) or not schema or depth == 0 or rng.random() < 0.04:
        return random_value(rng, 1)
    if "$ref" in schema and rng.random() < 0.7:
        target = root
        for step in schema["$ref"].split("/")[1:]:
            target = target[step]
        return near_value(rng, target, root, depth - 1)
    options = [part for key in ("anyOf", "oneOf", "allOf") for part in schema.get(key, ())]
    if options and rng.random() < 0.8:
        return near_value(rng, rng.choice(options), root, depth - 1)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return rng.choice(schema["enum"])
    kinds = schema.get("type") or _kinds_of(schema)
    kind = kinds if isinstance(kinds, str) else rng.choice(list(kinds))
    if kind == "object":
        return _near_object(rng, schema, root, depth)
    if kind == "array":
        return _near_array(rng, schema, root, depth)
    if kind in ("number", "integer"):
        return _near_number(rng, schema, kind)
    return rng.choice(STRINGS) if kind == "string" else None if kind == "null" else rng.random() < 0.5


def _kinds_of(schema: dict[str, Any]) -> tuple[str, ...]:
    if {"properties", "patternProperties", "required", "additionalProperties", "minProperties"} & set(schema):
        return ("object",)
    if {"items", "prefixItems", "minItems", "maxItems"} & set(schema):
        return ("array",)
    return ("number",) if {"minimum", "maximum", "exclusiveMinimum", "multipleOf"} & set(schema) else TYPES


def _near_object(rng: random.Random, schema: dict[str, Any], root: dict[str, Any], depth: int) -> dict[str, Any]:
    properties = schema.get("properties", {})
    names = [name for name in properties if name in schema.get("required", ()) or rng.random() < 0.5]
    value = {name: near_value(rng, properties[name], root, depth - 1) for name in names}
    for pattern, part in schema.get("patternProperties", {}).items():
        if rng.random() < 0.5:
            value[pattern.strip("^$+")[-1:] + "9"] = near_value(rng, part, root, depth - 1)
    if rng.random() < 0.3:
        value[rng.choice(NAMES)] = near_value(rng, schema.get("additionalProperties", {}), root, depth - 1)
    return value


def _near_array(rng: random.Random, schema: dict[str, Any], root: dict[str, Any], depth: int) -> list[Any]:
    prefix = schema.get("prefixItems", [])
    parts = [*prefix, *[schema.get("items", {})] * 2][: rng.randrange(len(prefix) + 3)]
    return [near_value(rng, part, root, depth - 1) for part in parts]


def _near_number(rng: random.Random, schema: dict[str, Any], kind: str) -> Any:
    bounds = [schema[key] for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum") if key in schema]
    number = Decimal(str(rng.choice(bounds))) if bounds and rng.random() < 0.8 else Decimal(str(_decimal(rng)))
    if len(bounds) > 1 and rng.random() < 0.3:
        number = (Decimal(str(min(bounds))) + Decimal(str(max(bounds)))) / 2
    number += rng.choice([0, 0, 1, -1, Decimal("0.1"), Decimal("-0.1"), Decimal("0.01"), Decimal("-0.05")])
    if "multipleOf" in schema and rng.random() < 0.7:
        number = number // Decimal(str(schema["multipleOf"])) * Decimal(str(schema["multipleOf"]))
    if kind == "integer" and rng.random() < 0.8:
        number = Decimal(int(number))
    return int(number) if number == int(number) else number
