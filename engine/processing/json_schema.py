"""The subset of JSON Schema that grammars can enforce. Other keywords are refused by name; none is silently ignored.

Written for llguidance 1.9.1, which silently ignores some keywords, see `_problem_of`. Known deviations: properties are
generated in the order of the schema; additional properties follow them and may repeat a name; the formats date and
date-time accept 29 February in every year.
"""

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

MAX_EXACT_NUMBER = 2**53
"""llguidance computes bounds and constants in double precision."""

MAX_MULTIPLE = 100_000
"""Largest number of remainders of a `multipleOf`, each of which is a state of an automaton (measured: 100003 take
40 MB, 1000003 take six seconds and 300 MB, outside llguidance's own limits)."""

WHITESPACE = r"[ ]|\n(?:[ ]{0,32}|\t{0,16})"
"""Permitted white space between JSON tokens: none, one space, or one line break with indentation, as in compact and
indented JSON. With unbounded white space a model may write line breaks until max_tokens."""

OPTIONS: Any = {
    "lenient": False,
    "coerce_one_of": False,
    "whitespace_pattern": WHITESPACE,
    # Without u, as an additional property {"\u0061": 1} would bypass the schema of the property "a".
    "json_allowed_escapes": 'nrbtf\\"',
}

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


@dataclass(frozen=True)
class Problem:
    """A keyword that cannot be enforced."""

    owner: dict[str, Any]
    """The subschema that has the keyword."""
    keyword: str
    reason: str
    """A clause about the schema, for the client."""


def strict_schema(schema: Any) -> dict[str, Any]:
    """Return a copy of a schema for llguidance. Raises ValueError naming the first keyword that cannot be enforced."""
    if not isinstance(schema, dict):
        raise ValueError(f"the schema is {_shortened(schema)}; expected an object")
    for problem in _problems(schema):
        raise ValueError(problem.reason)
    return _bare_copy(schema)


def lenient_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a schema for llguidance, without the keywords that cannot be enforced."""
    cleaned = copy.deepcopy(dict(schema))
    while problems := list(_problems(cleaned)):  # removing a keyword may remove the target of a reference
        for problem in problems:
            problem.owner.pop(problem.keyword, None)
    return _bare_copy(cleaned)


def subschemas(root: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (JSON pointer, schema) of every subschema, the root first."""
    pending: list[tuple[str, Any]] = [("", root)]
    while pending:
        pointer, schema = pending.pop()
        yield pointer, schema
        for keyword, value in schema.items() if isinstance(schema, dict) else ():
            if keyword in SCHEMA_MAPS and isinstance(value, dict):
                pending += [(f"{pointer}/{keyword}/{_escaped(name)}", child) for name, child in value.items()]
            elif keyword in SCHEMA_LISTS and isinstance(value, list):
                pending += [(f"{pointer}/{keyword}/{i}", child) for i, child in enumerate(value)]
            elif keyword in SCHEMA:
                pending.append((f"{pointer}/{keyword}", value))


def _bare_copy(root: dict[str, Any]) -> dict[str, Any]:
    """Return a copy without annotations and $schema, under whose old drafts llguidance ignores newer keywords."""
    bare = copy.deepcopy(root)
    for _, schema in subschemas(bare):
        for keyword in [key for key in schema if key not in ENFORCED] if isinstance(schema, dict) else ():
            del schema[keyword]
    return bare


def _problems(root: dict[str, Any]) -> Iterator[Problem]:
    places = dict(subschemas(root))
    multiples: list[Fraction] = []
    for pointer, schema in places.items():
        for keyword, value in list(schema.items()) if isinstance(schema, dict) else ():
            reason = _problem_of(keyword, value, schema, is_root=schema is root)
            if keyword == "$ref" and not reason and unquote(value[1:]) not in places:
                reason = f"which is {_shortened(value)} and does not refer to a part of the schema"
            if keyword == "multipleOf" and not reason:
                reason = _uncountable_multiple(value, multiples)
            if reason:
                yield Problem(schema, keyword, f"the schema uses `{keyword}` at {_path(pointer)}, {reason}")


