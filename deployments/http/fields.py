"""FieldRules: how a dialect treats the fields at the top of a body.

A field is one of these:
* honoured: the wire model has it.
* neutral: not supported, but accepted with values that have no effect.
* a hint: accepted with values that ask for something this server cannot give, and reported as ignored.
* refused: not supported, and it would change the answer.
* informational: it changes no answer, and is accepted up to a size.
* unknown: ignored and reported, or refused, depending on `http.unknown_fields`.
"""

import json
import logging
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError

from deployments.http.errors import from_validation, shown
from engine.errors import InvalidRequest

logger = logging.getLogger("orchard.http")

MAX_INFORMATIONAL_CHARS = 16_384
"""Characters of one informational field as JSON; clients put session ids and labels there."""

MAX_IGNORED = 64
"""Most unknown fields of one body that are ignored; a body with more is refused."""

MAX_NAME_CHARS = 64
"""Characters of an unknown field's name that are kept for headers and errors."""

MAX_PLACES = 16
MAX_PLACE_CHARS = 160
"""Parts of the tools' schemas that a header names, and characters of each."""

MAX_COUNTED_NAMES = 256
"""Most different unknown names that are counted and logged, so that clients cannot fill memory or the log."""

_IDENTIFIER = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,39}")
"""Names that are logged; any other key may be arbitrary text of a client."""

UnknownFields = Literal["report", "refuse"]

T = TypeVar("T", bound=BaseModel)


@dataclass(frozen=True)
class FieldRules:
    """The rules of one dialect for fields that its wire model does not have."""

    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Unsupported field to its values, besides null, that have no effect."""
    hints: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Neutral field to further values that are accepted and reported."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Unsupported field to a sentence with the alternative, or ''."""
    informational: frozenset[str] = frozenset()
    """Fields that change no answer."""


def split_fields(
    raw: Mapping[str, Any], known: Collection[str], rules: FieldRules, unknown: UnknownFields = "report"
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Split a body into its honoured fields and the names of its hints and unknown ones.

    Args:
        raw: The body.
        known: Names of the honoured fields.
        rules: Rules for the other fields.
        unknown: Whether unknown fields are reported or refused.

    Raises:
        InvalidRequest: Names the first field that is not accepted.
    """
    honoured: dict[str, Any] = {}
    ignored: list[str] = []
    hints: list[str] = []
    for name, value in raw.items():
        if name in known:
            honoured[name] = value
        elif value is None and (name in rules.neutral or name in rules.refused):
            continue
        elif name in rules.neutral and any(_same_json(value, hint) for hint in rules.hints.get(name, ())):
            hints.append(name)
        elif name in rules.neutral:
            _check_neutral(name, value, (*rules.neutral[name], *rules.hints.get(name, ())))
        elif name in rules.refused:
            raise InvalidRequest(f"`{name}` is not supported. {rules.refused[name]}".strip(), name)
        elif name in rules.informational:
            _check_size(name, value)
        else:
            ignored.append(name)
    if ignored and unknown == "refuse":
        raise InvalidRequest(f"`{ignored[0][:MAX_NAME_CHARS]}` is not supported.", ignored[0][:MAX_NAME_CHARS])
    if len(ignored) > MAX_IGNORED:
        raise InvalidRequest(
            f"The request body has {len(ignored)} unknown fields, such as `{ignored[0][:MAX_NAME_CHARS]}`; the limit "
            f"is {MAX_IGNORED}."
        )
    return honoured, tuple(name[:MAX_NAME_CHARS] for name in (*hints, *ignored))


def validate_body(
    model: type[T], raw: Mapping[str, Any], rules: FieldRules, unknown: UnknownFields
) -> tuple[T, tuple[str, ...]]:
    """Validate a body with a dialect's wire model; return it and the names of its unknown fields.

    Raises InvalidRequest for the first wrong field.
    """
    honoured, ignored = split_fields(raw, model.model_fields, rules, unknown)
    try:
        return model.model_validate(honoured), ignored
    except ValidationError as error:
        raise from_validation(error) from None


def _check_neutral(name: str, value: Any, harmless: tuple[Any, ...]) -> None:
    if any(_same_json(value, other) for other in harmless):
        return
    allowed = " or ".join(["null", *map(json.dumps, harmless)])
    raise InvalidRequest(f"`{name}` is {shown(value)}, which is not supported: it must be {allowed}.", name)


def _check_size(name: str, value: Any) -> None:
    num_chars = len(json.dumps(value, ensure_ascii=False)) if isinstance(value, dict | list) else len(str(value))
    if num_chars > MAX_INFORMATIONAL_CHARS:
        raise InvalidRequest(f"`{name}` has {num_chars} characters; the limit is {MAX_INFORMATIONAL_CHARS}.", name)


def _same_json(value: Any, other: Any) -> bool:
    """Compare JSON values, distinguishing true from 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


class IgnoredFields:
    """Counts the unknown fields that clients send, by name, and logs each identifier once."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def note(self, names: Collection[str]) -> None:
        """Count the unknown fields of one request."""
        for name in names:
            if name in self._counts or len(self._counts) < MAX_COUNTED_NAMES:
                if name not in self._counts and _IDENTIFIER.fullmatch(name):
                    logger.info("the unknown field %s in a request is ignored", name)
                self._counts[name] += 1

    def status(self) -> dict[str, int]:
        """Return the number of requests per unknown field, the most frequent first."""
        return dict(self._counts.most_common())


def printable(name: str, max_chars: int = MAX_NAME_CHARS) -> str:
    """Escape a client's field name for a header: ASCII without control characters and commas, cut to max_chars."""
    return json.dumps(name[:max_chars])[1:-1].replace(",", "\\u002c").replace("\x7f", "\\u007f")


def left_open_names(places: Sequence[str]) -> str:
    """Return the parts of the tools' schemas that are not enforced, for a header."""
    named = [printable(place, MAX_PLACE_CHARS) for place in places[:MAX_PLACES]]
    return ", ".join([*named, f"{len(places) - MAX_PLACES} more"] if len(places) > MAX_PLACES else named)
