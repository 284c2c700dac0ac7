"""Custom tools, which take one text instead of JSON arguments; the model sees functions with one argument."""

import json
from typing import Literal

from deployments.http.grammar import text_grammar
from deployments.http.wire import OpenWire
from deployments.protocol import Tool
from engine.processing.lark import expression_of, normal_expression
from engine.protocol import GrammarSpec, InvalidRequest

INPUT = "input"
"""Name of the one argument."""

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


def input_of(arguments: str) -> str:
    """Return the text of a call's arguments; other arguments, of a format that is not enforced, as JSON text."""
    values = json.loads(arguments)
    return values[INPUT] if list(values) == [INPUT] and isinstance(values[INPUT], str) else arguments


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
