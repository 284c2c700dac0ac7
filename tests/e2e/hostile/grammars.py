"""Rows: schemas and expressions that recurse, explode, or ask for what cannot be enforced."""

import json
from typing import Any

from tests.e2e.hostile.replies import Reply
from tests.e2e.hostile.rows import OK, Either, Http, Played, Row, Target, bad, chat

SCHEMA_FIELD = "response_format.json_schema.schema"
REGEX_FIELD = "structured_outputs.regex"
NOT_THAT = bad(SCHEMA_FIELD)
ENFORCED_OR_REFUSED = Either((OK, NOT_THAT))
REGEX_OR_REFUSED = Either((OK, bad(REGEX_FIELD)))


def _schema(schema: Any) -> Http:
    return chat(response_format=lambda: {"type": "json_schema", "json_schema": {
        "name": "a", "schema": schema() if callable(schema) else schema}})  # fmt: skip


def _regex(pattern: str) -> Http:
    return chat(structured_outputs={"regex": pattern})


def _property(schema: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"], **others}


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def _loop(length: int) -> dict[str, Any]:
    """References that only lead to each other."""
    return {
        "$ref": "#/$defs/d0",
        "$defs": {f"d{i}": {"$ref": f"#/$defs/d{(i + 1) % length}"} for i in range(length)},
    }


def _chain(length: int) -> dict[str, Any]:
    links = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{length}": {"type": "string"}}}


def _doubling(depth: int) -> dict[str, Any]:
    """Each definition holds the next one twice: 2 ** depth values in a text of a few kilobytes."""
    pairs = {
        f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2, "minItems": 2, "items": False}
        for i in range(depth)
    }
    return _property({"$ref": "#/$defs/d0"}) | {"$defs": {**pairs, f"d{depth}": {"type": "null"}}}


