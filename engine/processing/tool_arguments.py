"""Converts arguments of tool calls to JSON text, with values of the types in the tool's schema."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

JSON_TYPES: Mapping[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}
PYTHON_WORDS: Mapping[str, Any] = {"true": True, "false": False, "null": None, "none": None}
"""Alternative spellings, in any letter case."""


@dataclass(frozen=True)
class ParsedToolCall:
    """One complete call of a tool."""

    name: str
    """As the model wrote it; it may not be a declared tool."""
    arguments: str
    """JSON text of an object."""


class ToolTypes:
    """The JSON types that the declared tools allow for their parameters.

    Args:
        tools: OpenAI function tools.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]):
        self.tools = list(tools)
        functions = [tool.get("function") or {} for tool in tools]
        self._schemas = {function.get("name"): function.get("parameters") or {} for function in functions}

    def call(self, name: str, arguments: Mapping[str, Any]) -> ParsedToolCall:
        """Create a call from JSON arguments.

        A string for which the schema allows no string is converted to the value that it spells. Raises ValueError if
        the arguments cannot be written as JSON.
        """
        typed = {
            key: self._typed(name, key, value, self._allowed(name, key) or {"string"})
            if isinstance(value, str)
            else value
            for key, value in arguments.items()
        }
        return ParsedToolCall(name, dump_json(typed))

    def call_of_texts(self, name: str, arguments: Mapping[str, str]) -> ParsedToolCall:
        """Create a call from arguments as plain texts, converted to the types of the schema.

        Without a type in the schema, arrays and objects are parsed as JSON, and everything else is a string.
        """
        typed = {
            key: self._typed(name, key, text, self._allowed(name, key) or {"array", "object", "string"})
            for key, text in arguments.items()
        }
        return ParsedToolCall(name, dump_json(typed))

    def _typed(self, name: str, key: str, text: str, allowed: set[str]) -> Any:
        if allowed == {"string"} or text in self._constants(name, key):
            return text
        value = _spelled(text, allowed)
        kind = JSON_TYPES[type(value)]
        if kind == "number" and "number" not in allowed and "integer" in allowed and value.is_integer():
            return int(value)
        is_allowed = kind in allowed or (kind == "integer" and "number" in allowed)
        return value if is_allowed or "string" not in allowed else text

    def _constants(self, name: str, key: str) -> list[Any]:
        schema = self._property(name, key)
        values = schema.get("enum") if isinstance(schema, dict) else None
        return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []

    def _allowed(self, name: str, key: str) -> set[str]:
        """Return the types that the schema allows for a parameter; empty if it names none."""
        return _types_of(self._property(name, key), self._schemas.get(name) or {}, frozenset())

    def _property(self, name: str, key: str) -> Any:
        schema = self._schemas.get(name)
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        if isinstance(properties, Mapping) and key in properties:
            return properties[key]
        return schema.get("additionalProperties") if isinstance(schema, Mapping) else None


def parse_json(text: str) -> Any:
    """Parse JSON with control characters in strings allowed. Raises ValueError, also for NaN and deep nesting."""
    try:
        return json.loads(text, strict=False, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def dump_json(value: Any) -> str:
    """Return JSON text that is valid UTF-8. Raises ValueError for infinite numbers and deep nesting."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        return text if text.isascii() or not _has_surrogate(text) else json.dumps(value, allow_nan=False)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _spelled(text: str, allowed: set[str]) -> Any:
    """Return the value that a text spells, else the text."""
    stripped = text.strip()
    try:
        value = parse_json(stripped)
        dump_json(value)  # an exponent may make a number infinite
        return value
    except ValueError:
        return PYTHON_WORDS.get(stripped.lower(), text) if allowed & {"boolean", "null"} else text


def _types_of(schema: Any, root: Mapping[str, Any], seen: frozenset[str]) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    if "type" in schema:
        named = schema["type"]
        return {named} if isinstance(named, str) else {kind for kind in named or () if isinstance(kind, str)}
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return {JSON_TYPES[type(value)] for value in values}
    options: list[Any] = [*_listed(schema, "anyOf"), *_listed(schema, "oneOf"), *_listed(schema, "allOf")]
    if isinstance(ref := schema.get("$ref"), str) and ref not in seen:
        seen |= {ref}
        options.append(_target(root, ref))
    return set().union(*(_types_of(option, root, seen) for option in options))


def _target(root: Any, ref: str) -> Any:
    for part in unquote(ref.removeprefix("#")).split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        root = root.get(part) if isinstance(root, Mapping) else None
    return root


def _listed(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


def _has_surrogate(text: str) -> bool:
    return re.search("[\ud800-\udfff]", text) is not None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
