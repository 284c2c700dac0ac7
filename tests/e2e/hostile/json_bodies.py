"""Rows: bodies that are no JSON, no JSON object, or JSON that costs more than it says."""

import json

from tests.e2e.hostile.rows import OK, Refused, Row, bad, chat, encode, post, user

BODY = encode()
NOT_JSON = bad(None, "not valid JSON")
NOT_UTF8 = bad(None, "UTF-8")
NO_OBJECT = bad(None, "JSON object")
TOO_DEEP = bad(None, "64")
TOO_MANY = bad(None, "500000")
NO_CHARACTER = bad("", "surrogate")


def _with(value: str) -> bytes:
    """A body whose `seed` is spelled like this."""
    return BODY[:-1] + b', "seed": ' + value.encode() + b"}"


SYNTAX = tuple(
    Row(f"JSON: {name}", post(body), "JSON syntax", NOT_JSON)
    for name, body in {
        "nothing": b"",
        "blanks": b" \n\t ",
        "a word": b"hello",
        "half an object": BODY[:-5],
        "half a string": b'{"model": "demo',
        "a comma too many": BODY[:-1] + b",}",
        "a second object": BODY + BODY,
        "garbage behind the object": BODY + b"\0\0",
        "single quotes": BODY.replace(b'"', b"'"),
        "a comment": b"/* hi */" + BODY,
        "a name without quotes": b'{model: "demo"}',
        "Python's True": _with("True"),
        "a leading zero": _with("012"),
        "a plus sign": _with("+1"),
        "no digit before the point": _with(".5"),
        "no digit behind the point": _with("1."),
        "a hexadecimal number": _with("0x1F"),
        "a line break in a string": b'{"model": "de\nmo"}',
        "an unknown escape": b'{"model": "\\x41"}',
        "half an escape": b'{"model": "\\u12"}',
        "a byte order mark": b"\xef\xbb\xbf" + BODY,
        "four MiB of backslashes": b'{"model": "' + b"\\" * (4 * 2**20 + 1),
        "a million quotes": b'"' * 10**6,
    }.items()
)

ENCODINGS = (
    Row("JSON in UTF-16", post(BODY.decode().encode("utf-16")), "UTF-8", NOT_UTF8),
    Row("JSON in UTF-32, little-endian", post(BODY.decode().encode("utf-32-le")), "UTF-8", bad(None)),
    Row("a byte that begins no character", post(BODY.replace(b"Hello", b"He\xffo")), "UTF-8", NOT_UTF8),
    Row("an overlong NUL", post(BODY.replace(b"Hello", b"He\xc0\x80o")), "UTF-8", NOT_UTF8),
    Row("a surrogate in UTF-8", post(BODY.replace(b"Hello", b"He\xed\xa0\x80o")), "UTF-8", NOT_UTF8),
    Row("a code point beyond Unicode", post(BODY.replace(b"Hello", b"He\xf5\x80\x80\x80")), "UTF-8", NOT_UTF8),
    Row("half a surrogate pair", post(BODY.replace(b"Hello", rb"\ud800")), "Unicode", NO_CHARACTER),
    Row("a surrogate pair the wrong way", post(BODY.replace(b"Hello", rb"\udc00\ud800")), "Unicode", NO_CHARACTER),
    Row("half a surrogate pair as a name", post(BODY[:-1] + rb', "\udfff": 1}'), "Unicode", NO_CHARACTER),
    Row("a whole surrogate pair", post(BODY.replace(b"Hello", rb"Hello \ud83d\ude00")), "Unicode", OK),
    Row("a NUL in the text", post(BODY.replace(b"Hello", rb"Hel\u0000lo")), "Unicode", OK),
)

KINDS = tuple(
    Row(f"JSON: {name} instead of an object", post(body), "a JSON object", NO_OBJECT)
    for name, body in {
        "null": b"null", "true": b"true", "a number": b"42", "a string": b'"demo"', "an array": b"[" + BODY + b"]",
    }.items()
)  # fmt: skip

