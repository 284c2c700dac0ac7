"""CallReader: reads the calls in a body that a grammar enforces while the model generates them."""

from typing import Protocol

from engine.processing.tool_arguments import ParsedToolCall


class CallReader(Protocol):
    """Reads the text after the opening of a call. The parts that it returns do not depend on how the text is cut.

    Attributes:
        has_begun: Whether the first part of a call was returned.
    """

    has_begun: bool

    def push(self, text: str) -> list[ParsedToolCall]:
        """Return the parts of calls that are certain with this text.

        Raises:
            ValueError: The text is not of the format.
        """
        ...
