"""Whether the branches of a `oneOf` exclude each other: then it is an `anyOf`, which grammars can enforce."""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

MAX_COMPARISONS = 20_000
MAX_DEPTH = 8
"""Limits of the search for a difference, in references, combined schemas and required properties."""

TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})


def overlapping(branches: list[Any], places: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the indices of two branches that may both accept a value, None if no two can.

    Args:
        branches: The schemas of a `oneOf`.
        places: All subschemas of the schema by JSON pointer, for references.
    """
    search = _Search(places)
    pairs = ((i, k) for k in range(len(branches)) for i in range(k))
    return next(((i, k) for i, k in pairs if not search.exclude(branches[i], branches[k])), None)


class _Search:
    def __init__(self, places: Mapping[str, Any]):
        self._places = places
        self._num_left = MAX_COMPARISONS

    def exclude(self, one: Any, other: Any, depth: int = MAX_DEPTH) -> bool:
        """Return whether no value satisfies both schemas; False if that is not found within the limits."""
        if one is False or other is False:
            return True
        self._num_left -= 1
        if depth == 0 or self._num_left < 0 or not (isinstance(one, dict) and isinstance(other, dict)):
            return False
        for schema, rest in ((one, other), (other, one)):
            if any(self.exclude(part, rest, depth - 1) for part in self._parts(schema)):
                return True
            for options in (_list(schema, "anyOf"), _list(schema, "oneOf")):
                if options and all(self.exclude(part, rest, depth - 1) for part in options):
                    return True
            values = _values(schema)
            if values is not None and all(_refuses(rest, value) for value in values):
                return True
        return all(self._exclude_in(type_, one, other, depth) for type_ in _types(one) & _types(other))

    def _exclude_in(self, type_: str, one: dict[str, Any], other: dict[str, Any], depth: int) -> bool:
        """Return whether no value of a type satisfies both schemas."""
        if type_ == "number":
            (low, above), (high, below) = max(_low(one), _low(other)), min(_high(one), _high(other))
            return low > high or (low == high and (above, below) != (0, 0))
        if type_ != "object":
            return False
        first, second = (_required_properties(schema) for schema in (one, other))
        return any(self.exclude(first[name], second[name], depth - 1) for name in first if name in second)

    def _parts(self, schema: Mapping[str, Any]) -> Iterator[Any]:
        """Yield the schemas that all its values satisfy, too."""
        yield from _list(schema, "allOf")
        reference = schema.get("$ref")
        if isinstance(reference, str) and (pointer := unquote(reference[1:])) in self._places:
            yield self._places[pointer]


def _required_properties(schema: Mapping[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties")
    required = _list(schema, "required")
    return {name: part for name, part in properties.items() if name in required} if isinstance(properties, dict) else {}


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _refuses(schema: Mapping[str, Any], value: Any) -> bool:
    """Return whether a schema's own type, values or bounds refuse a value."""
    values = _values(schema)
    if values is not None and _key(value) not in map(_key, values):
        return True
    if _type(value) not in _types(schema):
        return True
    return _type(value) == "number" and not _low(schema) <= (value, 0) <= _high(schema)


def _key(value: Any) -> str:
    """Return a text that is equal for equal JSON values: 1 equals 1.0, not true."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return f"[{','.join(map(_key, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{json.dumps(name)}:{_key(value[name])}' for name in sorted(value))}}}"
    return json.dumps(value)


def _type(value: Any) -> str:
    if value is None:
        return "null"
    names = ((bool, "boolean"), (int | float, "number"), (str, "string"), (list, "array"))
    return next((name for kind, name in names if isinstance(value, kind)), "object")


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    types = schema.get("type")
    if isinstance(types, str):
        types = [types]
    if not isinstance(types, list):
        return TYPES
    return frozenset("number" if type_ == "integer" else type_ for type_ in types if isinstance(type_, str)) & TYPES


def _low(schema: Mapping[str, Any]) -> tuple[float, int]:
    """Return the lower bound and 1 if it is exclusive, 0 if not."""
    return max((_bound(schema, "minimum", -math.inf), 0), (_bound(schema, "exclusiveMinimum", -math.inf), 1))


def _high(schema: Mapping[str, Any]) -> tuple[float, int]:
    """Return the upper bound and -1 if it is exclusive, 0 if not."""
    return min((_bound(schema, "maximum", math.inf), 0), (_bound(schema, "exclusiveMaximum", math.inf), -1))


def _bound(schema: Mapping[str, Any], keyword: str, default: float) -> float:
    value = schema.get(keyword)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else default


def _list(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []
