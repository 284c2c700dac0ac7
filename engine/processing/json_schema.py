r"""The subset of JSON Schema that grammars can enforce. Other keywords are refused by name; none is silently ignored.

Written for llguidance 1.9.1, which silently ignores some keywords, see `find_problems`. Known deviations: properties
are generated in the order of the schema; additional properties follow them and may repeat a name; free strings have no
control characters but those with a short escape; numbers that are integers are written without decimals where bounds or
a multiple apply; the formats date and date-time accept 29 February in every year, and times any leap second; `\s` is
white space of Unicode, without U+FEFF; `$schema` has no effect.
"""

from collections.abc import Mapping
from typing import Any

from engine.processing.json_escapes import ALL_ESCAPES, ESCAPES, control_in
from engine.processing.schema_forms import add_branches, normal_copy, strip_annotations
from engine.processing.schema_keywords import mapping_of, path_of, shortened, subschemas
from engine.processing.schema_problems import find_problems

WHITESPACE = r"[ ]|\n(?:[ ]{0,32}|\t{0,16})"
"""Permitted white space between JSON tokens: none, one space, or one line break with indentation, as in compact and
indented JSON. With unbounded white space a model may write line breaks until max_tokens."""

OPTIONS: Any = {
    "lenient": False,
    "coerce_one_of": False,
    "whitespace_pattern": WHITESPACE,
    "json_allowed_escapes": ESCAPES,
}


def strict_schema(schema: Any) -> dict[str, Any]:
    """Return a copy of a schema for llguidance. Raises ValueError naming the first keyword that cannot be enforced."""
    if not isinstance(schema, dict):
        raise ValueError(f"the schema is {shortened(schema)}; expected an object")
    normal = normal_copy(schema)
    for problem in find_problems(normal, is_strict=True):
        raise ValueError(problem.reason)
    strip_annotations(normal)
    return normal


def lenient_schema(schema: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a copy of a schema for llguidance without the keywords that cannot be enforced, and their places."""
    cleaned = normal_copy(schema)
    left_open: list[str] = []
    for pointer, part in subschemas(cleaned):
        if isinstance(part, dict) and _drop_impossible_names(part):
            left_open.append(f"{path_of(pointer)}.required")
    # removing a keyword may remove the target of a reference
    while problems := list(find_problems(cleaned, is_strict=False)):
        for problem in problems:
            value = problem.owner.pop(problem.keyword, None)
            if problem.keyword == "oneOf":  # several branches may hold
                add_branches(problem.owner, value)
            left_open.append(problem.place)
    strip_annotations(cleaned)
    return cleaned, left_open


def _drop_impossible_names(schema: dict[str, Any]) -> bool:
    """Drop required names that a closed object may not have, as no value at all would be left; tell if there are."""
    required, properties = schema.get("required"), mapping_of(schema, "properties")
    if schema.get("additionalProperties") is not False or not isinstance(required, list):
        return False
    possible = [name for name in required if isinstance(name, str) and name in properties]
    if possible == required or "patternProperties" in schema:
        return False
    schema["required"] = possible
    return True


def with_options(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a strict or lenient schema with the options that llguidance compiles it with."""
    has_controls = any(control_in(part) for _, part in subschemas(dict(schema)))
    escapes = ALL_ESCAPES if has_controls else ESCAPES
    return {**schema, "x-guidance": {**OPTIONS, "json_allowed_escapes": escapes}}
