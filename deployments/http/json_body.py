"""parse_json_object: strict JSON for request bodies."""

import json
import math
import re
from typing import Any, NoReturn

from engine.errors import InvalidRequest
from engine.processing.json_shape import check_json_shape

_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def parse_json_object(body: bytes) -> dict[str, Any]:
    """Parse a body as a JSON object: UTF-8, finite numbers, no lone surrogates, bounded depth and number of values.

    Raises InvalidRequest.
    """
    check_json_shape(body, "The request body")
    try:
        value = json.loads(body.decode(), parse_constant=_refuse_number, parse_float=_finite)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"The request body is not UTF-8: byte {error.start} is invalid.") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise InvalidRequest(f"The request body is not valid JSON: {error.msg} at {where}.") from None
    except ValueError:
        raise InvalidRequest("The request body contains an integer with more than 4300 digits.") from None
    if not isinstance(value, dict):
        raise InvalidRequest("The request body must be a JSON object.")
    if _SURROGATE_ESCAPE.search(body):
        _refuse_lone_surrogates(value)
    return value


def _refuse_number(name: str) -> NoReturn:
    raise InvalidRequest(f"The request body contains {name}: numbers must be finite.")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise InvalidRequest(f"The request body contains {digits[:32]}, which is beyond the range of a 64-bit float.")
    return number


def _refuse_lone_surrogates(body: dict[str, Any]) -> None:
    pending: list[tuple[str, Any]] = [("", body)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, str) and _SURROGATE.search(value):
            where = f"`{path}`" if path else "A field name"
            raise InvalidRequest(f"{where} contains an unpaired surrogate, which is not a character.", path or None)
        if isinstance(value, dict):
            for key, inner in value.items():
                pending += [(path, key), (f"{path}.{key}" if path else key, inner)]
        elif isinstance(value, list):
            pending += [(f"{path}[{i}]", inner) for i, inner in enumerate(value)]
