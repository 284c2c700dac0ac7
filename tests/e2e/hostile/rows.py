"""Row: one line of the table: a request as a hostile or careless client sends it, the limit it aims at, the answer."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import httpx

from tests.e2e.hostile.replies import Reply, check_reply, read_replies

CHAT = "/v1/chat/completions"
CONNECT_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Target:
    """The server under attack. http: a client whose connections the rows share."""

    host: str
    port: int
    http: httpx.AsyncClient


class Request(Protocol):
    async def send(self, target: Target) -> list[Reply]:
        """Every response that came; a connection that was closed without one gives a Reply of status 0."""
        ...


class Answer(Protocol):
    def check(self, reply: Reply) -> None:
        """Raises AssertionError for a reply that is not this answer."""
        ...


@dataclass(frozen=True)
class Row:
    """name: unique in the table. limit: the rule or option that the request runs into. cost: `small` rows are sent
    several at once, `large` ones one after the other, `slow` ones (which mostly sleep) beside all others.
    within_s: seconds until the request is answered, on a busy machine of two cores."""

    name: str
    request: Request
    limit: str
    answer: Answer
    cost: Literal["small", "large", "slow"] = "small"
    within_s: float = 120.0

    def check(self, replies: Sequence[Reply]) -> None:
        """Raises AssertionError."""
        assert replies, "no reply at all"
        for reply in replies:
            assert reply.error is None, f"{reply.error} after {reply.elapsed_s:.1f} s; so far {reply!s}"
            check_reply(reply)
            self.answer.check(reply)


# Requests


@dataclass(frozen=True)
class Raw:
    """Bytes as they are, over one connection, which is read until the server closes it.

    content: all bytes, or a function that makes them. ends: close the sending half afterwards.
    """

    content: bytes | Callable[[], bytes]
    ends: bool = False
    timeout_s: float = 30.0

    async def send(self, target: Target) -> list[Reply]:
        content = self.content if isinstance(self.content, bytes) else self.content()
        content = content.replace(b"{host}", f"{target.host}:{target.port}".encode())
        began_s, raw, error = time.monotonic(), bytearray(), None
        reader, writer = await asyncio.open_connection(target.host, target.port)
        try:
            async with asyncio.timeout(self.timeout_s):
                writing = asyncio.ensure_future(_write(writer, content, self.ends))
                while data := await reader.read(2**16):
                    raw += data
                writing.cancel()
        except TimeoutError:
            error = f"the connection was not closed within {self.timeout_s:g} s"
        except OSError:  # reset: the answer, if there was one, has been read
            pass
        finally:
            writer.transport.abort()
        return read_replies(bytes(raw), time.monotonic() - began_s, error)


async def _write(writer: asyncio.StreamWriter, content: bytes, ends: bool) -> None:
    try:
        writer.write(content)
        await writer.drain()
        if ends:
            writer.write_eof()
    except OSError:
        pass  # the server has closed the connection in the middle


@dataclass(frozen=True)
class Http:
    """A well-formed HTTP request. content: the body, or a function that makes it."""

    method: str
    path: str
    content: bytes | Callable[[], bytes] = b""
    headers: Mapping[str, str] = field(default_factory=dict)

    async def send(self, target: Target) -> list[Reply]:
        content = self.content if isinstance(self.content, bytes) else await asyncio.to_thread(self.content)
        began_s = time.monotonic()
        headers = [(name.encode(), value.encode()) for name, value in self.headers.items()]
        try:
            response = await target.http.request(self.method, self.path, content=content or None, headers=headers)
        except httpx.HTTPError as error:
            return [Reply(error=f"{type(error).__name__}: {error}", elapsed_s=time.monotonic() - began_s)]
        found = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in response.headers.raw]
        return [Reply(response.status_code, tuple(found), response.content, time.monotonic() - began_s)]


def post(content: bytes | Callable[[], bytes], **headers: str) -> Http:
    """A body for the chat completion, whatever is in it."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Http("POST", CHAT, content, {"Content-Type": "application/json", **named})


DROP: Any = object()
"""As the value of a field: the field is left out."""


def chat(headers: Mapping[str, str] | None = None, **fields: Any) -> Http:
    """A chat completion that is right but for the given fields. A field's value may be a function that makes it."""
    return Http("POST", CHAT, lambda: encode(**fields), {"Content-Type": "application/json", **(headers or {})})


def encode(**fields: Any) -> bytes:
    body = {"model": "demo", "messages": [user("Hello!")], "max_tokens": 4, "temperature": 0, **fields}
    made = {name: value() if callable(value) else value for name, value in body.items() if value is not DROP}
    return json.dumps(made).encode()


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def text(make: Callable[[], str] | str) -> Http:
    """A chat completion about one text."""
    return chat(messages=lambda: [user(make if isinstance(make, str) else make())])


