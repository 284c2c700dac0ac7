"""Requests that real clients sent, as they were recorded in November 2026, with their prose taken out.

A placeholder says how long each text was: `<text N chars>`, `<base64 N bytes>`. Keys, ids and personal data are not in
the file; types, enums, numbers, empty strings and the order of keys are as sent.
"""

import gzip
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import Any

PATH = Path(__file__).parent / "captured.jsonl.gz"

_TEXT = re.compile(r"<text (\d+) chars>")
_BASE64 = re.compile(r"<base64 \d+ bytes>")
GRAMMAR = 'start: "*** Begin Patch" LF /(.+)/ LF "*** End Patch"\n%import common.LF'
"""In place of the grammars of custom tools."""
_WORDS = "The old gate is quiet and the small harbor is bright . "


@dataclass(frozen=True)
class Captured:
    client: str
    version: str
    case: str
    n: int
    """Position within the case."""
    method: str
    path: str
    query: str
    headers: dict[str, str]
    """Those that a server may read, without keys."""
    body: dict[str, Any] | None

    @property
    def name(self) -> str:
        return f"{self.client} {self.case} {self.n} {self.path}"


@dataclass(frozen=True)
class Filling:
    """The text that replaces a placeholder."""

    png: str
    """base64."""
    signature: str
    """For what the server itself has sealed."""
    max_text_chars: int | None = None
    """Longer texts are cut, as an answer of the demo model on a CPU waits for its prompt."""


@cache
def load() -> tuple[Captured, ...]:
    return tuple(Captured(**json.loads(line)) for line in gzip.decompress(PATH.read_bytes()).splitlines())


def paths(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path and type of every value in a body, without indices."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from paths(item, f"{path}.{name}")
    elif isinstance(value, list):
        for item in value:
            yield from paths(item, f"{path}[]")
    else:
        yield path, type(value).__name__


def distinct(client: str) -> list[Captured]:
    """Return the requests of a client that differ in fields or types of values; the first one of each kind."""
    kinds: dict[Any, Captured] = {}
    for captured in load():
        if captured.client == client:
            kinds.setdefault((captured.method, captured.path, frozenset(paths(captured.body))), captured)
    return list(kinds.values())


def fill(body: Any, filling: Filling) -> Any:
    """The body with text, images and signatures in it."""

    def text(found: re.Match[str]) -> str:
        limit = filling.max_text_chars
        num_chars = int(found[1]) if limit is None else min(int(found[1]), limit)
        return "".join(islice(cycle(_WORDS), num_chars))

    def string(value: str, key: str) -> str:
        if key == "definition":
            return GRAMMAR
        sealed = key in ("signature", "encrypted_content")
        return _TEXT.sub(text, _BASE64.sub(filling.signature if sealed else filling.png, value))

    return _map_strings(body, string)


def _map_strings(value: Any, change: Callable[[str, str], str], key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _map_strings(item, change, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_map_strings(item, change, key) for item in value]
    return change(value, key) if isinstance(value, str) else value
