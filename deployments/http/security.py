"""What a request body may weigh before anybody looks at its meaning: JSON depth and values."""

import json
import math
import re
from typing import Any, NoReturn

from engine.protocol import InvalidRequest

MAX_JSON_DEPTH = 64
MAX_JSON_VALUES = 500_000
"""Without it, 64 MiB of `[],[],…` would become more than a gigabyte of Python objects."""

_JSON_MARKS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{},]', re.DOTALL)
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def parse_json_object(body: bytes) -> dict[str, Any]:
    """Strict JSON: UTF-8, finite numbers, no lone surrogates, bounded depth and size. Raises InvalidRequest."""
    _check_shape(body)
    try:
        value = json.loads(body.decode(), parse_constant=_refuse_number, parse_float=_finite)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"The request body is not UTF-8: byte {error.start} begins no character.") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise InvalidRequest(f"The request body is not valid JSON: {error.msg} at {where}.") from None
    except ValueError:
        raise InvalidRequest("The request body holds an integer with more than 4300 digits.") from None
    if not isinstance(value, dict):
        raise InvalidRequest("The request body must be a JSON object.")
    if _SURROGATE_ESCAPE.search(body):
        _refuse_lone_surrogates(value)
    return value


def _check_shape(body: bytes) -> None:
    """Before parsing, since the parser recurses and allocates. Strings count as one mark, whatever is in them."""
    num_opened = body.count(b"[") + body.count(b"{")
    if num_opened <= MAX_JSON_DEPTH and num_opened + body.count(b",") <= MAX_JSON_VALUES:
        return
    depth = num_values = 0
    for mark in _JSON_MARKS.finditer(body):
        first = body[mark.start()]
        if first in b"[{":
            depth += 1
            num_values += 1
        elif first in b"]}":
            depth -= 1
        elif first in b",":
            num_values += 1
        if depth > MAX_JSON_DEPTH:
            raise InvalidRequest(f"The request body nests deeper than {MAX_JSON_DEPTH} levels.")
        if num_values > MAX_JSON_VALUES:
            raise InvalidRequest(f"The request body holds more than {MAX_JSON_VALUES} values.")


def _refuse_number(name: str) -> NoReturn:
    raise InvalidRequest(f"The request body holds {name}: numbers must be finite.")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise InvalidRequest(f"The request body holds {digits[:32]}, which is beyond the range of a 64-bit float.")
    return number


def _refuse_lone_surrogates(body: dict[str, Any]) -> None:
    pending: list[tuple[str, Any]] = [("", body)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, str) and _SURROGATE.search(value):
            where = f"`{path}`" if path else "The name of a field"
            raise InvalidRequest(f"{where} holds half of a surrogate pair, which is no character.", path or None)
        if isinstance(value, dict):
            for key, inner in value.items():
                pending += [(path, key), (f"{path}.{key}" if path else key, inner)]
        elif isinstance(value, list):
            pending += [(f"{path}[{i}]", inner) for i, inner in enumerate(value)]
