"""The forms of a schema: the normal one, whose keywords are checked, and the bare one, which llguidance compiles."""

import copy
import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

from engine.processing.schema_branches import overlapping
from engine.processing.schema_keywords import ENFORCED, FORMATS, SIZES, subschemas

NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
BOUND_DIGITS = 15
"""Significant digits of bounds in llguidance; none nearer to 0 than this many decimal places."""


def normal_copy(root: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy with normalized schemas; branches of a `oneOf` that exclude each other are in `anyOf`."""
    normal = copy.deepcopy(dict(root))
    for _, schema in list(subschemas(normal)):
        if isinstance(schema, dict):
            _normalize(schema)
    places, moved = dict(subschemas(normal)), dict[str, str]()
    for pointer, schema in places.items():
        branches = schema.get("oneOf") if isinstance(schema, dict) else None
        if isinstance(branches, list) and branches and overlapping(branches, places) is None:
            moved[f"{pointer}/oneOf/"] = pointer + add_branches(schema, schema.pop("oneOf"))
    for schema in places.values():
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if isinstance(reference, str) and "/oneOf/" in reference:
            for old in sorted(moved, key=len, reverse=True):
                if (target := unquote(reference[1:])).startswith(old):
                    reference = f"#{moved[old]}{target.removeprefix(old)}"
            schema["$ref"] = reference
    return normal


def _normalize(schema: dict[str, Any]) -> None:
    """Remove keywords that are null, which some generators write for absent ones, and unknown formats.

    Sizes such as 2.0 become integers, and the exclusive bounds of draft 4 those of later ones.
    """
    for keyword in [key for key in schema if schema[key] is None and key not in ("const", "default")]:
        del schema[keyword]
    if isinstance(schema.get("format"), str) and schema["format"] not in FORMATS:
        del schema["format"]
    for keyword in SIZES & schema.keys():
        if isinstance(size := schema[keyword], float) and size.is_integer():
            schema[keyword] = int(size)
    for exclusive, inclusive in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(schema.get(exclusive), bool) and schema.pop(exclusive) and inclusive in schema:
            schema[exclusive] = schema.pop(inclusive)


def add_branches(schema: dict[str, Any], branches: Any) -> str:
    """Demand one of the branches of a schema; return the end of the JSON pointer to them."""
    if "anyOf" not in schema:
        schema["anyOf"] = branches
        return "/anyOf/"
    every = schema.setdefault("allOf", [])
    if not isinstance(every, list):
        return "/allOf/"  # malformed, which is left to llguidance
    every.append({"anyOf": branches})
    return f"/allOf/{len(every) - 1}/anyOf/"


def strip_annotations(root: dict[str, Any]) -> None:
    """Remove annotations and $schema, under whose old drafts llguidance ignores newer keywords; mend bounds."""
    for _, schema in list(subschemas(root)):
        if isinstance(schema, dict):
            for keyword in [key for key in schema if key not in ENFORCED]:
                del schema[keyword]
            _mend_bounds(schema)


def _mend_bounds(schema: dict[str, Any]) -> None:
    """Write bounds so that llguidance enforces them exactly.

    It lets an exclusive bound through that is an integer, where the other bound is less than one further from zero:
    such a bound becomes the next number of BOUND_DIGITS digits. And it leaves out the beginnings of a bound's decimals,
    such as 0.9 of the maximum 0.95: they are added as an enum.
    """
    if schema.get("type") == "integer":
        return
    for exclusive, inclusive, sign, nearer in (
        ("exclusiveMinimum", "minimum", 1, max),
        ("exclusiveMaximum", "maximum", -1, min),
    ):
        bound, other = _number(schema, exclusive), _number(schema, inclusive)
        if bound is None or bound * sign < 0 or bound != int(bound):
            continue
        num_places = BOUND_DIGITS - len(str(abs(int(bound)))) if bound else BOUND_DIGITS
        if num_places > 0:
            del schema[exclusive]
            next_one = round(bound + sign * 10.0**-num_places, num_places)
            schema[inclusive] = next_one if other is None else nearer(next_one, other)
    if missing := sorted(set(_missing_decimals(schema))):
        bounds = {key: schema.pop(key) for key in NUMERIC if key in schema}
        add_branches(schema, [bounds, {"enum": missing}])


def _missing_decimals(schema: Mapping[str, Any]) -> Iterator[float]:
    numbers = {key: Fraction(str(number)) for key in NUMERIC if (number := _number(schema, key)) is not None}
    for keyword, sign in (("maximum", 1), ("exclusiveMaximum", 1), ("minimum", -1), ("exclusiveMinimum", -1)):
        if keyword not in numbers or numbers[keyword] * sign <= 0:
            continue
        digits = format(Decimal(str(schema[keyword])), "f")
        for end in range(digits.find(".") + 2, len(digits)) if "." in digits else ():
            number = Fraction(digits[:end])
            if number and _satisfies(number, numbers):
                yield float(number)


def _satisfies(number: Fraction, numbers: Mapping[str, Fraction]) -> bool:
    """Return whether a number satisfies the bounds and the multiple of a schema."""
    multiple = numbers.get("multipleOf")
    return (
        numbers.get("minimum", number) <= number <= numbers.get("maximum", number)
        and ("exclusiveMinimum" not in numbers or numbers["exclusiveMinimum"] < number)
        and ("exclusiveMaximum" not in numbers or number < numbers["exclusiveMaximum"])
        and (not multiple or number % multiple == 0)
    )


def _number(schema: Mapping[str, Any], keyword: str) -> Any:
    value = schema.get(keyword)
    return value if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None