SCHEMAS = (
    Row("schema: recursion", _schema(_property({"$ref": "#"})), "grammar work", ENFORCED_OR_REFUSED),
    Row("schema: a reference to itself alone", _schema({"$ref": "#"}), "grammar work", NOT_THAT),
    Row("schema: a loop of references", _schema(_loop(3)), "grammar work", NOT_THAT),
    Row("schema: a loop of 2000 references", _schema(_loop(2000)), "grammar work", NOT_THAT),
    Row("schema: a chain of 3000 references", _schema(_chain(3000)), "grammar work", ENFORCED_OR_REFUSED),
    Row("schema: a reference to nothing", _schema({"$ref": "#/$defs/x"}), "references", bad(SCHEMA_FIELD, "$ref")),
    Row("schema: a reference to the metadata service", _schema({"$ref": "http://169.254.169.254/latest"}), "references",
        bad(SCHEMA_FIELD, "$ref")),
    Row("schema: a reference to a file", _schema({"$ref": "file:///etc/passwd"}), "references",
        bad(SCHEMA_FIELD, "$ref")),
    Row("schema: two to the thirtieth values", _schema(lambda: _doubling(30)), "grammar work", ENFORCED_OR_REFUSED),
    Row("schema: 55 levels", _schema(_nested(55)), "64 levels", ENFORCED_OR_REFUSED),
    Row("schema: 100 levels", _schema(_nested(100)), "64 levels", bad(None, "64")),
    Row("schema: an enum of 15 000 strings", _schema(lambda: _property({"enum": [f"v{i}" for i in range(15_000)]})),
        "grammar.max_bytes", ENFORCED_OR_REFUSED, cost="large"),
    Row("schema: an enum of 300 kB", _schema(lambda: _property({"enum": [f"value {i}" for i in range(22_000)]})),
        "grammar.max_bytes", bad(SCHEMA_FIELD, "262144")),
    Row("schema: 8 MiB", _schema(lambda: {"type": "object", "description": "d" * (8 * 2**20)}), "grammar.max_bytes",
        bad(SCHEMA_FIELD), cost="large"),
    Row("schema: 3000 properties", _schema(lambda: {
        "type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(3000)}}), "grammar work",
        ENFORCED_OR_REFUSED, cost="large"),
    Row("schema: 60 alternatives that begin alike", _schema({"anyOf": [
        _property({"const": "x" * 50 + str(i)}) for i in range(60)]}), "grammar work", ENFORCED_OR_REFUSED),
    Row("schema: 60 conditions at once", _schema({"allOf": [
        _property({"type": "string", "pattern": f"^[a-z]{{{i},}}"}) for i in range(60)]}), "grammar work",
        ENFORCED_OR_REFUSED, cost="large"),
    Row("schema: a string of a billion letters", _schema(_property({"type": "string", "minLength": 10**9})),
        "grammar work", ENFORCED_OR_REFUSED),
    Row("schema: an array of a billion items", _schema({"type": "array", "items": {"type": "null"}, "minItems": 10**9}),
        "grammar work", ENFORCED_OR_REFUSED),
    Row("schema: a pattern that explodes", _schema(_property({"type": "string", "pattern": "^(a|a?)+(b+)+c{500}$"})),
        "grammar work", ENFORCED_OR_REFUSED),
    Row("schema: a remainder of a million", _schema(_property({"type": "integer", "multipleOf": 1_000_003})),
        "grammar work", bad(SCHEMA_FIELD, "multipleOf", "100000")),
    Row("schema: a constant beyond 2 ** 53", _schema(_property({"const": 2**60})), "exact numbers",
        bad(SCHEMA_FIELD, str(2**53))),
    Row("schema: nothing matches", _schema(_property({"type": "integer", "minimum": 5, "maximum": 1})),
        "possible grammars", NOT_THAT),
    Row("schema: an empty enum", _schema(_property({"enum": []})), "possible grammars", NOT_THAT),
    Row("schema: an unknown type", _schema({"type": "nonsense"}), "keywords", NOT_THAT),
    Row("schema: a type that is a number", _schema({"type": 5}), "keywords", NOT_THAT),
    Row("schema: properties that are a list", _schema({"type": "object", "properties": []}), "keywords", NOT_THAT),
    Row("schema: an item that is a string", _schema({"type": "array", "items": "x"}), "keywords", NOT_THAT),
    *(
        Row(f"schema: {keyword}", _schema({"type": "object", keyword: value}), "keywords", bad(SCHEMA_FIELD, keyword))
        for keyword, value in (
            ("not", {}), ("if", {}), ("dependentRequired", {"a": ["b"]}), ("unevaluatedProperties", False),
            ("propertyNames", {"pattern": "^a"}), ("contains", {}), ("uniqueItems", True), ("format", 5),
            ("x-guidance", {"lenient": True}), ("$dynamicRef", "#a"), ("nonsense", 1),
        )
    ),
    Row("schema: the field `json` of 300 kB", chat(structured_outputs=lambda: {"json": json.loads(
        '{"description": "' + "d" * 300_000 + '"}')}), "grammar.max_bytes", bad("structured_outputs.json", "262144")),
)  # fmt: skip

REGEXES = tuple(
    Row(f"regex: {name}", _regex(pattern), "grammar work", answer)
    for name, pattern, answer in (
        ("a parenthesis", "(", bad(REGEX_FIELD)),
        ("a bracket", "[", bad(REGEX_FIELD)),
        ("a star", "*", bad(REGEX_FIELD)),
        ("repeated quantifiers", "a" + "+" * 1000, REGEX_OR_REFUSED),
        ("a look-ahead", "(?=a)b", bad(REGEX_FIELD)),
        ("a look-behind", "(?<=a)b", bad(REGEX_FIELD)),
        ("a reference back", r"(a)\1", bad(REGEX_FIELD)),
        ("what never matches", "[^\\s\\S]", bad(REGEX_FIELD)),
        ("the classic catastrophe", "(a+)+$", REGEX_OR_REFUSED),
        ("nested alternatives", "((a|aa)+)+" * 10, REGEX_OR_REFUSED),
        ("a million repetitions", "(ab){1000000}", REGEX_OR_REFUSED),
        ("repetitions of repetitions", "((a{1000}){1000}){1000}", bad(REGEX_FIELD)),
        ("10 000 parentheses", "(" * 10_000 + "a" + ")" * 10_000, REGEX_OR_REFUSED),
        ("a thousand wild cards", ".*" * 1000 + "x", REGEX_OR_REFUSED),
        ("a state for each of 2 ** 20 histories", "(a|b)*a(a|b){20}", REGEX_OR_REFUSED),
        ("all of Unicode, often", r"(\p{L}{1,500}|\w{1,500}|[^\x00]{1,500}){1,50}", REGEX_OR_REFUSED),
        ("300 kB", "a|" * 150_000 + "b", bad(REGEX_FIELD, "262144")),
        ("200 kB of alternatives", "|".join(f"v{i}" for i in range(30_000)), REGEX_OR_REFUSED),
        ("a NUL", "\0+", REGEX_OR_REFUSED),
        ("an unknown flag", "(?z)a", bad(REGEX_FIELD)),
    )
)


async def _hungry(target: Target) -> list[Reply]:
    """Eight expressions that differ in a digit, so that what is kept of one serves no other."""
    patterns = [f"(ab){{{1_000_000 + i}}}" for i in range(8)]
    return [reply for pattern in patterns for reply in await _regex(pattern).send(target)]


MEMORY = (
    Row("regex: eight of a million repetitions", Played(_hungry), "memory of grammars", REGEX_OR_REFUSED, cost="large"),
)

ROWS = (*SCHEMAS, *REGEXES, *MEMORY)
