"""Exchange: the answer to one request as it is frozen, without what is never the same twice."""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

MAX_BODY_CHARS = 8000
"""Longer bodies are frozen by their length and hash."""

_HEX = re.compile(r"(?<![0-9a-zA-Z])[0-9a-f]{24,64}(?![0-9a-zA-Z])|(?<=_)[0-9a-f]{24,64}(?![0-9a-zA-Z])")
_TIME = re.compile(r'("(?:created|created_at|completed_at)": ?)\d{10}\b')
_DATE = re.compile(r"\b20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z")
_SEALED = re.compile(r'("(?:signature|encrypted_content)": ?")[\w+/=-]{40,}(?=")')
_FIGURE = re.compile(r'("(?:\w+_ms|\w+_duration|logprob)": ?)-?[\d.]+(?:e-?\d+)?')
_DURATION = re.compile(r"dur=[\d.]+")
_FRACTION = re.compile(r"-?\d+\.\d{5,}(?:e-?\d+)?")


@dataclass(frozen=True)
class Exchange:
    """An answer with ids, times, durations, signatures, logprobs and other long fractions replaced.

    Prefixes and lengths of ids are kept.

    Attributes:
        status: 0 for a connection that is closed without a response.
        headers: In the order in which they are sent.
        body: As text.
    """

    status: int
    headers: tuple[tuple[str, str], ...]
    body: str


def exchange(status: int, headers: Iterable[tuple[str, str]], body: bytes) -> Exchange:
    """Freeze an answer. Headers as sent, names in any case; the body is what was sent after any decompression."""
    text = body.decode("utf-8", "backslashreplace")
    stable = _stable(text)
    is_rounded = _FRACTION.search(text) is not None or _FIGURE.search(text) is not None
    if len(stable) > MAX_BODY_CHARS:
        stable = f"<{len(stable)} characters, SHA-256 {hashlib.sha256(stable.encode()).hexdigest()[:16]}>"
    frozen = []
    for name, value in headers:
        is_length = name.lower() == "content-length"
        frozen.append((name.lower(), "<length>" if is_length and is_rounded else _header(name.lower(), value)))
    return Exchange(status, tuple(frozen), stable)


def _header(name: str, value: str) -> str:
    """Sort the methods of Allow, which Starlette sends in the order of a set."""
    if name == "date":
        return "<date>"
    if name == "x-orchard-timing":
        return _DURATION.sub("dur=1", value)
    return ", ".join(sorted(value.split(", "))) if name == "allow" else _stable(value)


def _stable(text: str) -> str:
    text = _HEX.sub(lambda found: f"<{len(found[0])} hex>", text)
    text = _DATE.sub("2026-01-01T00:00:00Z", _TIME.sub(r"\g<1>1700000000", text))
    text = _FRACTION.sub("0.1", _FIGURE.sub(r"\g<1>1", text))
    return _SEALED.sub(r"\1<sealed>", text)
