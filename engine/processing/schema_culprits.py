"""find_culprits: the parts of a schema that the grammar library cannot compile; open_culprits leaves them open.

The library names at most the kind of a problem, not its place, so that the place is found by compiling the schema with
parts of it left open: the smallest parts without which it compiles.
"""

import copy
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher

from engine.processing.grammar_build import build_matcher, byte_tokenizer
from engine.processing.json_schema import with_options
from engine.processing.schema_branches import TYPES
from engine.processing.schema_keywords import BOUNDS, OTHERS, SCHEMA_LISTS, SIZES, children_of, path_of, subschemas

MAX_COMPILATIONS = 60
MAX_COMPILED_CHARS = 1_000_000
"""Limits of a search; beyond them the whole schema is the culprit. They do not depend on the machine's load, so that
equal requests have equal grammars."""


@dataclass(frozen=True)
class Culprit:
    """A part of a schema without which the rest compiles."""

    pointer: str
    """JSON pointer of the subschema."""
    keyword: str | None
    """The only keyword of the subschema that has to go; None: all of it."""
    reason: str
    """A sentence for the client that names the place."""

    @property
    def name(self) -> str:
        """The place, such as `$.properties.a.minProperties`."""
        return path_of(self.pointer) + (f".{self.keyword}" if self.keyword else "")


class SearchEnded(Exception):
    """A limit of the search is reached."""


def find_culprits(schema: dict[str, Any]) -> tuple[Culprit, ...]:
    """Return the parts that keep a strict or lenient schema from compiling; () if it compiles.

    It is to be called in a thread with a deep stack.
    """
    return _find_culprits(json.dumps(schema))


def open_culprits(schema: dict[str, Any], culprits: Iterable[Culprit]) -> dict[str, Any]:
    """Return a copy of a schema in which these parts are left open, but for their types."""
    return _without(schema, [(culprit.pointer, culprit.keyword) for culprit in culprits])


@lru_cache(64)
def _find_culprits(text: str) -> tuple[Culprit, ...]:
    schema = json.loads(text)
    reason = _error(schema)
    if reason is None:
        return ()
    search = _Search(schema)
    try:
        places = search.places("", [])
        reasons = [search.error_without([other for other in places if other != place]) or reason for place in places]
    except SearchEnded:
        return (Culprit("", None, f"the schema at $ cannot be enforced: {reason}"),)
    return tuple(
        Culprit(pointer, keyword, f"the schema {_use(pointer, keyword)} cannot be enforced: {said}")
        for (pointer, keyword), said in zip(places, reasons, strict=True)
    )


def _use(pointer: str, keyword: str | None) -> str:
    return f"at {path_of(pointer)}" if keyword is None else f"uses `{keyword}` at {path_of(pointer)}, which"


Place = tuple[str, str | None]
"""JSON pointer of a subschema and its keyword; None: all of it."""


class _Search:
    def __init__(self, schema: dict[str, Any]):
        self._schema = schema
        self._parts = dict(subschemas(schema))
        self._num_left = min(MAX_COMPILATIONS, MAX_COMPILED_CHARS // len(json.dumps(schema)))

    def error_without(self, opened: Sequence[Place]) -> str | None:
        """Return the library's error for the schema with these places open; None if it compiles."""
        self._num_left -= 1
        if self._num_left < 0:
            raise SearchEnded
        return _error(_without(self._schema, opened))

    def places(self, pointer: str, others: list[Place]) -> list[Place]:
        """Return the smallest places in a part without which the schema compiles, with `others` open, too."""
        part = self._parts[pointer]
        children: list[Place] = [(pointer + step, None) for step, _ in children_of(part)]
        if children and self.error_without([*others, *children]) is None:
            found: list[Place] = []
            causes = self._causes(children, others)
            for i, (child, _) in enumerate(causes):
                found += self.places(child, [*others, *found, *causes[i + 1 :]])
            return found
        for keyword in sorted(part, key=_rank) if isinstance(part, dict) else ():
            if self.error_without([*others, (pointer, keyword)]) is None:
                return [(pointer, keyword)]
        return [(pointer, None)]

    def _causes(self, places: list[Place], others: list[Place]) -> list[Place]:
        """Return a smallest part of places that has to be open, by halves (QuickXplain)."""
        if self.error_without(others) is None:
            return []
        if len(places) == 1:
            return places
        first, second = places[: len(places) // 2], places[len(places) // 2 :]
        found = self._causes(first, [*others, *second])
        return found + self._causes(second, [*others, *found])


def _error(schema: dict[str, Any]) -> str | None:
    try:
        build_matcher(byte_tokenizer(), lambda: LLMatcher.grammar_from_json_schema(json.dumps(with_options(schema))))
    except ValueError as error:
        return str(error).removeprefix("the grammar cannot be compiled: ")
    return None


def _without(schema: dict[str, Any], places: Iterable[Place]) -> dict[str, Any]:
    """Return a copy of a schema with these places open."""
    opened = copy.deepcopy(schema)
    for pointer, keyword in places:
        steps = [step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]
        owner: Any = None
        part: Any = opened
        for step in steps:
            owner, part = part, part[int(step) if isinstance(part, list) else step]
        if isinstance(part, dict) and keyword is not None:
            part.pop(keyword, None)
        elif owner is None:
            opened = _open(part)
        else:
            owner[int(steps[-1]) if isinstance(owner, list) else steps[-1]] = _open(part)
    return opened


def _open(part: Any) -> dict[str, Any]:
    """Return the schema of any value of a part's types."""
    types = part.get("type") if isinstance(part, dict) else None
    named = types if isinstance(types, list) else [types]
    return {"type": types} if all(isinstance(name, str) and name in TYPES for name in named) and named else {}


def _rank(keyword: str) -> tuple[int, str]:
    """Order keywords by how little is lost without them."""
    orders = (SIZES, BOUNDS, OTHERS - {"type", "$ref"}, SCHEMA_LISTS | {"patternProperties", "$ref"})
    return next((i for i, keywords in enumerate(orders) if keyword in keywords), len(orders)), keyword
