"""ArgumentWriter: writes the arguments of a tool call as JSON text while the model generates them."""

import json
import math
import re
import sys
from collections.abc import Set

from engine.processing.tool_arguments import ToolTypes, dump_json, parse_json

SURROGATE = re.compile("[\ud800-\udfff]")


class ArgumentWriter:
    """Writes one object, member by member, in the form of dump_json. What has been written never changes.

    A text is written at once if the schema allows strings alone, otherwise as soon as it cannot spell another value. A
    key that occurs twice is written twice; readers of JSON take the last one, as they do with the model's own text.

    Args:
        name: Name of the tool.
        types: Types of its parameters.
        untyped: Types that a text may spell where the schema names none.
    """

    def __init__(self, name: str, types: ToolTypes, untyped: Set[str]):
        self._name = name
        self._types = types
        self._untyped = untyped
        self._key = ""
        self._is_empty = True
        self._held = ""  # the start of a text that may still spell another value
        self._is_certain = False
        self._written: list[str] = []

    def begin_member(self, key: str) -> None:
        self._written += ["{" if self._is_empty else ", ", dump_json(key), ": "]
        self._key, self._is_empty, self._is_certain = key, False, False

    @property
    def takes_text(self) -> bool:
        """Whether the schema allows a string as the member's value."""
        return "string" in self._types.allowed(self._name, self._key, self._untyped)

    def add_text(self, text: str) -> None:
        """Add text to the member's value, which is text."""
        self._held += text
        if not self._is_certain:
            if self._types.may_spell(self._name, self._key, self._held, self._untyped):
                return
            self._is_certain = True
            self._written.append('"')
        self._written.append(string_body(self._held))
        self._held = ""

    def end_text(self) -> None:
        """End the member's value, which is text."""
        if self._is_certain:
            self._written.append('"')
        else:
            self._written.append(dump_json(self._types.typed(self._name, self._key, self._held, self._untyped)))
        self._held = ""

    def add_json(self, text: str) -> None:
        """Add JSON text, in the form of dump_json, to the member's value, which is not text."""
        self._written.append(text)

    def end(self) -> None:
        self._written.append("{}" if self._is_empty else "}")

    def take(self) -> str:
        """Return what was written since the last call."""
        text = "".join(self._written)
        self._written.clear()
        return text


def string_body(text: str) -> str:
    """Return the JSON string of a text without its quotes; unpaired surrogates are escaped, as UTF-8 has none."""
    body = json.dumps(text, ensure_ascii=False)[1:-1]
    return body if body.isascii() else SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", body)


def dump_literal(literal: str) -> str:
    """Return a JSON number or word in the form of dump_json; a number beyond float64 becomes the largest one.

    Raises ValueError for other text.
    """
    try:
        value = parse_json(literal)
    except ValueError:
        value = float(literal)  # an integer of more digits than Python reads
    if isinstance(value, float) and math.isinf(value):
        value = math.copysign(sys.float_info.max, value)
    return dump_json(value)
