"""tool_schema: the schema of a function's parameters that a grammar enforces, and the parts that it leaves open."""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from engine.processing.grammar_build import run_deep
from engine.processing.json_schema import lenient_schema, strict_schema
from engine.processing.schema_culprits import find_culprits, open_culprits

MAX_CACHED_CHARS = 262_144
"""Longest schema that is cached: clients send the same tools with each turn."""

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def tool_schema(parameters: Mapping[str, Any], is_strict: bool) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the schema for llguidance and the places that it leaves open, such as `$.properties.a.not`.

    Args:
        parameters: JSON Schema of the client.
        is_strict: Whether nothing may be left open.

    Raises:
        ValueError: A strict schema cannot be enforced; names the keyword and its place.
    """
    try:
        text = json.dumps(parameters)
        made = _cached(text, is_strict) if len(text) <= MAX_CACHED_CHARS else _made(text, is_strict)
    except (ValueError, RecursionError) as error:
        if is_strict:
            raise ValueError(
                str(error) if isinstance(error, ValueError) else "the schema is nested too deeply"
            ) from None
        return dict(ANY_OBJECT), ("$",)
    schema, left_open = made
    return json.loads(schema), left_open


def _made(text: str, is_strict: bool) -> tuple[str, tuple[str, ...]]:
    parameters = json.loads(text)
    schema, left_open = (strict_schema(parameters), []) if is_strict else lenient_schema(parameters)
    if culprits := run_deep(lambda: find_culprits(schema)):
        if is_strict:
            raise ValueError(culprits[0].reason)
        schema = open_culprits(schema, culprits)
        left_open += [culprit.name for culprit in culprits]
    return json.dumps(schema), tuple(left_open)


_cached = lru_cache(64)(_made)
