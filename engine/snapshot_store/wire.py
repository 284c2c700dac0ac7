"""Frames between a server of snapshots and the nodes that fetch from it: kind, length and CRC-32, then the payload.

Each frame must be sent and received as a whole within a time limit, so that a peer cannot keep a thread by sending or
reading one byte at a time. A payload is at most as long as its receiver expects, so that it cannot fill the memory.

Sockets block, with the time limits of the system: a frame of a file is read, checked, sent, received and written in one
call each, without the GIL, because a thread waits up to 5 ms for the GIL after each call while another one runs Python.
With TLS a frame is sent in one call as well, and received in calls of at most 16 KiB, a record each.
"""

import contextlib
import os
import re
import socket
import ssl
import struct
import time
import zlib
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import Literal, NamedTuple, Protocol

from engine.snapshot_store.format import DIGEST

FetchFailure = Literal[
    "unreachable",
    "busy",
    "version",
    "token",
    "certificate",
    "format",
    "fingerprint",
    "timeout",
    "cut",
    "damaged",
    "protocol",
    "gone",
    "mismatch",
    "slow",
    "room",
    "disk",
    "stopped",
    "internal",
]
"""Why a snapshot was not fetched.

`unreachable`: no connection. `busy`: too many connections there, or transfers here. `version`, `token`, `format`,
`fingerprint`: the greeting does not match. `certificate`: TLS has failed, or a certificate is refused. `timeout`: a
frame took too long. `cut`: the connection ended early. `damaged`: a checksum is wrong. `protocol`: something else was
sent than asked for. `gone`: the server does not have it any more. `mismatch`: it belongs to another prompt. `slow`:
computing is predicted to be faster. `room`: it does not fit into the disk tier. `disk`: a file cannot be read or
written. `stopped`: nothing waits for it any more. `internal`: an error of this program."""

NotTaken = Literal[FetchFailure, "deadline", "draining"]
"""Why a snapshot that another node has offered was not taken over. `deadline`: the time was over. `draining`: this node
is drained itself."""

Purpose = Literal["drain", "warm_up", "replica"]
"""Why snapshots are taken over: their node is drained, this one has joined, or a copy shall outlive their node."""

FRAME_BYTES = 8 << 20
"""Size of a frame of a file; each connection has a buffer of this size at both ends."""

SENDFILE_BYTES = 2 << 20
"""Bytes per call of sendfile. Linux begins its time limit anew with each 64 KiB: a client that reads these just in time
keeps the connection for some minutes before the frame's own limit ends it."""

SMALL_BYTES = 1 << 16
"""Largest message that is received piece by piece, so that its time limit is exact on every system."""

MAX_QUESTION_BYTES = 1 << 14
"""Limit of a question, about 400 digests."""

MAX_ANSWER_BYTES = 1 << 20
"""Limit of the answer to HAVE, at least 6,000 snapshots."""

FRAME_S = 10.0
"""Longest time for one frame; a peer slower than a megabyte per second is of no use."""

_HEADER = struct.Struct("<BII")
_OFFERS = re.compile(rf"({DIGEST.pattern} (-|{DIGEST.pattern}) \d{{1,15}} \d{{1,15}}\n)*", re.ASCII)


class PeerError(Exception):
    """A transfer cannot go on. reason: for the counters; the message is for the log."""

    def __init__(self, reason: FetchFailure, message: str):
        super().__init__(reason, message)
        self.reason: FetchFailure = reason
        self.message = message

    def __str__(self) -> str:
        return f"{self.message} ({self.reason})"


def _end_of(timeout_s: float | None) -> float:
    """Return when a time limit ends, FRAME_S if it is None; monotonic seconds."""
    return time.monotonic() + (FRAME_S if timeout_s is None else timeout_s)


class FrameKind(IntEnum):
    """The kinds of frames."""

    HAVE = 1
    """Question: digests, one per line."""
    GET = 2
    """Question: a digest."""
    OFFERS = 3
    """Answer to HAVE: see Offer, one per line, each after its parent."""
    FILE = 4
    """Answer to GET: u64 number of bytes; that many bytes in frames DATA follow."""
    DATA = 5
    """Part of a file: the next FRAME_BYTES, fewer at its end."""
    GONE = 6
    """Answer to GET: the file does not exist, or cannot be opened."""


class Offer(NamedTuple):
    """A snapshot that a server has on disk."""

    digest: str
    parent: str
    """Digest of its parent; '' without one."""
    num_tokens: int
    num_bytes: int
    """Size of the file."""

    @property
    def line(self) -> bytes:
        """The offer in an answer to HAVE."""
        return f"{self.digest} {self.parent or '-'} {self.num_tokens} {self.num_bytes}\n".encode()

    @classmethod
    def parse_all(cls, lines: bytes) -> "list[Offer]":
        """Parse an answer to HAVE. Raises PeerError (`protocol`)."""
        text = lines.decode(errors="replace")
        if not _OFFERS.fullmatch(text):
            raise PeerError("protocol", f"an answer of {len(lines)} bytes lists no snapshots")
        fields = [line.split(" ") for line in text.splitlines()]
        return [cls(digest, parent.strip("-"), int(tokens), int(size)) for digest, parent, tokens, size in fields]


class PeerTls(Protocol):
    """Encrypts connections, at which both nodes show certificates; keeps the time limits of the sockets."""

    def connect(self, connection: socket.socket) -> ssl.SSLSocket:
        """Return a client's encrypted connection. Raises OSError."""
        ...

    def accept_machine(self, connection: socket.socket) -> ssl.SSLSocket:
        """Return a server's encrypted connection to a node of the cluster. Raises OSError."""
        ...


