"""Converts arguments of tool calls to JSON text, with values of the types in the tool's schema."""

import json
import re
from collections.abc import Mapping, Sequence, Set
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
TEXT_TYPES = frozenset({"array", "object", "string"})
"""Types that a text may spell where the schema names none, in formats that write texts without quotes."""

SPELLED = {
    '"': "string",
    "{": "object",
    "[": "array",
    "t": "boolean",
    "f": "boolean",
    "n": "null",
    **dict.fromkeys("-0123456789", "number"),
}
"""The type that a text may spell, by its first character."""
NUMBER_START = re.compile(r"[-+.0-9eE]*")
STRING_START = re.compile(r'"(?:[^"\\]|\\.)*(?:\\|"\s*)?', re.DOTALL)

PYTHON_WORDS: Mapping[str, Any] = {"true": True, "false": False, "null": None, "none": None}
"""Alternative spellings, in any letter case."""


@dataclass(frozen=True)
class ParsedToolCall:
    """A call of a tool, or a part of one: the arguments of a call's parts are JSON text together."""

    name: str
    """As the model wrote it; it may not be a declared tool."""
    arguments: str
    """JSON text of an object."""
    is_first: bool = True
    """Whether a call begins here, else this goes on with the last one, and has no name."""
    is_last: bool = True
    """Whether the call is complete."""

    def joined(self, more: "ParsedToolCall") -> "ParsedToolCall":
        """Return this part of a call and the part behind it as one."""
        return ParsedToolCall(self.name, self.arguments + more.arguments, self.is_first, more.is_last)


class ToolTypes:
    """The JSON types that the declared tools allow for their parameters.

    Args:
        tools: OpenAI function tools.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]):
        self.tools = list(tools)
        functions = [tool.get("function") or {} for tool in tools]
        self._schemas = {function.get("name"): function.get("parameters") or {} for function in functions}
        self.names = tuple(self._schemas)

    def call(self, name: str, arguments: Mapping[str, Any]) -> ParsedToolCall:
        """Create a call from JSON arguments.

        A string for which the schema allows no string is converted to the value that it spells. Raises ValueError if
        the arguments cannot be written as JSON.
        """
        typed = {
            key: self.typed(name, key, value, {"string"}) if isinstance(value, str) else value
            for key, value in arguments.items()
        }
        return ParsedToolCall(name, dump_json(typed))

    def call_of_texts(self, name: str, arguments: Mapping[str, str]) -> ParsedToolCall:
        """Create a call from arguments as plain texts, converted to the types of the schema.

        Without a type in the schema, arrays and objects are parsed as JSON, and everything else is a string.
        """
        typed = {key: self.typed(name, key, text, TEXT_TYPES) for key, text in arguments.items()}
        return ParsedToolCall(name, dump_json(typed))

    def typed(self, name: str, key: str, text: str, untyped: Set[str]) -> Any:
        """Return the value that the text of a parameter spells: of a type that the schema allows, else the text.

        Args:
            name: Name of the tool.
            key: Name of the parameter.
            text: The text.
            untyped: Types that are allowed where the schema names none.
        """
        allowed = self.allowed(name, key, untyped)
        if allowed == {"string"} or text in self._constants(name, key):
            return text
        value = _spelled(text, allowed)
        kind = JSON_TYPES[type(value)]
        if kind == "number" and "number" not in allowed and "integer" in allowed and value.is_integer():
            return int(value)
        is_allowed = kind in allowed or (kind == "integer" and "number" in allowed)
        return value if is_allowed or "string" not in allowed else text

    def may_spell(self, name: str, key: str, start: str, untyped: Set[str]) -> bool:
        """Tell whether a text with this start may spell another value than itself; for the arguments see `typed`."""
        allowed = self.allowed(name, key, untyped)
        start = start.strip().lower()
        if allowed == {"string"} or "string" not in allowed or not start:
            return allowed != {"string"}
        kind = SPELLED.get(start[0])
        if kind is None or not allowed & ({kind, "integer"} if kind == "number" else {kind}):
            return False
        if kind in ("boolean", "null"):
            return any(word.startswith(start) for word in PYTHON_WORDS)
        pattern = {"number": NUMBER_START, "string": STRING_START}.get(kind)
        return pattern is None or pattern.fullmatch(start) is not None

    def _constants(self, name: str, key: str) -> list[Any]:
        schema = self._property(name, key)
        values = schema.get("enum") if isinstance(schema, dict) else None
        return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []

    def allowed(self, name: str, key: str, untyped: Set[str]) -> Set[str]:
        """Return the types that the schema allows for a parameter; for the arguments see `typed`."""
        return _types_of(self._property(name, key), self._schemas.get(name) or {}, frozenset()) or untyped

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


def _spelled(text: str, allowed: Set[str]) -> Any:
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
