r"""The subset of JSON Schema that grammars can enforce. Other keywords are refused by name; none is silently ignored.

Written for llguidance 1.9.1, which silently ignores some keywords, see `_problem_of`. Known deviations: properties are
generated in the order of the schema; additional properties follow them and may repeat a name; free strings have no
control characters but those with a short escape; numbers that are integers are written without decimals where bounds or
a multiple apply; the formats date and date-time accept 29 February in every year, and times any leap second; `\s` is
white space of Unicode, without U+FEFF; `$schema` has no effect.
"""

import copy
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

from llguidance import LLMatcher, LLParserLimits

from engine.errors import EngineFailed
from engine.processing.grammar_build import byte_tokenizer
from engine.processing.schema_branches import overlapping

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
    "json_allowed_escapes": 'nrbtf\\"',
}
ALL_ESCAPES = OPTIONS["json_allowed_escapes"] + "u"
"""Escapes in schemas whose values have control characters. Elsewhere u is not allowed: as an additional property,
{"\\u0061": 1} would bypass the schema of the property "a". In other strings llguidance allows it for control characters
alone."""

CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Characters that JSON can only spell with u. JSON permits a raw DEL; llguidance does not."""
CONTROL_IN_PATTERN = re.compile(CONTROL.pattern + r"|\\(?:0|v|c[A-Za-z]|x0|x1|x7[fF]|u00[01]|u007[fF])")

BOUND_DIGITS = 15
"""Significant digits of bounds in llguidance; none nearer to 0 than this many decimal places."""

PATTERN_FUEL = 300_000
"""Limit on the work for the first state of a pattern, as for a whole grammar."""

FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})

SCHEMA = frozenset({"additionalProperties", "items", "additionalItems"})
SCHEMA_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
SCHEMA_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "const", "enum"})
NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
SIZES = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
BRANCHES = frozenset({"allOf", "anyOf", "oneOf"})
LIMITS_STRING = BRANCHES | {"maxLength", "const", "enum", "pattern", "format", "$ref"}
LIMITS_ARRAY = BRANCHES | {"maxItems", "const", "enum", "$ref"}
"""Keywords beside which a string or an array is not free: most of their values end, and llguidance takes no length
beside some."""
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
    place: str
    """Such as `$.properties.a.not`."""
    reason: str
    """A sentence for the client."""


def strict_schema(schema: Any) -> dict[str, Any]:
    """Return a copy of a schema for llguidance. Raises ValueError naming the first keyword that cannot be enforced."""
    if not isinstance(schema, dict):
        raise ValueError(f"the schema is {_shortened(schema)}; expected an object")
    normal = _normal_copy(schema)
    for problem in _problems(normal, is_strict=True):
        raise ValueError(problem.reason)
    return _bare(normal)


def lenient_schema(schema: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a copy of a schema for llguidance without the keywords that cannot be enforced, and their places."""
    cleaned = _normal_copy(schema)
    left_open: list[str] = []
    for pointer, part in subschemas(cleaned):
        if isinstance(part, dict) and _drop_impossible_names(part):
            left_open.append(f"{path_of(pointer)}.required")
    # removing a keyword may remove the target of a reference
    while problems := list(_problems(cleaned, is_strict=False)):
        for problem in problems:
            value = problem.owner.pop(problem.keyword, None)
            if problem.keyword == "oneOf":  # several branches may hold
                _add_branches(problem.owner, value)
            left_open.append(problem.place)
    return _bare(cleaned), left_open


def _drop_impossible_names(schema: dict[str, Any]) -> bool:
    """Drop required names that a closed object may not have, as no value at all would be left; tell if there are."""
    required, properties = schema.get("required"), _mapping(schema, "properties")
    if schema.get("additionalProperties") is not False or not isinstance(required, list):
        return False
    possible = [name for name in required if isinstance(name, str) and name in properties]
    if possible == required or "patternProperties" in schema:
        return False
    schema["required"] = possible
    return True


