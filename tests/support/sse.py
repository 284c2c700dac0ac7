"""A raw client for streamed chat completions: while it runs it only writes down reads and their times; they are taken
apart afterwards, so that the client's own cost stays far below the server's."""

import asyncio
import itertools
import json
import time
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

Timed = tuple[float, bytes]
"""When it came, by time.monotonic(), and what."""

R = TypeVar("R")


@dataclass
class Exchange:
    """One request over one connection. `due` is when it should have been sent: waits count from there."""

    due: float
    sent: float = 0.0
    reads: list[Timed] = field(default_factory=list)
    error: str | None = None


@dataclass(frozen=True)
class Answer:
    """The result of one exchange. pieces: text with the time of its arrival, empty ones left out."""

    due: float
    sent: float
    pieces: list[tuple[float, str]]
    num_prompt_tokens: int
    num_output_tokens: int
    finish_reason: str | None
    error: str | None

    @property
    def ttft_s(self) -> float:
        return self.pieces[0][0] - self.due

    @property
    def gaps_s(self) -> list[float]:
        """Between one piece of text and the next."""
        times = [at for at, _ in self.pieces]
        return [b - a for a, b in itertools.pairwise(times)]

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first, by the server's own count."""
        if self.num_output_tokens < 2 or not self.pieces:
            return None
        return (self.pieces[-1][0] - self.pieces[0][0]) / (self.num_output_tokens - 1)


class _Recorder(asyncio.Protocol):
    def __init__(self, exchange: Exchange):
        self._exchange = exchange
        self.over = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self._exchange.reads.append((time.monotonic(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self._exchange.error = f"{type(exc).__name__}: {exc}"
        if not self.over.done():
            self.over.set_result(None)


async def exchange(url: SplitResult, request: bytes, timeout_s: float, due: float | None = None) -> Exchange:
    """Sends `request` at `due` (default now) and reads until the server closes or the time is over. Never raises."""
    begin = time.monotonic()
    result = Exchange(due=begin if due is None else due)
    if result.due > begin:
        await asyncio.sleep(result.due - begin)
    transport = None
    try:
        async with asyncio.timeout(timeout_s):
            transport, recorder = await asyncio.get_running_loop().create_connection(
                lambda: _Recorder(result), url.hostname or "127.0.0.1", url.port or 80
            )
            result.sent = time.monotonic()
            transport.write(request)
            await recorder.over
    except TimeoutError:
        result.error = f"no end within {timeout_s:g} s"
    except OSError as error:
        result.error = f"{type(error).__name__}: {error}"
    finally:
        if transport is not None:
            transport.abort()
    return result


def post(url: SplitResult, body: dict[str, Any], headers: dict[str, str] | None = None) -> bytes:
    """A whole HTTP request, ready to write. The server closes the connection after its answer."""
    content = json.dumps(body).encode()
    lines = [
        f"POST {url.path} HTTP/1.1",
        f"Host: {url.netloc}",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
        "Connection: close",
        *(f"{name}: {value}" for name, value in (headers or {}).items()),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


def completions_url(base: str) -> SplitResult:
    """`base` ends in /v1, as OpenAI's clients write it."""
    return urlsplit(base.rstrip("/") + "/chat/completions")


def run(main: Coroutine[Any, Any, R]) -> R:
    """asyncio.run, on uvloop where it is installed: half the client's CPU time."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        new_event_loop = None
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)


def response(reads: Iterable[Timed]) -> tuple[int, list[Timed]]:
    """HTTP/1.1 response -> status (0 without a whole head) and the timed pieces of its body, chunk framing removed."""
    head, status, chunked, body = b"", 0, None, []
    for at, data in reads:
        if not status:
            head, found, data = (head + data).partition(b"\r\n\r\n")
            if not found:
                continue
            status = int(head.split(b" ", 2)[1])
            chunked = _Dechunker() if b"transfer-encoding: chunked" in head.lower() else None
        content = chunked.feed(data) if chunked else data
        if content:
            body.append((at, content))
    return status, body


class _Dechunker:
    def __init__(self) -> None:
        self._buffer = b""
        self._left = 0

    def feed(self, data: bytes) -> bytes:
        self._buffer += data
        content = b""
        while self._buffer:
            if self._left:
                part, self._buffer = self._buffer[: self._left], self._buffer[self._left :]
                self._left -= len(part)
                content += part
                continue
            line, found, rest = self._buffer.partition(b"\r\n")
            if not found:
                break
            self._buffer = rest
            self._left = int(line.split(b";")[0], 16) if line else 0  # an empty line ends the chunk before
        return content


def events(body: Iterable[Timed]) -> list[Timed]:
    """Server-sent events: each one's data, with the time of the read that completed it. Comments are left out."""
    buffer, found = b"", []
    for at, data in body:
        *whole, buffer = (buffer + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in whole:
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                found.append((at, b"\n".join(lines)))
    return found


def answer(result: Exchange) -> Answer:
    """Takes a finished exchange apart. A stream without `[DONE]` is an error, however much came."""
    status, body = response(result.reads)
    pieces, usage, finish_reason, error, done = [], {}, None, result.error, False
    if status != 200:
        text = b"".join(data for _, data in body).decode(errors="replace")
        error = error or (f"HTTP {status}: {text[:200]}" if status else "no answer")
        body = []
    for at, data in events(body):
        if data == b"[DONE]":
            done = True
            continue
        event = json.loads(data)
        error = error or _error_of(event)
        usage = event.get("usage") or usage
        for choice in event.get("choices") or ():
            finish_reason = choice.get("finish_reason") or finish_reason
            text = _text_of(choice.get("delta") or {})
            if text:
                pieces.append((at, text))
    return Answer(
        due=result.due,
        sent=result.sent,
        pieces=pieces,
        num_prompt_tokens=usage.get("prompt_tokens", 0),
        num_output_tokens=usage.get("completion_tokens", 0),
        finish_reason=finish_reason,
        error=error or (None if done else "the stream broke off"),
    )


def _text_of(delta: dict[str, Any]) -> str:
    return (delta.get("reasoning_content") or "") + (delta.get("content") or "")


def _error_of(event: dict[str, Any]) -> str | None:
    error = event.get("error")
    return None if error is None else str(error.get("message", error) if isinstance(error, dict) else error)
