"""The keywords of JSON Schema by what their values are, and the subschemas that a schema has in them."""

from collections.abc import Iterator, Mapping
from typing import Any

FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})

SCHEMA = frozenset({"additionalProperties", "items", "additionalItems"})
SCHEMA_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
SCHEMA_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "const", "enum"})
SIZES = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
OTHERS = frozenset({"$ref", "type", "required", "pattern", "format", "multipleOf"})
ENFORCED = SCHEMA | SCHEMA_LISTS | SCHEMA_MAPS | BOUNDS | SIZES | OTHERS

ANNOTATIONS = frozenset({"$comment", "title", "description", "default", "example", "examples", "deprecated"}) | {
    *("readOnly", "writeOnly", "contentMediaType", "contentEncoding", "contentSchema", "discriminator")
}
"""Keywords without a constraint. Those about encoded strings are not part of JSON Schema's validation either."""

ROOT_ANNOTATIONS = frozenset({"$schema", "$id", "id"})
"""Keywords that are ignored at the root. Below the root, $id would change the meaning of references."""


def subschemas(root: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (JSON pointer, schema) of every subschema, the root first."""
    pending: list[tuple[str, Any]] = [("", root)]
    while pending:
        pointer, schema = pending.pop()
        yield pointer, schema
        pending += [(pointer + step, child) for step, child in children_of(schema)]


def children_of(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield (end of the JSON pointer, schema) of every subschema directly in a schema."""
    for keyword, value in schema.items() if isinstance(schema, dict) else ():
        if keyword in SCHEMA_MAPS and isinstance(value, dict):
            yield from ((f"/{keyword}/{_escaped(name)}", child) for name, child in value.items())
        elif keyword in SCHEMA_LISTS and isinstance(value, list):
            yield from ((f"/{keyword}/{i}", child) for i, child in enumerate(value))
        elif keyword in SCHEMA:
            yield f"/{keyword}", value


def mapping_of(schema: Mapping[str, Any], keyword: str) -> Mapping[str, Any]:
    """Return the value of a keyword if it is an object, else {}."""
    value = schema.get(keyword)
    return value if isinstance(value, dict) else {}


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def path_of(pointer: str) -> str:
    """Return the path of a subschema for clients, such as `$.properties.a`."""
    steps = [step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]
    return shortened(".".join(["$", *steps]), 200, quoted=False)


def shortened(value: Any, limit: int = 80, quoted: bool = True) -> str:
    """Return a value as text, cut off at a limit of characters."""
    text = repr(value) if quoted else str(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