def with_options(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a strict or lenient schema with the options that llguidance compiles it with."""
    has_controls = any(_control_in(part) for _, part in subschemas(dict(schema)))
    escapes = ALL_ESCAPES if has_controls else OPTIONS["json_allowed_escapes"]
    return {**schema, "x-guidance": {**OPTIONS, "json_allowed_escapes": escapes}}


@dataclass(frozen=True)
class FreeLimits:
    """Where strings and arrays of a schema end that it does not limit itself; for models that never end them."""

    max_characters: int
    max_items: int

    @classmethod
    def of(cls, value: Any) -> "FreeLimits":
        """Return the limits as a model's generation_config.json has them.

        Raises:
            EngineFailed: They are not two positive integers.
        """
        names = [field.name for field in fields(cls)]
        is_complete = isinstance(value, dict) and value.keys() == set(names)
        if not is_complete or not all(type(number) is int and number > 0 for number in value.values()):
            raise EngineFailed(
                f"`free_limits` of generation_config.json is {json.dumps(value)[:200]}: it must be an object "
                f"with the positive integers {' and '.join(names)}, and nothing else"
            )
        return cls(**value)

    def apply(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a strict schema with these limits, except where another schema limits the same value."""
        ending = copy.deepcopy(schema)
        places = dict(subschemas(ending))
        for pointer, part in places.items():
            owner, _, keyword = pointer.rpartition("/")[0].rpartition("/")
            if keyword in BRANCHES and isinstance(places.get(owner), dict):  # else a property of that name
                others = places[owner].keys() - {keyword, "$defs", "definitions"}
                if others or keyword == "allOf":
                    continue
            types = part.get("type", ()) if isinstance(part, dict) else ()
            types = [types] if isinstance(types, str) else types
            if "string" in types and not LIMITS_STRING & part.keys():
                part["maxLength"] = max(self.max_characters, _size(part.get("minLength")))
            if "array" in types and not LIMITS_ARRAY & part.keys():
                fixed = part.get("prefixItems")
                least = len(fixed) if isinstance(fixed, list) else 0
                part["maxItems"] = max(self.max_items, _size(part.get("minItems")), least)
        return ending


def _size(value: Any) -> int:
    """Return a size; 0 for a malformed one, which is left to llguidance."""
    return value if isinstance(value, int) else 0


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


def _control_in(schema: Any) -> tuple[str, str] | None:
    """Return the first keyword whose text has a control character that only u can spell, and its text; else None."""
    if not isinstance(schema, dict):
        return None
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and CONTROL_IN_PATTERN.search(pattern):
        return "pattern", pattern
    pending = [(key, schema[key]) for key in ("const", "enum") if key in schema]
    while pending:
        keyword, item = pending.pop()
        if isinstance(item, str) and CONTROL.search(item):
            return keyword, item
        if isinstance(item, dict):
            pending += [(keyword, part) for pair in item.items() for part in pair]
        elif isinstance(item, list):
            pending += [(keyword, part) for part in item]
    return None


def _normal_copy(root: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy with normalized schemas; branches of a `oneOf` that exclude each other are in `anyOf`."""
    normal = copy.deepcopy(dict(root))
    for _, schema in list(subschemas(normal)):
        if isinstance(schema, dict):
            _normalize(schema)
    places, moved = dict(subschemas(normal)), dict[str, str]()
    for pointer, schema in places.items():
        branches = schema.get("oneOf") if isinstance(schema, dict) else None
        if isinstance(branches, list) and branches and overlapping(branches, places) is None:
            moved[f"{pointer}/oneOf/"] = pointer + _add_branches(schema, schema.pop("oneOf"))
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


def _add_branches(schema: dict[str, Any], branches: Any) -> str:
    """Demand one of the branches of a schema; return the end of the JSON pointer to them."""
    if "anyOf" not in schema:
        schema["anyOf"] = branches
        return "/anyOf/"
    every = schema.setdefault("allOf", [])
    if not isinstance(every, list):
        return "/allOf/"  # malformed, which is left to llguidance
    every.append({"anyOf": branches})
    return f"/allOf/{len(every) - 1}/anyOf/"


def _bare(bare: dict[str, Any]) -> dict[str, Any]:
    """Remove annotations and $schema, under whose old drafts llguidance ignores newer keywords."""
    for _, schema in list(subschemas(bare)):
        if isinstance(schema, dict):
            for keyword in [key for key in schema if key not in ENFORCED]:
                del schema[keyword]
            _mend_bounds(schema)
    return bare


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
        _add_branches(schema, [bounds, {"enum": missing}])


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


def _problems(root: dict[str, Any], is_strict: bool) -> Iterator[Problem]:
    places = dict(subschemas(root))
    objects = [schema for schema in places.values() if isinstance(schema, dict)]
    declared = {str(name) for schema in objects for name in _mapping(schema, "properties")}
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
                reason = f"which is {_shortened(value)} and does not refer to a part of the schema"
            if keyword == "oneOf" and not reason:
                reason = _overlap(value, places)
            if keyword == "patternProperties" and not reason:
                reason = _declared_by_pattern(value, declared)
            if keyword == "multipleOf" and not reason:
                reason = _uncountable_multiple(value, multiples)
            if is_strict and is_open and not reason and (control := _control_in({keyword: value})):
                reason = (
                    f"which contains {_shortened(control[1])}; control characters can only be enforced where "
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
        return f"which is {_shortened(value)}; only references into the schema itself (#/...) are supported"
    if keyword == "format" and value not in FORMATS:
        return f"which is {_shortened(value)}; the supported formats are {', '.join(sorted(FORMATS))}"
    if keyword in BOUNDS and (number := _inexact_number(value)) is not None:
        return f"which contains {number}; numbers are supported up to 2**53 = {MAX_EXACT_NUMBER}"
    if keyword == "pattern" and isinstance(value, str) and (error := pattern_error(value)):
        return f"which is {_shortened(value)}: {error}"
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
            return f"with the pattern {_shortened(pattern)}: {error}"
        if (name := _first_match(pattern, declared)) is not None:
            return f"whose pattern {_shortened(pattern)} matches {_shortened(name)}, a name in `properties`"
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


def _mapping(schema: Mapping[str, Any], keyword: str) -> Mapping[str, Any]:
    value = schema.get(keyword)
    return value if isinstance(value, dict) else {}


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def path_of(pointer: str) -> str:
    """Return the path of a subschema for clients, such as `$.properties.a`."""
    steps = [step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]
    return _shortened(".".join(["$", *steps]), 200, quoted=False)


def _shortened(value: Any, limit: int = 80, quoted: bool = True) -> str:
    text = repr(value) if quoted else str(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
