"""The problems of a schema: the keywords that llguidance cannot enforce or would ignore, with the reasons."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

from llguidance import LLMatcher, LLParserLimits

from engine.processing.grammar_build import byte_tokenizer
from engine.processing.json_escapes import ALL_ESCAPES, control_in
from engine.processing.schema_branches import overlapping
from engine.processing.schema_keywords import (
    ANNOTATIONS,
    BOUNDS,
    ENFORCED,
    FORMATS,
    ROOT_ANNOTATIONS,
    mapping_of,
    path_of,
    shortened,
    subschemas,
)

MAX_EXACT_NUMBER = 2**53
"""llguidance computes bounds and constants in double precision."""

MAX_MULTIPLE = 100_000
"""Largest number of remainders of a `multipleOf`, each of which is a state of an automaton (measured: 100003 take
40 MB, 1000003 take six seconds and 300 MB, outside llguidance's own limits)."""

PATTERN_FUEL = 300_000
"""Limit on the work for the first state of a pattern, as for a whole grammar."""


@dataclass(frozen=True)
class Problem:
    """A keyword that cannot be enforced."""

    owner: dict[str, Any]
    """The subschema that has the keyword."""
    keyword: str
    place: str
    """Such as `$.properties.a.not`."""
    reason: str
    """A sentence for the client."""


def find_problems(root: dict[str, Any], is_strict: bool) -> Iterator[Problem]:
    """Yield the problems of a normal schema; a strict one also has those of values with control characters."""
    places = dict(subschemas(root))
    objects = [schema for schema in places.values() if isinstance(schema, dict)]
    declared = {str(name) for schema in objects for name in mapping_of(schema, "properties")}
    is_open = any(
        (schema.get("properties") or schema.get("patternProperties"))
        and schema.get("additionalProperties") is not False
        for schema in objects
    )
    multiples: list[Fraction] = []
    for pointer, schema in places.items():
        for keyword, value in list(schema.items()) if isinstance(schema, dict) else ():
            reason = _problem_of(keyword, value, schema, is_root=schema is root)
            if keyword == "$ref" and not reason and unquote(value[1:]) not in places:
                reason = f"which is {shortened(value)} and does not refer to a part of the schema"
            if keyword == "oneOf" and not reason:
                reason = _overlap(value, places)
            if keyword == "patternProperties" and not reason:
                reason = _declared_by_pattern(value, declared)
            if keyword == "multipleOf" and not reason:
                reason = _uncountable_multiple(value, multiples)
            if is_strict and is_open and not reason and (control := control_in({keyword: value})):
                reason = (
                    f"which contains {shortened(control[1])}; control characters can only be enforced where "
                    "each object with `properties` has `additionalProperties: false`"
                )
            if reason:
                path = path_of(pointer)
                yield Problem(schema, keyword, f"{path}.{keyword}", f"the schema uses `{keyword}` at {path}, {reason}")


def _problem_of(keyword: str, value: Any, schema: Mapping[str, Any], is_root: bool) -> str | None:
    """Return the reason why a keyword cannot be enforced, or None. Malformed values are left to llguidance."""
    if keyword not in ENFORCED:
        harmless = keyword in ANNOTATIONS or (keyword.startswith("x-") and keyword != "x-guidance")
        return None if harmless or (is_root and keyword in ROOT_ANNOTATIONS) else "which is not supported"
    if keyword == "$ref" and not (isinstance(value, str) and (value == "#" or value.startswith("#/"))):
        return f"which is {shortened(value)}; only references into the schema itself (#/...) are supported"
    if keyword == "format" and value not in FORMATS:
        return f"which is {shortened(value)}; the supported formats are {', '.join(sorted(FORMATS))}"
    if keyword in BOUNDS and (number := _inexact_number(value)) is not None:
        return f"which contains {number}; numbers are supported up to 2**53 = {MAX_EXACT_NUMBER}"
    if keyword == "pattern" and isinstance(value, str) and (error := pattern_error(value)):
        return f"which is {shortened(value)}: {error}"
    if keyword == "minProperties":
        return _uncountable_properties(value, schema)
    return _lost_tuple(keyword, schema)


def _overlap(branches: Any, places: Mapping[str, Any]) -> str | None:
    pair = overlapping(branches, places) if isinstance(branches, list) else None
    if pair is None:
        return None
    one, other = pair
    apart = "only branches that exclude each other can be enforced"
    return f"whose branches {one} and {other} may hold for the same value; {apart}"


def _declared_by_pattern(patterns: Any, declared: set[str]) -> str | None:
    # llguidance takes the declared names out of the pattern's; where none is left, it cannot end what it has begun.
    for pattern in patterns if isinstance(patterns, dict) else ():
        if error := pattern_error(pattern):
            return f"with the pattern {shortened(pattern)}: {error}"
        if (name := _first_match(pattern, declared)) is not None:
            return f"whose pattern {shortened(pattern)} matches {shortened(name)}, a name in `properties`"
    return None


def _first_match(pattern: str, names: Iterable[str]) -> str | None:
    """Return a name that a pattern matches. Python's expressions differ, and a hostile one may take them hours."""
    matcher = _matcher_of(pattern)
    for name in sorted(names):
        probe, spelled = matcher.deep_copy(), list(json.dumps(name, ensure_ascii=False).encode(errors="replace"))
        if probe.try_consume_tokens(spelled) == len(spelled) and probe.is_accepting():
            return name
    return None


@lru_cache(1024)
def pattern_error(pattern: str) -> str | None:
    """Return why a pattern cannot be enforced, such as a lookahead; None if it can."""
    matcher = _matcher_of(pattern)
    return " ".join(matcher.get_error().split())[-120:] if matcher.is_error() else None


def _matcher_of(pattern: str) -> LLMatcher:
    schema = {"type": "string", "pattern": pattern, "x-guidance": {"json_allowed_escapes": ALL_ESCAPES}}
    limits = LLParserLimits(initial_lexer_fuel=PATTERN_FUEL, verbose_errors=False)
    return LLMatcher(
        byte_tokenizer(), LLMatcher.grammar_from_json_schema(json.dumps(schema)), log_level=0, limits=limits
    )


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
        return f"which is {shortened(value)}; it must be between 0 and {MAX_MULTIPLE}"
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
            return shortened(item)
    return None
