"""check_json_shape: limits the depth and number of values of JSON text before it is parsed."""

import re

from engine.errors import InvalidRequest

MAX_JSON_DEPTH = 64
MAX_JSON_VALUES = 500_000
"""Limit per request. Without it 32 MiB of `[],[],…` would become more than half a gigabyte of Python objects."""

_MARKS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{},]', re.DOTALL)


def check_json_shape(
    text: bytes,
    subject: str,
    field: str | None = None,
    max_values: int = MAX_JSON_VALUES,
    max_depth: int = MAX_JSON_DEPTH,
) -> int:
    """Check the depth and count the values of JSON text; a string is one value.

    Args:
        text: UTF-8, not necessarily valid JSON.
        subject: Name of the text in errors, such as "The request body".
        field: Field that errors name.
        max_values: Most values.
        max_depth: Deepest nesting.

    Returns:
        An upper bound of the number of values.

    Raises:
        InvalidRequest: The text exceeds max_depth or max_values.
    """
    num_opened = text.count(b"[") + text.count(b"{")
    at_most = num_opened + text.count(b",") + 1
    if num_opened <= max_depth and at_most <= max_values:
        return at_most
    depth = num_strings = 0
    num_values = 1
    for mark in _MARKS.finditer(text):
        first = text[mark.start()]
        if first in b"[{":
            depth += 1
            num_values += 1
        elif first in b"]}":
            depth -= 1
        elif first in b",":
            num_values += 1
        else:
            num_strings += 1  # at most the value and its key
        if depth > max_depth:
            raise InvalidRequest(f"{subject} is nested deeper than {max_depth} levels.", field)
        if num_values > max_values or num_strings > 2 * max_values:
            raise InvalidRequest(f"{subject} has more than {max_values} values.", field)
        if depth < 0:
            break  # parsers fail at this bracket
    return num_values
