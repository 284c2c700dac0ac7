"""Reply: one HTTP response as a client saw it, and what must hold for every response, whatever was asked."""

import http.client
import io
import json
import re
import socket
from dataclasses import dataclass
from typing import Any, cast

from tests.support.sse import events

SECRETS = (b"Traceback", b"site-packages", b"/work/", b"/tmp/", b"ray::", b"object at 0x", b"pydantic.dev")
"""Internals of the server that an error must not contain: code, paths, libraries."""

_ID = re.compile(r"[!-~]{1,128}")


@dataclass(frozen=True)
class Reply:
    """status: 0 if the connection was closed without a response. error: why the client gave up."""

    status: int = 0
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    elapsed_s: float = 0.0
    error: str | None = None

    def header(self, name: str) -> list[str]:
        """All values, in order. name: in lower case."""
        return [value for found, value in self.headers if found == name]

    def json(self) -> Any:
        try:
            return json.loads(self.body)
        except ValueError:
            raise AssertionError(f"not JSON: {self!s}") from None

    @property
    def is_stream(self) -> bool:
        return any(value.startswith("text/event-stream") for value in self.header("content-type"))

    def content(self) -> str:
        """The text of a whole answer, streamed or not. Raises AssertionError for a stream that ends with an error."""
        if not self.is_stream:
            return self.json()["choices"][0]["message"]["content"]
        *chunks, last = [data for _, data in events([(0.0, self.body)])]
        assert last == b"[DONE]", last
        choices = [choice for chunk in chunks for choice in json.loads(chunk)["choices"]]
        return "".join(choice["delta"].get("content") or "" for choice in choices)

    def __str__(self) -> str:
        if self.status == 0:
            return "no response"
        return f"status {self.status} after {self.elapsed_s:.1f} s: {self.body[:600]!r}"


class _Recorded:
    def __init__(self, raw: bytes):
        self.stream = io.BytesIO(raw)
        self.stream.close = lambda: None  # the next response is read from it, too

    def makefile(self, mode: str) -> io.BytesIO:
        return self.stream


def read_replies(raw: bytes, elapsed_s: float, error: str | None = None) -> list[Reply]:
    """All responses on one connection; one of status 0 where there is none."""
    recorded, found = _Recorded(raw), []
    while recorded.stream.tell() < len(raw):
        try:
            response = http.client.HTTPResponse(cast(socket.socket, recorded), method="GET")
            response.begin()
            body = response.read()
        except (http.client.HTTPException, ValueError) as problem:
            error = error or f"{type(problem).__name__} in {raw[:300]!r}"
            break
        headers = tuple((name.lower(), value) for name, value in response.getheaders())
        found.append(Reply(response.status, headers, body, elapsed_s))
    if error is not None or not found:
        found.append(Reply(elapsed_s=elapsed_s, error=error))
    return found


def check_reply(reply: Reply) -> None:
    """Whatever a client sends: no 5xx, nothing of the inside, an error body in its dialect, one sane request id."""
    assert reply.status < 500, f"the request caused {reply!s}"
    for secret in SECRETS if reply.status >= 400 else ():
        assert secret not in reply.body, f"{secret!r} in {reply!s}"
    if (
        reply.status >= 400
        and reply.body
        and any(value.startswith("application/json") for value in reply.header("content-type"))
    ):
        body = reply.json()
        error, is_anthropic = body["error"], body.get("type") == "error"
        if isinstance(error, str):  # Ollama's
            assert set(body) == {"error"}, body
        else:
            assert set(error) >= ({"message", "type"} if is_anthropic else {"message", "type", "param", "code"}), error
            assert isinstance(error["message"], str), error
        ids = reply.header("x-request-id")
        assert len(ids) == 1 and _ID.fullmatch(ids[0]), f"X-Request-ID: {ids}"
