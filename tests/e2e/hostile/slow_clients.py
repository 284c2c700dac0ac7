"""Rows: clients that are slow, silent, deaf, or gone. All of them together open fewer than sixty connections."""

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from typing import Any

from tests.e2e.hostile import image_files as files
from tests.e2e.hostile.images import QUESTION
from tests.e2e.hostile.replies import Reply, read_replies
from tests.e2e.hostile.rows import (
    CHAT,
    CLOSED,
    OK,
    Either,
    Http,
    Played,
    Raw,
    Refused,
    Row,
    Status,
    Target,
    chat,
    encode,
    raw_post,
    user,
)

BODY = encode()
STORY = "Tell me a story about a fox."
LEFT = Status((CLOSED,))
"""The client goes without waiting for an answer; what counts is what it leaves behind."""
TOO_SLOW = Refused((408,), None, "request_timeout")
READ_TIMEOUT_S = 75.0
"""Beyond the server's own limits for bodies."""

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Part = Callable[[Target, Streams], Awaitable[bytes]]
"""Plays with one connection and returns what it has read."""


def _played(part: Part, num_connections: int = 1) -> Played:
    async def one(target: Target) -> list[Reply]:
        began_s = time.monotonic()
        streams = await asyncio.open_connection(target.host, target.port)
        try:
            raw = await part(target, streams)
        except OSError:  # the server has had enough
            raw = b""
        finally:
            streams[1].transport.abort()
        return read_replies(raw, time.monotonic() - began_s)

    async def play(target: Target) -> list[Reply]:
        found = await asyncio.gather(*(one(target) for _ in range(num_connections)))
        return [reply for replies in found for reply in replies]

    return Played(play)


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    """Return all bytes that arrive until the end; a reset that meets a byte on its way to the server ends it too."""
    pieces: list[bytes] = []
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(READ_TIMEOUT_S):
            while piece := await reader.read(2**16):
                pieces.append(piece)
    return b"".join(pieces)


async def _trickle(writer: asyncio.StreamWriter, piece: bytes, period_s: float, until: asyncio.Future[Any]) -> None:
    while not until.done():
        writer.write(piece)
        await asyncio.wait((until,), timeout=period_s)


def _head(target: Target, *headers: bytes) -> bytes:
    return raw_post(b"", *headers).replace(b"{host}", f"{target.host}:{target.port}".encode())


async def _headers_without_end(target: Target, streams: Streams) -> bytes:
    reader, writer = streams
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n")
    reading = asyncio.ensure_future(reader.read(-1))
    over = asyncio.ensure_future(asyncio.wait((reading,), timeout=8))
    await _trickle(writer, b"X-More: and more\r\n", 0.5, over)
    return b""


async def _silence(target: Target, streams: Streams) -> bytes:
    await asyncio.wait((asyncio.ensure_future(streams[0].read(-1)),), timeout=10)
    return b""


async def _no_body(target: Target, streams: Streams) -> bytes:
    streams[1].write(_head(target, b"Content-Length: 9") + b"{")
    return await _read_all(streams[0])


async def _no_chunk(target: Target, streams: Streams) -> bytes:
    streams[1].write(_head(target, b"Transfer-Encoding: chunked") + b"1\r\n{\r\n")
    return await _read_all(streams[0])


async def _byte_by_byte(target: Target, streams: Streams) -> bytes:
    streams[1].write(_head(target, b"Content-Length: 1000") + b"{")
    reading = asyncio.ensure_future(_read_all(streams[0]))
    await _trickle(streams[1], b" ", 1.0, reading)
    return await reading


