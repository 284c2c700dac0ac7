"""A golden file: exchanges by name in a text that is read in reviews, and their differences in words."""

import json
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tests.golden.exchange import Exchange

MAX_SHOWN = 160
"""Characters of a value in a difference."""

Exchanges = Mapping[str, Exchange]


def dumps(title: str, exchanges: Exchanges) -> str:
    """Return the text of a file: per exchange its name, the status, one header a line, and the body behind bars."""
    blocks = [f"{title}\n"]
    for name, one in exchanges.items():
        lines = [f"== {name}", str(one.status), *(f"{key}: {value}" for key, value in one.headers)]
        lines += [_barred(line) for line in one.body.split("\n")]
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def _barred(line: str) -> str:
    """A line of a body: behind a bar as it is, or behind a backslash with escapes, if it has control characters."""
    return f"|{line}" if line.isprintable() else "\\" + line.encode("unicode_escape").decode()


def loads(text: str) -> dict[str, Exchange]:
    """Return the exchanges of a file."""
    exchanges: dict[str, Exchange] = {}
    for block in text.split("\n== ")[1:]:
        name, status, *lines = block.rstrip("\n").split("\n")
        heads = [line for line in lines if line[:1] not in ("|", "\\")]
        body = "\n".join(
            line[1:].encode().decode("unicode_escape") if line[0] == "\\" else line[1:] for line in lines[len(heads) :]
        )
        pairs = [line.partition(": ") for line in heads]
        exchanges[name] = Exchange(int(status), tuple((key, value) for key, _, value in pairs), body)
    return exchanges


def read(path: Path) -> dict[str, Exchange]:
    return loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def differences(old: Exchanges, new: Exchanges) -> list[str]:
    """Say in words what has changed, one line per change."""
    lines = [f"{name}: is gone" for name in old if name not in new]
    lines += [f"{name}: is new, status {one.status}" for name, one in new.items() if name not in old]
    for name, one in new.items():
        if name in old and one != old[name]:
            lines += [f"{name}: {change}" for change in _changes(old[name], one)]
    return lines


def _changes(old: Exchange, new: Exchange) -> Iterator[str]:
    if old.status != new.status:
        yield f"status {old.status} -> {new.status}"
    yield from _header_changes(dict(old.headers), dict(new.headers))
    if sorted(old.headers) == sorted(new.headers) and old.headers != new.headers:
        yield f"the order of headers is {[key for key, _ in new.headers]}"
    if old.body != new.body:
        yield from _body_changes(old.body, new.body)


def _header_changes(old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[str]:
    for key in {**old, **new}:
        if old.get(key) != new.get(key):
            yield f"header {key}: {_shown(old.get(key))} -> {_shown(new.get(key))}"


def _body_changes(old: str, new: str) -> Iterator[str]:
    """Changes by path in JSON, by event in streams, else by the first character that differs."""
    before, after = _events(old), _events(new)
    if len(before) == 1 and len(after) == 1:
        changes = [*_value_changes(before[0], after[0], "body")]
    else:
        pairs = enumerate(zip_longest(before, after))
        changes = [change for i, pair in pairs for change in _value_changes(*pair, f"event {i}")]
    if changes:
        yield from changes
        return
    at = next(i for i, pair in enumerate(zip_longest(old, new)) if pair[0] != pair[1])
    yield f"body, character {at}: {_shown(old[at : at + 40])} -> {_shown(new[at : at + 40])}, the same values"


def _events(body: str) -> list[Any]:
    """The values of a body: one, or those of a stream's events with their names."""
    if not body.startswith(("data:", "event:", ":")):
        return [_value(body)]
    return [[_value(line.partition(": ")[2]) for line in block.split("\n")] for block in body.split("\n\n")]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _value_changes(old: Any, new: Any, path: str) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from _value_changes(old.get(key, _ABSENT), new.get(key, _ABSENT), f"{path}.{key}")
        if old == new and [*old] != [*new]:
            yield f"{path}: the order of keys is {[*new]}"
    elif isinstance(old, list) and isinstance(new, list):
        for i, pair in enumerate(zip_longest(old, new, fillvalue=_ABSENT)):
            yield from _value_changes(*pair, f"{path}[{i}]")
    elif old != new or type(old) is not type(new):
        yield f"{path}: {_shown(old)} -> {_shown(new)}"


class _Absent:
    def __repr__(self) -> str:
        return "absent"


_ABSENT = _Absent()


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... ({len(text)} characters)"
