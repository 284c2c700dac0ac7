"""Face: a route with a body that is right; the rows that every such route refuses, and those of its wrong fields."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.e2e.hostile.rows import (
    DROP,
    MALFORMED,
    Answer,
    Http,
    Raw,
    Refused,
    RefusedByAnthropic,
    RefusedByOllama,
    Row,
    Status,
)

JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Face:
    """A route with a body that is right."""

    path: str
    body: dict[str, Any]

    @property
    def is_anthropic(self) -> bool:
        return self.path.startswith("/v1/messages")

    @property
    def is_ollama(self) -> bool:
        return self.path.startswith("/api/")

    def post(self, content: bytes | Callable[[], bytes], content_type: str = "application/json") -> Http:
        return Http("POST", self.path, content, {"Content-Type": content_type})

    def encode(self, **fields: Any) -> bytes:
        body = {**self.body, **fields}
        return json.dumps({name: value for name, value in body.items() if value is not DROP}).encode()

    def refused(self, field: str | None, *says: str, status: int = 400) -> Answer:
        """field: its path, None where the body as a whole is refused, '' for any."""
        if self.is_ollama:
            return RefusedByOllama(status, (*filter(None, [field]), *says))
        if not self.is_anthropic:
            return Refused((status,), field, "", says)
        kind = {404: "not_found_error", 413: "request_too_large"}.get(status, "invalid_request_error")
        return RefusedByAnthropic(status, kind, (*filter(None, [field]), *says))


def malformed(face: Face) -> tuple[Row, ...]:
    """Rows that no route may accept, whatever its fields are."""
    body = face.encode()
    broken: dict[str, tuple[bytes | Callable[[], bytes], Answer]] = {
        "nothing": (b"", face.refused(None, "not valid JSON")),
        "half an object": (body[:-5], face.refused(None, "not valid JSON")),
        "a second object": (body + body, face.refused(None, "not valid JSON")),
        "a byte that begins no character": (body.replace(b"demo", b"de\xffmo"), face.refused(None, "UTF-8")),
        "half a surrogate pair": (body.replace(b"demo", rb"\ud800"), face.refused("", "surrogate")),
        "null": (b"null", face.refused(None, "JSON object")),
        "an array": (b"[" + body + b"]", face.refused(None, "JSON object")),
        "NaN": (body[:-1] + b', "seed": NaN}', face.refused(None, "NaN")),
        "a number of 5000 digits": (body[:-1] + b', "seed": ' + b"9" * 5000 + b"}", face.refused(None, "4300")),
        "100 000 open brackets": (b"[" * 100_000, face.refused(None, "64")),
        "500 001 values": (lambda: b'{"x": [' + b"0," * 500_001 + b"0]}", face.refused(None, "500000")),
    }
    too_large = 32 * 2**20 + 1
    length = b"Content-Length: %d" % len(body)
    return (
        *(Row(f"{face.path}: {name}", face.post(sent), "JSON", answer) for name, (sent, answer) in broken.items()),
        Row(f"{face.path}: a byte more than the limit", face.post(lambda: body + b" " * (too_large - len(body))),
            "http.max_body_bytes", face.refused(None, str(too_large), status=413), cost="large"),
        Row(f"{face.path}: a form", face.post(b"a=b", "application/x-www-form-urlencoded"), "application/json",
            Status((415,))),
        Row(f"{face.path}: PUT", Http("PUT", face.path, body, JSON), "routes", Status((404, 405))),
        Row(f"{face.path}: two lengths", Raw(_raw(face, body, length, b"Content-Length: 5")), "one length", MALFORMED),
        Row(f"{face.path}: a negative length", Raw(_raw(face, body, b"Content-Length: -1")), "Content-Length",
            MALFORMED),
        Row(f"{face.path}: a model of another name", face.post(face.encode(model="other")), "served_model_name",
            face.refused("" if face.is_anthropic or face.is_ollama else "model", "other", status=404)),
    )  # fmt: skip


def _raw(face: Face, body: bytes, *headers: bytes) -> bytes:
    lines = [b"POST " + face.path.encode() + b" HTTP/1.1", b"Host: {host}", b"Content-Type: application/json"]
    return b"\r\n".join([*lines, b"Connection: close", *headers]) + b"\r\n\r\n" + body


Case = tuple[dict[str, Any], str] | tuple[dict[str, Any], str, str]
"""Fields, the path that the error names, and what else its message says."""


def wrong_fields(face: Face, *cases: Case) -> tuple[Row, ...]:
    return tuple(
        Row(f"{face.path}: {_named(fields)}", face.post(face.encode(**fields)), "fields", face.refused(path, *says))
        for fields, path, *says in cases
    )


def _named(fields: dict[str, Any]) -> str:
    text = ", ".join(f"{name} {value!r}" if value is not DROP else f"no {name}" for name, value in fields.items())
    return text if len(text) <= 90 else f"{text[:60]}... ({len(text)} characters)"
