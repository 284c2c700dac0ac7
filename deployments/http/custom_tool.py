"""Custom tools, which take one text instead of JSON arguments; the model sees functions with one argument."""

import json
import re
from typing import Literal

from deployments.http.generation import ToolCall
from deployments.http.grammar import text_grammar
from deployments.http.wire import OpenWire
from deployments.requests import Tool
from engine.errors import InvalidRequest
from engine.processing.lark import expression_of, normal_expression
from engine.protocol import GrammarSpec

INPUT = "input"
"""Name of the one argument."""

BEFORE_INPUT = json.dumps({INPUT: ""}).removesuffix('"}')
IN_STRING = re.compile(r'(?:[^"\\]|\\.)*')

MAX_DEFINITION_CHARS = 65_536


class TextFormat(OpenWire):
    """Any text as the input of a custom tool."""

    type: Literal["text"]


class InputGrammar(OpenWire):
    """The grammar that the text must match."""

    syntax: Literal["lark", "regex"]
    definition: str


def custom_tool(name: str, description: str | None, grammar: InputGrammar | None, path: str) -> Tool:
    """Return the function for a custom tool.

    Args:
        name: Name of the tool.
        description: What it is for.
        grammar: The grammar of its text; None: any text.
        path: Path of the grammar in the request, for errors.

    Raises:
        InvalidRequest: The grammar is not supported.
    """
    about = "The input of the tool as plain text."
    if grammar is not None:
        kind = "Lark grammar" if grammar.syntax == "lark" else "regular expression"
        about += f" It must match this {kind}:\n{grammar.definition}"
    parameters = {
        "type": "object",
        "properties": {INPUT: {"type": "string", "description": about}},
        "required": [INPUT],
        "additionalProperties": False,
    }
    expression = None if grammar is None else _expression(grammar, f"{path}.definition")
    return Tool(name, description, parameters, input_grammar=expression)


class InputText:
    """Reads the text of one call of a custom tool out of its arguments."""

    def __init__(self) -> None:
        self._unread = ""
        self._in_text = self._is_ended = False

    def push(self, part: ToolCall) -> str:
        """Return the next piece of the text. Arguments of another form, if no grammar enforces them, are the text.

        Args:
            part: The next part of the call; none ends within an escape.
        """
        if self._is_ended:
            return ""
        text = self._unread + part.arguments
        if not self._in_text and part.is_last:
            values = json.loads(text)
            return values[INPUT] if list(values) == [INPUT] and isinstance(values[INPUT], str) else text
        if not self._in_text and not text.startswith(BEFORE_INPUT):
            self._unread = text
            return ""
        text = text if self._in_text else text.removeprefix(BEFORE_INPUT)
        body = IN_STRING.match(text)
        assert body is not None
        self._unread, self._in_text, self._is_ended = "", True, body[0] != text
        return json.loads(f'"{body[0]}"')


def input_of(call: ToolCall) -> str:
    """Return the text of a call, as far as its answer has come."""
    return InputText().push(call)


def arguments_of(text: str) -> str:
    """Return the arguments of a call with this text, as the model sees them."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def _expression(grammar: InputGrammar, field: str) -> GrammarSpec:
    if len(grammar.definition) > MAX_DEFINITION_CHARS:
        raise InvalidRequest(
            f"`{field}` has {len(grammar.definition)} characters; the limit is {MAX_DEFINITION_CHARS}.", field
        )
    convert = expression_of if grammar.syntax == "lark" else normal_expression
    try:
        return text_grammar("regex", convert(grammar.definition), field)
    except ValueError as error:
        raise InvalidRequest(f"`{field}`: {error}", field) from None