def _problem_of(keyword: str, value: Any, schema: Mapping[str, Any], is_root: bool) -> str | None:
    """Return the reason why a keyword cannot be enforced, or None. Malformed values are left to llguidance."""
    if keyword not in ENFORCED:
        harmless = keyword in ANNOTATIONS or (keyword.startswith("x-") and keyword != "x-guidance")
        return None if harmless or (is_root and keyword in ROOT_ANNOTATIONS) else "which is not supported"
    if keyword == "$ref" and not (isinstance(value, str) and (value == "#" or value.startswith("#/"))):
        return f"which is {_shortened(value)}; only references into the schema itself (#/...) are supported"
    if keyword == "format" and value not in FORMATS:
        return f"which is {_shortened(value)}; the supported formats are {', '.join(sorted(FORMATS))}"
    if keyword in BOUNDS and (number := _inexact_number(value)) is not None:
        return f"which contains {number}; numbers are supported up to 2**53 = {MAX_EXACT_NUMBER}"
    if keyword == "minProperties":
        return _uncountable_properties(value, schema)
    return _lost_tuple(keyword, schema)


def _uncountable_properties(value: Any, schema: Mapping[str, Any]) -> str | None:
    # Additional properties may repeat a name, which counts once: only the first one is certainly new.
    required = schema.get("required")
    countable = len(set(map(str, required))) + 1 if isinstance(required, list) else 1
    open_ended = schema.get("additionalProperties") is not False or "patternProperties" in schema
    if open_ended and isinstance(value, int) and value > countable:
        return f"which is {value}; at most {countable} (one more than `required` names) can be enforced"
    return None


def _lost_tuple(keyword: str, schema: Mapping[str, Any]) -> str | None:
    # llguidance treats these as the tuples of draft 2019-09 and earlier, and ignores prefixItems.
    as_list = isinstance(schema.get("items"), list)
    if keyword == "additionalItems" and not as_list:
        return "which is not supported without a list in `items`"
    if keyword == "prefixItems" and as_list:
        return "which is not supported beside a list in `items`"
    return None


def _uncountable_multiple(value: Any, others: list[Fraction]) -> str | None:
    """Append a value to the multiples of the schema if all can be enforced together, else return the reason."""
    if not isinstance(value, int | float) or not 0 < abs(value) <= MAX_MULTIPLE:
        return f"which is {_shortened(value)}; it must be between 0 and {MAX_MULTIPLE}"
    multiples = [*others, abs(Fraction(str(value)))]
    places = next((n for n in range(10) if all(10**n % multiple.denominator == 0 for multiple in multiples)), None)
    if places is None:
        return f"which is {value}; it may have at most 9 decimal places"
    scaled = {int(multiple * 10**places) for multiple in multiples}
    common = math.lcm(*scaled)
    # llguidance intersects schemas with 32-bit numbers and without an overflow check.
    fits = len(scaled) == 1 or common * max(scaled) < 2**32
    if Fraction(common, 10**places).numerator > MAX_MULTIPLE or not fits:
        return f"which is {value}; this cannot be enforced together with the other `multipleOf` values of the schema"
    others.append(multiples[-1])
    return None


def _inexact_number(value: Any) -> Any:
    """Return the first number in a JSON value that double precision may not represent, or None."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)
        elif isinstance(item, int | float) and not abs(item) <= MAX_EXACT_NUMBER:
            return _shortened(item)
    return None


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _path(pointer: str) -> str:
    steps = [step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]
    return _shortened(".".join(["$", *steps]), 200, quoted=False)


def _shortened(value: Any, limit: int = 80, quoted: bool = True) -> str:
    text = repr(value) if quoted else str(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