def raw_post(body: bytes, *headers: bytes) -> bytes:
    """A chat completion as bytes; the headers replace Content-Length."""
    lines = [b"POST " + CHAT.encode() + b" HTTP/1.1", b"Host: {host}", b"Content-Type: application/json"]
    lines += [b"Connection: close", *(headers or (b"Content-Length: %d" % len(body),))]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def raw_get(*headers: bytes, path: bytes = b"/v1/models", host: bytes | None = b"{host}") -> bytes:
    lines = [b"GET " + path + b" HTTP/1.1", *([] if host is None else [b"Host: " + host]), b"Connection: close"]
    return b"\r\n".join([*lines, *headers]) + b"\r\n\r\n"


@dataclass(frozen=True)
class Played:
    """A client that plays a part: it may open several connections, wait, and leave."""

    play: Callable[[Target], Awaitable[list[Reply]]]

    async def send(self, target: Target) -> list[Reply]:
        return await self.play(target)


# Answers


@dataclass(frozen=True)
class Refused:
    """An error of ours. statuses: one, or those that are equally right. param, code: '' stands for any.

    says: what must be in the message: the value that was sent and the limit, where there is one.
    """

    statuses: tuple[int, ...]
    param: str | None = ""
    code: str | None = ""
    says: tuple[str, ...] = ()

    def check(self, reply: Reply) -> None:
        assert reply.status in self.statuses, f"expected {self.statuses}, got {reply!s}"
        error = reply.json()["error"]
        assert self.param == "" or error["param"] == self.param, f"param is not {self.param!r}: {error}"
        assert self.code == "" or error["code"] == self.code, f"code is not {self.code!r}: {error}"
        for fragment in self.says:
            assert fragment.lower() in error["message"].lower(), f"{fragment!r} is not in the message: {error}"
        assert len(error["message"]) < 2000, f"a message of {len(error['message'])} characters"


@dataclass(frozen=True)
class Answered:
    """A whole answer with content of the model. says: what must be in it."""

    says: str = ""

    def check(self, reply: Reply) -> None:
        assert reply.status == 200, str(reply)
        content = reply.content()
        assert self.says.lower() in content.lower(), f"{self.says!r} is not in {content!r}"


@dataclass(frozen=True)
class Status:
    """Any response with one of these statuses; 0 is a connection that is closed without one.

    says: what must be in the body."""

    statuses: tuple[int, ...]
    says: str = ""

    def check(self, reply: Reply) -> None:
        assert reply.status in self.statuses, f"expected {self.statuses}, got {reply!s}"
        assert self.says in reply.body.decode(errors="replace"), str(reply)


@dataclass(frozen=True)
class Page:
    """A page of JSON that shows none of these names of fields. hides: each may be anywhere in the page."""

    hides: tuple[str, ...]

    def check(self, reply: Reply) -> None:
        assert reply.status == 200, str(reply)
        assert reply.json(), "an empty page"
        for name in self.hides:
            assert f'"{name}"'.encode() not in reply.body, f"{name} in {reply!s}"


@dataclass(frozen=True)
class Either:
    """Both are right: which of them, is the server's choice."""

    answers: tuple[Answer, ...]

    def check(self, reply: Reply) -> None:
        reasons = []
        for answer in self.answers:
            try:
                return answer.check(reply)
            except AssertionError as error:
                reasons.append(str(error))
        raise AssertionError(" and ".join(reasons))


@dataclass(frozen=True)
class RefusedByAnthropic:
    """An error in Anthropic's dialect, which names the field in the message alone. kind: the type of the error."""

    status: int
    kind: str
    says: tuple[str, ...] = ()

    def check(self, reply: Reply) -> None:
        assert reply.status == self.status, f"expected {self.status}, got {reply!s}"
        error = reply.json()["error"]
        assert error["type"] == self.kind, error
        for fragment in self.says:
            assert fragment.lower() in error["message"].lower(), f"{fragment!r} is not in the message: {error}"
        assert len(error["message"]) < 2000, f"a message of {len(error['message'])} characters"


@dataclass(frozen=True)
class RefusedByOllama:
    """An error in Ollama's dialect, which is one sentence. says: what must be in it, also the field's path."""

    status: int
    says: tuple[str, ...] = ()

    def check(self, reply: Reply) -> None:
        assert reply.status == self.status, f"expected {self.status}, got {reply!s}"
        error = reply.json()
        assert error.keys() == {"error"}, error
        for fragment in self.says:
            assert fragment.lower() in error["error"].lower(), f"{fragment!r} is not in the message: {error}"
        assert len(error["error"]) < 2000, f"a message of {len(error['error'])} characters"


def bad(param: str | None = "", *says: str) -> Refused:
    """The usual 400."""
    return Refused((400,), param, "", says)


OK = Answered()
CLOSED = 0
"""In Status: the server closes the connection and says nothing."""

MALFORMED = Status((400, CLOSED))
"""The reply of an HTTP server to bytes that are not HTTP."""

TOO_LONG = Refused((400,), "messages", "context_length_exceeded", ("32768",))
"""The demo model's context holds 32768 tokens."""