async def _in_pieces(target: Target, streams: Streams) -> bytes:
    """Twenty pieces within two seconds: a slow network, and no reason to refuse anything."""
    writer = streams[1]
    body = BODY + b" " * 200_000
    writer.write(_head(target, b"Content-Length: %d" % len(body)))
    for begin in range(0, len(body), len(body) // 20):
        writer.write(body[begin : begin + len(body) // 20])
        await asyncio.sleep(0.1)
    return await _read_all(streams[0])


async def _deaf(target: Target, streams: Streams) -> bytes:
    streams[1].transport.pause_reading()  # pyright: ignore[reportAttributeAccessIssue]
    streams[1].write(_whole(target, encode(messages=[user(STORY)], max_tokens=600, min_tokens=600, n=4, stream=True)))
    await asyncio.sleep(10)
    return b""


def _whole(target: Target, body: bytes) -> bytes:
    return _head(target, b"Content-Length: %d" % len(body)) + body


def _leaves(how: Callable[[Target], bytes], after_s: float = 0.0, num_events: int = 0) -> Played:
    """Two clients that send something, read so many events or wait so long, and go: one closes, one resets."""

    async def leave(target: Target, streams: Streams) -> bytes:
        reader, writer = streams
        writer.write(how(target))
        seen = b""
        try:
            async with asyncio.timeout(30 if num_events else after_s):
                while not num_events or seen.count(b"data: ") < num_events:
                    data = await reader.read(2**16)
                    if not data:
                        break
                    seen += data
        except TimeoutError:
            pass
        # What cannot fit may be refused before its client leaves.
        assert not seen or seen.startswith((b"HTTP/1.1 200", b"HTTP/1.1 400")), seen[:600]
        return b""

    async def reset(target: Target, streams: Streams) -> bytes:
        streams[1].get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return await leave(target, streams)

    async def play(target: Target) -> list[Reply]:
        found = await asyncio.gather(_played(leave).send(target), _played(reset).send(target))
        return [reply for replies in found for reply in replies]

    return Played(play)


def _stream(target: Target) -> bytes:
    return _whole(target, encode(messages=[user(STORY)], max_tokens=200, min_tokens=200, stream=True))


def _image(target: Target) -> bytes:
    part = {"type": "image_url", "image_url": {"url": files.data_url(files.photograph(4000, 3000, 99))}}
    return _whole(target, encode(messages=[user([part, QUESTION])]))


def _long_prompt(target: Target) -> bytes:
    return _whole(target, encode(messages=[user("apple pear plum " * 2500)], cache_salt="leaves"))


def _long_text(target: Target) -> bytes:
    return _whole(target, encode(messages=[user("apple pear plum " * 250_000)]))


def _grammar(target: Target) -> bytes:
    return _whole(target, encode(structured_outputs={"regex": "|".join(f"w{i}" for i in range(25_000))}))


def _upload(target: Target) -> bytes:
    return _whole(target, encode(messages=[user("a" * (20 * 2**20))]))[: 10 * 2**20]


PHASES: tuple[tuple[str, Played], ...] = (
    ("after connecting", _leaves(lambda target: b"")),
    ("in the request line", _leaves(lambda target: b"POST /v1/chat/comp")),
    ("in the headers", _leaves(lambda target: _head(target, b"Content-Length: 9")[:-20])),
    ("before the body", _leaves(lambda target: _head(target, b"Content-Length: 9"), 0.3)),
    ("in the body", _leaves(lambda target: _whole(target, BODY)[:-10], 0.3)),
    ("in a chunk", _leaves(lambda target: _head(target, b"Transfer-Encoding: chunked") + b"ff\r\n{", 0.3)),
    ("in an upload of 20 MiB", _leaves(_upload, 0.5)),
    ("at once", _leaves(_stream)),
    ("while its body is read", _leaves(_long_text, 0.05)),
    ("while its text is tokenized", _leaves(_long_text, 0.5)),
    ("while its image is decoded", _leaves(_image, 0.2)),
    ("while its grammar is compiled", _leaves(_grammar, 0.2)),
    ("in the prefill", _leaves(_long_prompt, 1.5)),
    ("at the first event", _leaves(_stream, num_events=1)),
    ("in the stream", _leaves(_stream, num_events=12)),
    ("before the last event", _leaves(_stream, num_events=200)),
)


async def _cancelled(target: Target) -> list[Reply]:
    """Cancels its own request, which must be told so, by the id that it has given it."""
    body = chat({"X-Request-ID": "hostile/own?id"}, messages=[user(STORY)], max_tokens=2000, min_tokens=2000)
    waiting = asyncio.ensure_future(body.send(target))
    cancel = Http("POST", f"{CHAT}/hostile%2Fown%3Fid/cancel")
    for _ in range(100):
        await asyncio.sleep(0.2)
        (reply,) = await cancel.send(target)
        if reply.status == 200:
            break
    return await waiting


async def _cancelled_by_many(target: Target) -> list[Reply]:
    """The same id for several requests, cancelled several times at once."""
    body = chat({"X-Request-ID": "hostile-many"}, messages=[user(STORY)], max_tokens=2000, min_tokens=2000)
    waiting = [asyncio.ensure_future(body.send(target)) for _ in range(3)]
    cancel = Http("POST", f"{CHAT}/hostile-many/cancel")
    while not all(task.done() for task in waiting):
        await asyncio.sleep(0.3)
        replies = await asyncio.gather(*(cancel.send(target) for _ in range(4)))
        assert all(reply.status in (200, 404) for [reply] in replies), replies
    return [reply for task in waiting for reply in task.result()]


ROWS = (
    Row("headers without an end", _played(_headers_without_end, 6), "connections", LEFT, cost="slow"),
    Row("connections that say nothing", _played(_silence, 12), "connections", LEFT, cost="slow"),
    Row("a body that never comes", _played(_no_body, 12), "http.body_grace_s", TOO_SLOW, cost="slow", within_s=80),
    Row("a chunk that never comes", _played(_no_chunk, 4), "http.body_grace_s", TOO_SLOW, cost="slow", within_s=80),
    Row("a byte per second", _played(_byte_by_byte, 4), "http.min_body_bytes_per_s", TOO_SLOW, cost="slow",
        within_s=80),
    Row("a body in twenty pieces", _played(_in_pieces, 2), "http.body_grace_s", OK, cost="slow"),
    Row("a client that never reads its stream", _played(_deaf, 2), "http.send_timeout_s", LEFT, cost="slow"),
    Row("a client that closes its half after the request", Raw(lambda: raw_post(BODY), ends=True), "connections",
        Either((OK, LEFT)), cost="slow"),
    Row("a client that cancels itself", Played(_cancelled), "cancelling", Refused((499,), None, "request_cancelled"),
        cost="slow"),
    Row("three clients of one id that is cancelled by four", Played(_cancelled_by_many), "cancelling",
        Refused((499,), None, "request_cancelled"), cost="slow"),
    *(Row(f"a client that leaves {phase}", played, "nothing left behind", LEFT) for phase, played in PHASES),
)  # fmt: skip