class Channel:
    """A connection that sends and receives frames.

    All methods raise PeerError: `timeout`, `cut`, `damaged`, `protocol`, or `disk` for a file that cannot be read.

    Args:
        connection: A connected socket; belongs to the channel.
    """

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._buffer = bytearray(0)
        connection.setblocking(True)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def encrypt(self, wrap: Callable[[socket.socket], ssl.SSLSocket], timeout_s: float) -> None:
        """Encrypt what follows, by a method of PeerTls. Raises PeerError (`certificate`, or `cut`)."""
        self._connection.settimeout(timeout_s)
        try:
            self._connection = wrap(self._connection)
        except (ConnectionError, ssl.SSLEOFError) as error:
            raise PeerError("cut", f"the connection ended before it was encrypted: {error}") from None
        except OSError as error:
            raise PeerError("certificate", f"no encrypted connection: {error}") from None

    def end(self) -> None:
        """End the connection, on any thread: a thread that waits for it gets `cut`."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._connection, socket.SHUT_RDWR)  # not that of TLS, which the thread still reads

    def close(self) -> None:
        """Close the socket, on the thread that uses it."""
        self._connection.close()

    def send_bytes(self, data: bytes, timeout_s: float | None = None) -> None:
        """Send bytes without a header."""
        self._send(memoryview(data), _end_of(timeout_s))

    def receive_bytes(self, num_bytes: int, timeout_s: float | None = None) -> bytes:
        """Receive bytes without a header."""
        data = bytearray(num_bytes)
        self._receive(memoryview(data), _end_of(timeout_s))
        return bytes(data)

    def send(self, kind: FrameKind, payload: bytes = b"") -> None:
        """Send a frame."""
        self.send_bytes(_HEADER.pack(kind, len(payload), zlib.crc32(payload)) + payload)

    def send_part(self, file: int, offset: int, num_bytes: int) -> None:
        """Send a part of a file as a frame DATA, without TLS by sendfile; it is read before for its checksum.

        Args:
            file: File descriptor.
            offset: Where the part begins.
            num_bytes: Its size, at most FRAME_BYTES.
        """
        part = self._scratch(num_bytes)
        try:
            num_read = os.preadv(file, [part], offset)
        except OSError as error:
            raise PeerError("disk", f"the file cannot be read: {error}") from None
        if num_read != num_bytes:
            raise PeerError("disk", f"the file has fewer than {offset + num_bytes} bytes")
        until_s = _end_of(None)
        self._send(memoryview(_HEADER.pack(FrameKind.DATA, num_bytes, zlib.crc32(part))), until_s)
        if self._is_encrypted:
            self._send(part, until_s)
            return
        end = offset + num_bytes
        while offset < end:
            send = partial(os.sendfile, self._connection.fileno(), file, offset, min(SENDFILE_BYTES, end - offset))
            if not (sent := self._move(socket.SO_SNDTIMEO, until_s, send)):
                raise PeerError("disk", f"the file has fewer than {end} bytes")
            offset += sent

    def receive(self, max_bytes: int, timeout_s: float | None = None) -> tuple[FrameKind, memoryview]:
        """Receive a frame of at most `max_bytes`; the payload is valid until the next call.

        Args:
            max_bytes: Largest payload that is expected.
            timeout_s: Longest wait for the beginning of the frame; None: FRAME_S.
        """
        header = memoryview(bytearray(_HEADER.size))
        self._receive(header, _end_of(timeout_s))
        kind, num_bytes, checksum = _HEADER.unpack(header)
        if kind not in FrameKind.__members__.values() or num_bytes > max_bytes:
            raise PeerError("protocol", f"a frame of kind {kind} has {num_bytes} bytes; the limit is {max_bytes}")
        payload = self._scratch(num_bytes)
        self._receive(payload, _end_of(None))
        if zlib.crc32(payload) != checksum:
            raise PeerError("damaged", f"a frame of {num_bytes} bytes has a wrong checksum")
        return FrameKind(kind), payload

    @property
    def _is_encrypted(self) -> bool:
        return isinstance(self._connection, ssl.SSLSocket)

    def _limit(self, option: int, seconds: float) -> None:
        """Limit the time of the next call; that of TLS would repeat a call that the system has ended."""
        if self._is_encrypted:
            self._connection.settimeout(seconds)
        else:
            left = struct.pack("ll", *divmod(int(1e6 * seconds), 10**6))
            self._connection.setsockopt(socket.SOL_SOCKET, option, left)

    def _scratch(self, num_bytes: int) -> memoryview:
        if len(self._buffer) < num_bytes:
            self._buffer = bytearray(num_bytes)
        return memoryview(self._buffer)[:num_bytes]

    def _send(self, rest: memoryview, until_s: float) -> None:
        while rest:
            rest = rest[self._move(socket.SO_SNDTIMEO, until_s, partial(self._connection.send, rest)) :]

    def _receive(self, rest: memoryview, until_s: float) -> None:
        while rest:
            flags = socket.MSG_WAITALL if len(rest) > SMALL_BYTES and not self._is_encrypted else 0
            receive = partial(self._connection.recv_into, rest, 0, flags)
            if not (num_bytes := self._move(socket.SO_RCVTIMEO, until_s, receive)):
                raise PeerError("cut", f"the connection ended {len(rest)} bytes early")
            rest = rest[num_bytes:]

    def _move(self, option: int, until_s: float, call: Callable[[], int]) -> int:
        """Call a function that sends or receives, until it has moved bytes or the connection ends; return how many."""
        while (left_s := until_s - time.monotonic()) > 1e-6:
            try:
                self._limit(option, left_s)
                return call()
            except (BlockingIOError, TimeoutError):  # the time limit has passed
                continue
            except OSError as error:
                raise PeerError("cut", f"the connection ended: {error}") from None
        raise PeerError("timeout", "a frame was not sent or received in time")
