"""GrammarSpecs of the schemas and patterns that clients send."""

import json
from typing import Any, Literal

from engine.errors import InvalidRequest
from engine.protocol import GrammarSpec

MAX_GRAMMAR_CHARS = 4 * 2**20
"""Characters of a schema or regex; the engine applies a lower limit (`grammar.max_bytes`)."""


def schema_grammar(schema: dict[str, Any] | str, field: str) -> GrammarSpec:
    """Return the grammar of a schema, whose key order is kept, as the model writes keys in this order."""
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    return text_grammar("json_schema", text, field)


def text_grammar(kind: Literal["json_schema", "regex", "lark"], text: str, field: str) -> GrammarSpec:
    """Return the grammar of a text. Raises InvalidRequest if it is too long."""
    if len(text) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(f"`{field}` has {len(text)} characters; the limit is {MAX_GRAMMAR_CHARS}.", field)
    return GrammarSpec(kind, text, field)
