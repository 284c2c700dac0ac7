"""ShapedCall: reads calls whose names and JSON arguments stand between strings that the chat template decides."""

from dataclasses import dataclass

from engine.processing.argument_writer import ArgumentWriter
from engine.processing.json_arguments import JsonArguments
from engine.processing.tool_arguments import ParsedToolCall, ToolTypes


@dataclass(frozen=True)
class CallShape:
    """The template's markup around the names and the JSON arguments of calls."""

    begin: str
    """Before the first name."""
    middle: str
    """Between a name and its arguments."""
    joint: str | None
    """Between the arguments of one call and the name of the next; None: the template supports only one call."""
    end: str
    """After the last arguments."""


class ShapedCall:
    """See CallReader.

    Args:
        shape: Markup of calls.
        opening: The part of the markup that was read.
        types: The declared tools.
    """

    def __init__(self, shape: CallShape, opening: str, types: ToolTypes):
        self.has_begun = False
        self._shape = shape
        self._types = types
        self._before = shape.begin.partition(opening)[2]  # expected before the next name
        self._unread = ""
        self._writer: ArgumentWriter | None = None  # of the call that is being read
        self._arguments: JsonArguments | None = None

    def push(self, text: str) -> list[ParsedToolCall]:
        parts: list[ParsedToolCall] = []
        text, self._unread = self._unread + text, ""
        while text:
            if self._writer is None:
                name = self._name_in(text)
                if name is None:
                    self._unread = text
                    break
                text = text[len(self._before) + len(name) + len(self._shape.middle) :]
                self._writer = ArgumentWriter(name, self._types, {"string"})
                self._arguments = JsonArguments(self._writer)
                self.has_begun = True
                parts.append(ParsedToolCall(name, "", is_last=False))
            else:
                assert self._arguments is not None
                rest = self._arguments.push(text)
                parts.append(ParsedToolCall("", self._writer.take(), is_first=False, is_last=rest is not None))
                if rest is None:
                    break
                text, self._writer = rest, None
                if self._shape.joint is None:
                    break
                self._before = self._shape.joint
        return parts

    def _name_in(self, text: str) -> str | None:
        """Return the name of the call that begins here; None if more text is needed, or no call follows."""
        heads = {name: f"{self._before}{name}{self._shape.middle}" for name in self._types.names}
        for name, head in heads.items():
            if text.startswith(head):
                return name
        if not self.has_begun and not any(head.startswith(text) for head in heads.values()):
            raise ValueError(f"no call of a declared tool begins with {text[:80]!r}")
        return None
