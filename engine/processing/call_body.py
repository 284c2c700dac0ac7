"""CallBody: collects the streamed text of one tool call and detects its end."""

import re
from collections.abc import Callable
from typing import Protocol

OUTSIDE_OF_STRINGS = re.compile(r'["{}\[\]]')
INSIDE_OF_STRINGS = re.compile(r'["\\]')
VALUE = re.compile(r"\{|\A\s*\[(?=\s*[{\]])")
"""Start of the JSON of a call; brackets before it are markup."""

MAX_BEHIND = 256
"""Most characters between the JSON of a call and its end marker."""

MAX_UNSURE = 64
"""Most pieces of text in which a call must be recognisable and its name complete."""


class CallBody(Protocol):
    """The text of a call after its opening marker."""

    text: str
    """Text of the call without its end marker, once it is complete."""

    def push(self, piece: str) -> str | None:
        """Add text; return the text after the call once it is complete, else None."""
        ...

    def finish(self) -> str | None:
        """Return the call's text if it is complete without an end marker, else None."""
        ...


class MarkedBody:
    """A call that ends with a marker.

    Args:
        end: The marker.
        is_end: Tells whether the text before a marker is a whole call; otherwise the marker is part of a value.
    """

    def __init__(self, end: str, is_end: Callable[[str], bool] = lambda text: True):
        self.text = ""
        self._end = end
        self._is_end = is_end
        self._pieces: list[str] = []
        self._tail = ""

    def push(self, piece: str) -> str | None:
        window = self._tail + piece
        if self._end not in window:
            self._pieces.append(piece)
            self._tail = window[-(len(self._end) - 1) :]
            return None
        text, start = "".join([*self._pieces, piece]), sum(map(len, self._pieces)) - len(self._tail)
        while (at := text.find(self._end, start)) >= 0:
            start = at + len(self._end)
            if self._is_end(text[:at]):
                self.text = text[:at]
                return text[start:]
        self._pieces, self._tail = [text], ""
        return None

    def finish(self) -> str | None:
        return None


class JsonBody:
    """A call that ends with a JSON object or array of objects, possibly after a name with markup.

    Args:
        end: Marker after the JSON that belongs to the call; it may be missing at the end of the answer.
        text: Start of the call, if the opening marker is part of it.
        is_call: Tells whether text may still become a call; otherwise the text is complete.
    """

    def __init__(self, end: str = "", text: str = "", is_call: Callable[[str], bool] = lambda text: True):
        self.text = ""
        self._end = end
        self._is_call = is_call
        self._pieces: list[str] = []
        self._scanner: JsonScanner | None = None  # set once the JSON starts
        self._is_whole = False
        self.push(text)

    def push(self, piece: str) -> str | None:
        rest = piece if self._is_whole else self._push_value(piece)
        if rest is None or not self._end:
            return rest
        self._pieces.append(rest)
        before, found, behind = "".join(self._pieces).partition(self._end)
        if found:
            return behind
        return before if len(before) > MAX_BEHIND else None  # the model omitted the end marker

    def finish(self) -> str | None:
        return self.text if self._is_whole else None

    def _push_value(self, piece: str) -> str | None:
        self._pieces.append(piece)
        if len(self._pieces) <= MAX_UNSURE and not self._is_call("".join(self._pieces)):
            return self._complete(len(piece))
        if self._scanner is None:
            text = "".join(self._pieces)
            match = VALUE.search(text)
            if match is None:
                return self._complete(len(piece)) if len(self._pieces) > MAX_UNSURE else None
            self._scanner, before = JsonScanner(), match.start()
            self._pieces = [text[:before], text[before:]]
            piece = text[before:]
        end = self._scanner.push(piece)
        return None if end is None else self._complete(end)

    def _complete(self, end: int) -> str:
        """Complete the call at this index of the last piece; return the text after it."""
        last = self._pieces.pop()
        self.text, self._is_whole, self._pieces = "".join([*self._pieces, last[:end]]), True, []
        return last[end:]


class JsonScanner:
    """Finds the end of a JSON object or array in streamed text.

    Attributes:
        in_string: Whether the text so far ends inside a string.
    """

    def __init__(self):
        self.in_string = False
        self._depth = 0
        self._is_escaped = False

    def push(self, piece: str) -> int | None:
        """Add text; return the index in `piece` after the last bracket of the value, None before the end."""
        at = 0
        if self._is_escaped and piece:
            at, self._is_escaped = 1, False
        while match := (INSIDE_OF_STRINGS if self.in_string else OUTSIDE_OF_STRINGS).search(piece, at):
            at = match.end()
            if match[0] == "\\":
                self._is_escaped = at == len(piece)
                at += 1
            elif match[0] == '"':
                self.in_string = not self.in_string and self._depth > 0
            else:
                self._depth += 1 if match[0] in "{[" else -1
                if self._depth <= 0:
                    return at
        return None
