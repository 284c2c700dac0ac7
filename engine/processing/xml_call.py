"""XmlCall: reads calls in the XML of Qwen3-Coder and Qwen3.5, see tool_grammar.py."""

import re

from engine.processing.argument_writer import ArgumentWriter
from engine.processing.json_arguments import JsonArguments
from engine.processing.tool_arguments import TEXT_TYPES, ParsedToolCall, ToolTypes

FUNCTION = re.compile(
    r"<function=\s*([^\s<>]+)\s*>(.*?)(?:</function>|\Z)(?=\s*(?:<function=|</?tool_call>|\Z))", re.DOTALL
)
KEY = r"<parameter=\s*([^\s<>](?:[^\n\r<>]*[^\s<>])?)\s*>"
PARAMETER = re.compile(rf"{KEY}\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>|\Z))", re.DOTALL)

HEAD = re.compile(r"\s*<function=\s*([^\s<>]+)\s*>\s*")
NEXT = re.compile(rf"\s*(?:{KEY}\n?|(?P<end></function>))")
VALUE_END = re.compile(r"\n?</parameter>(?=\s*(?:<parameter=|</function>))")
END = "\n</parameter>"
BEHIND = ("<parameter=", "</function>")
MAX_HEAD = 512
"""Most characters before the end of a function's opening."""


def parse_xml(text: str, types: ToolTypes) -> list[ParsedToolCall]:
    """Parse the calls in a complete body. Raises ValueError if there is none."""
    calls = [types.call_of_texts(match[1], dict(PARAMETER.findall(match[2]))) for match in FUNCTION.finditer(text)]
    if not calls:
        raise ValueError("there is no function")
    return calls


class XmlCall:
    """See CallReader. Reads one call.

    Args:
        types: The declared tools.
    """

    def __init__(self, types: ToolTypes):
        self.has_begun = False
        self._types = types
        self._unread = ""
        self._writer: ArgumentWriter | None = None
        self._json: JsonArguments | None = None
        self._is_whole = False
        self._read_on = self._read_markup  # reads what may follow; tells whether it was there as a whole

    def push(self, text: str) -> list[ParsedToolCall]:
        if self._is_whole:
            return []
        self._unread += text
        parts: list[ParsedToolCall] = []
        if self._writer is None:
            if (head := HEAD.match(self._unread)) is None:
                if len(self._unread) > MAX_HEAD:
                    raise ValueError(f"no function begins with {self._unread[:80]!r}")
                return []
            self._unread = self._unread[head.end() :]
            self._writer, self.has_begun = ArgumentWriter(head[1], self._types, TEXT_TYPES), True
            parts.append(ParsedToolCall(head[1], "", is_last=False))
        while not self._is_whole and self._read_on(self._writer):
            pass
        if (written := self._writer.take()) or self._is_whole:
            parts.append(ParsedToolCall("", written, is_first=False, is_last=self._is_whole))
        return parts

    def _read_markup(self, writer: ArgumentWriter) -> bool:
        """Read the opening of a parameter, or the end of the function."""
        found = NEXT.match(self._unread)
        if found is None or (found["end"] is None and found.end() == len(self._unread) and found[0][-1] != "\n"):
            return False  # a line break behind the opening would belong to it
        self._unread = self._unread[found.end() :]
        if found["end"] is not None:
            writer.end()
            self._is_whole = True
        else:
            writer.begin_member(found[1])
            self._read_on = self._read_text if writer.takes_text else self._read_start
        return True

    def _read_start(self, writer: ArgumentWriter) -> bool:
        """Read up to the first character of a value that is no string."""
        start = self._unread.lstrip()[:1]
        if start and start in "[{":
            self._json = JsonArguments(writer, is_value=True)
            self._read_on = self._read_json
        elif start:
            self._read_on = self._read_text
        return bool(start)

    def _read_json(self, writer: ArgumentWriter) -> bool:
        """Read an array or object."""
        assert self._json is not None
        rest = self._json.push(self._unread)
        self._unread = rest or ""
        if rest is not None:
            self._read_on = self._read_end
        return rest is not None

    def _read_end(self, writer: ArgumentWriter) -> bool:
        """Read the end of a value that is an array or object."""
        end = VALUE_END.search(self._unread)
        if end is not None:
            self._unread, self._read_on = self._unread[end.end() :], self._read_markup
        return end is not None

    def _read_text(self, writer: ArgumentWriter) -> bool:
        """Read a value that is text, as far as it is certain."""
        end = VALUE_END.search(self._unread)
        num_certain = self._num_certain() if end is None else end.start()
        if num_certain:
            writer.add_text(self._unread[:num_certain])
        self._unread = self._unread[num_certain if end is None else end.end() :]
        if end is not None:
            writer.end_text()
            self._read_on = self._read_markup
        return end is not None

    def _num_certain(self) -> int:
        """Return how many characters cannot belong to the end of the value."""
        text = self._unread
        at = text.rfind(END[1:])
        if at >= 0 and any(mark.startswith(text[at + len(END) - 1 :].lstrip()) for mark in BEHIND):
            return at - text[:at].endswith("\n")
        starts = range(max(0, len(text) - len(END)), len(text))
        return next((at for at in starts if END.startswith(text[at:]) or END[1:].startswith(text[at:])), len(text))