NUMBERS = (
    Row("NaN", post(_with("NaN")), "finite numbers", bad(None, "NaN")),
    Row("Infinity", post(_with("Infinity")), "finite numbers", bad(None, "Infinity")),
    Row("-Infinity", post(_with("-Infinity")), "finite numbers", bad(None, "-Infinity")),
    Row("1e999", post(_with("1e999")), "finite numbers", bad(None, "1e999")),
    Row("-1e999 where no field is", post(BODY[:-1] + b', "x": [[-1e999]]}'), "finite numbers", bad(None, "-1e999")),
    Row("a number of 5000 digits", post(_with("9" * 5000)), "4300 digits", bad(None, "4300")),
    Row("a number of a million digits", post(_with("9" * 10**6)), "4300 digits", bad(None, "4300")),
    Row("a fraction of a million digits", post(_with("0." + "9" * 10**6)), "type of seed", bad("seed", "integer")),
    Row("an exponent of a million digits", post(_with("1e" + "9" * 10**6)), "finite numbers", bad(None)),
    Row(
        "a temperature too small for a float",
        post(BODY.replace(b'"temperature": 0', b'"temperature": 1e-999')),
        "finite numbers",
        OK,
    ),
)

SIZES = (
    Row("65 levels", post(b'{"model":' + b"[" * 64 + b"]" * 64 + b"}"), "64 levels", TOO_DEEP),
    Row("100 000 open brackets", post(b"[" * 100_000), "64 levels", TOO_DEEP),
    Row("100 000 open objects", post(b'{"a":' * 100_000), "64 levels", TOO_DEEP),
    Row("500 001 values", post(lambda: b'{"x": [' + b"0," * 500_001 + b"0]}"), "500 000 values", TOO_MANY),
    Row(
        "two million empty arrays",
        post(lambda: b'{"x": [' + b"[]," * 2_000_000 + b"0]}"),
        "500 000 values",
        TOO_MANY,
        cost="large",
    ),
    Row(
        "450 000 numbers as content",
        chat(messages=lambda: [user([1] * 450_000)]),
        "one fault is enough",
        bad("messages[0].content[0]", "object"),
        cost="large",
    ),
    Row(
        "450 000 numbers as messages",
        chat(messages=lambda: [1] * 450_000),
        "one fault is enough",
        bad("messages[0]", "object"),
        cost="large",
    ),
    Row(
        "100 000 unknown fields",
        post(lambda: json.dumps({f"f{i}": i for i in range(100_000)}).encode()),
        "unknown fields",
        bad(),
        cost="large",
    ),
    Row(
        "the name of a field has 1 MiB",
        post(BODY[:-1] + b', "' + b"n" * 2**20 + b'": 1}'),
        "unknown fields",
        OK,
    ),
    Row("brackets in a string are text", chat(messages=[user("[{" * 500)]), "64 levels", OK),
    Row(
        "a body of blanks up to the limit",
        post(lambda: BODY + b" " * (32 * 2**20 - len(BODY))),
        "http.max_body_bytes",
        OK,
        cost="large",
    ),
    Row(
        "a byte more than the limit",
        post(lambda: BODY + b" " * (32 * 2**20 + 1 - len(BODY))),
        "http.max_body_bytes",
        Refused((413,), None, "request_too_large", (str(32 * 2**20 + 1), str(32 * 2**20))),
        cost="large",
    ),
)

NAMES = (
    Row(
        "a field twice: the last one counts",
        post(BODY[:-1] + b', "model": "other"}'),
        "JSON objects",
        Refused((404,), "model", "model_not_found"),
    ),
    *(
        Row(name, post(BODY[:-1] + b", " + field + b"}"), "unknown fields", OK)
        for name, field in {
            "an empty name": b'"": 1',
            "__proto__": b'"__proto__": {"model": "x"}',
            "__class__": b'"__class__": "os.system"',
            "model_config, a name of pydantic's": b'"model_config": {}',
            "a name of control characters": rb'"\u0000\r\n\u001b[31m": 1',
            "a name of line separators": rb'"a\u2028b": 1',
        }.items()
    ),
)

ROWS = (*SYNTAX, *ENCODINGS, *KINDS, *NUMBERS, *SIZES, *NAMES)
