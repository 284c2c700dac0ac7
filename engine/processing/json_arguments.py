"""JsonArguments: reads the JSON of a call's arguments, or of one of them, in any pieces, and writes it again."""

import re

from engine.processing.argument_writer import ArgumentWriter, dump_literal, string_body

LITERAL = re.compile(r'[^\s"{}\[\],:]+')
PLAIN = re.compile(r'[^"\\]+')
ESCAPE = re.compile(r'\\(?:u(?P<code>[0-9a-fA-F]{4})|(?P<char>["\\/bfnrt]))')
ESCAPE_START = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
LOW_SURROGATE = re.compile(r"\\u(?P<code>[dD][c-fC-F][0-9a-fA-F]{2})")
ESCAPED = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


class JsonArguments:
    """Reads one object or array, of which a grammar guarantees that it is valid JSON.

    Args:
        writer: Gets the members of the object, or the value of one member.
        is_value: Whether the JSON is the value of a member that has begun.
    """

    def __init__(self, writer: ArgumentWriter, is_value: bool = False):
        self._writer = writer
        self._is_value = is_value
        self._depth = self._outside = 1 if is_value else 0
        self._is_key_next = False  # of the object itself
        self._in_string = False
        self._key: str | None = None  # the part of a key that was read
        self._literal = ""
        self._held = ""  # the start of an escape

    def push(self, text: str) -> str | None:
        """Read text; return the text after the JSON once it is complete, else None. Raises ValueError if it is none."""
        text, at, self._held = self._held + text, 0, ""
        while at < len(text):
            if self._in_string:
                at = self._read_string(text, at)
            elif literal := LITERAL.match(text, at):
                self._literal += literal[0]
                at = literal.end()
            else:
                self._read_mark(text[at])
                at += 1
                if self._depth == self._outside and text[at - 1] in "]}":
                    if not self._is_value:
                        self._writer.end()
                    return text[at:]
        return None

    def _read_mark(self, mark: str) -> None:
        """Read a character that is neither in a string nor part of a number or word."""
        if self._literal:
            self._writer.add_json(dump_literal(self._literal))
            self._literal = ""
        if mark == '"':
            self._in_string = True
            if self._is_key_next:
                self._key = ""
            elif self._depth > 1:
                self._writer.add_json('"')
            return
        is_inside = self._depth > 1
        if mark in "{[":
            self._depth += 1
            is_inside = self._depth > 1
        elif mark in "}]":
            self._depth -= 1
        if self._depth == 1 and mark in "{,":
            self._is_key_next = True
        if is_inside and not mark.isspace():
            self._writer.add_json(f"{mark} " if mark in ",:" else mark)

    def _read_string(self, text: str, at: int) -> int:
        """Read characters of a string from an index on; return the index behind them."""
        if plain := PLAIN.match(text, at):
            self._add_characters(plain[0])
            return plain.end()
        if text[at] == '"':
            self._end_string()
            return at + 1
        escape = ESCAPE.match(text, at)
        if escape is None:
            if ESCAPE_START.match(text, at) is None:
                raise ValueError(f"{text[at : at + 6]!r} is no escape of JSON")
            self._held = text[at:]
            return len(text)
        if escape["code"] is None:
            self._add_characters(ESCAPED.get(escape["char"], escape["char"]))
            return escape.end()
        code, end = int(escape["code"], 16), escape.end()
        if 0xD800 <= code < 0xDC00:  # the first half of a character
            if end == len(text) or ESCAPE_START.match(text, end):
                self._held = text[at:]
                return len(text)
            if low := LOW_SURROGATE.match(text, end):
                code = 0x10000 + ((code - 0xD800) << 10) + (int(low["code"], 16) - 0xDC00)
                end = low.end()
        self._add_characters(chr(code))
        return end

    def _add_characters(self, characters: str) -> None:
        if self._key is not None:
            self._key += characters
        elif self._depth == 1:
            self._writer.add_text(characters)
        else:
            self._writer.add_json(string_body(characters))

    def _end_string(self) -> None:
        self._in_string = False
        if self._key is not None:
            self._writer.begin_member(self._key)
            self._key, self._is_key_next = None, False
        elif self._depth == 1:
            self._writer.end_text()
        else:
            self._writer.add_json('"')
