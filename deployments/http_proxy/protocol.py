"""GuardedProtocol: uvicorn's HTTP protocol with limits on headers, on slow readers, and on data after a response.

It also answers HTTP/1.0 without chunks, clients that have shut down their sending side, and clients that still send
their body when a connection ends with its response (RFC 9112, 9.6).

Serve offers no way to choose the protocol of its proxies, so `use_guarded_protocol` replaces uvicorn's default class
(uvicorn 0.54, `uvicorn.protocols.http.auto`). tests/deployments/http_proxy/test_protocol.py starts a server as Serve
does and fails when the replacement has no effect.
"""

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

from uvicorn.protocols.http import auto
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

HEADER_TIMEOUT_S = 30.0
"""Time after which a connection without complete headers is closed."""

MAX_HEADER_BYTES = 64 * 2**10

LINGER_S = 30.0
"""Time after a response in which the client may still send the rest of its body."""

PROBE_S = 1.0
"""Time between interim responses to a client that has shut down its sending side."""

SEND_BUFFER_BYTES = 256 * 2**10
"""Size of the kernel's send buffer. By default it grows to megabytes, thousands of tokens for a client that does not
read."""

_LINGER_NOT = struct.pack("ii", 1, 0)
"""Value of SO_LINGER that closes at once and discards unsent data."""


class GuardedProtocol(HttpToolsProtocol):
    """One connection.

    Args:
        send_timeout_s: When writing pauses (64 KiB pending), the client must read all but 16 KiB within this time, and
            so when data is pending at the end of a response. Otherwise the connection is closed, which cancels the
            request like a client disconnect.
    """

    header_timeout_s = HEADER_TIMEOUT_S
    linger_s = LINGER_S

    def __init__(self, send_timeout_s: Callable[[], float], *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._send_timeout_s = send_timeout_s
        self._num_header_bytes = 0
        self._num_trailer_bytes = 0
        self._is_in_headers = True
        self._is_body_complete = True
        self._closes_after_body = False
        self._header_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._watch_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._header_timer = _cancelled(self._header_timer)
        self._send_timer = _cancelled(self._send_timer)
        self._linger_timer = _cancelled(self._linger_timer)
        self._probe_timer = _cancelled(self._probe_timer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self._watch_headers()
        if self._is_in_headers:
            self._num_header_bytes += len(data)
        else:
            self._num_trailer_bytes += len(data)
        super().data_received(data)
        if self._num_trailer_bytes > MAX_HEADER_BYTES:  # trailers or chunk extensions since the last byte of a body
            self.abort()
        if self._is_in_headers and self._num_header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The headers of the request have more than {MAX_HEADER_BYTES} bytes.")

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether to answer a client that sends nothing more, as after `shutdown(SHUT_WR)`.

        One that has closed its socket looks the same until it is sent something. A stream sends soon; in front of an
        answer it gets interim responses, which clients skip, and a closed socket resets the connection. HTTP/1.0 has no
        interim responses, so there the client counts as gone. TLS cannot be half-closed.
        """
        cycle = self.cycle
        if cycle is None or cycle.response_complete or not self._is_body_complete:
            return False
        if cycle.scope["http_version"] == "1.0" or not self.transport.can_write_eof():
            return False
        cycle.keep_alive = False
        if self._probe_timer is None:
            self._probe()
        return True

    def _probe(self) -> None:
        """Send interim responses until the last answer begins."""
        if self.transport.is_closing() or self.cycle.response_started:
            return
        if not self.pipeline:  # else an earlier answer may have begun
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._probe_timer = self.loop.call_later(PROBE_S, self._probe)

    def on_message_begin(self) -> None:
        self._is_in_headers, self._num_header_bytes, self._is_body_complete = True, 0, False
        self._watch_headers()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._header_timer = _cancelled(self._header_timer)
        self._is_in_headers = False
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope["http_version"] == "1.0":
            self.cycle.send = _unchunked(self.cycle)  # type: ignore[method-assign]
        if self.cycle is not None and not self._is_body_complete:
            self.cycle.send = self._sent_before_closing(self.cycle)  # type: ignore[method-assign]

    def _sent_before_closing(self, cycle: RequestResponseCycle) -> Callable[[Any], Awaitable[None]]:
        """Return a `send` that keeps the connection open for the rest of a body behind the last response.

        uvicorn would close it. A close with unread data resets the connection, which can cost the client the response.
        """
        send = cycle.send

        async def send_before_closing(message: Any) -> None:
            is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if is_last and not cycle.keep_alive and not self._is_body_complete and cycle is self.cycle:
                cycle.keep_alive = self._closes_after_body = True  # the headers have said that it will be closed
            await send(message)

        return send_before_closing

    def on_body(self, body: bytes) -> None:
        self._num_trailer_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_trailer_bytes = 0
        self._is_in_headers, self._num_header_bytes, self._is_body_complete = True, 0, True
        self._linger_timer = _cancelled(self._linger_timer)
        super().on_message_complete()
        if self._closes_after_body:
            self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_body_complete and self._linger_timer is None:
            self._linger_timer = self.loop.call_later(self.linger_s, self.abort)
        if self._closes_after_body and self.transport.can_write_eof():
            self.transport.write_eof()
        if self.transport.get_write_buffer_size() > 0 and self._send_timer is None:
            self._send_timer = self.loop.call_later(self._send_timeout_s(), self._abort_unsent)

    def _watch_headers(self) -> None:
        if self._header_timer is None and self._is_in_headers:
            self._header_timer = self.loop.call_later(self.header_timeout_s, self.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._send_timer is None:
            self._send_timer = self.loop.call_later(self._send_timeout_s(), self.abort)

    def resume_writing(self) -> None:
        self._send_timer = _cancelled(self._send_timer)
        super().resume_writing()

    def abort(self) -> None:
        """Close the connection and discard pending data, here and in the kernel."""
        connection = self.transport.get_extra_info("socket")
        if connection is not None and connection.fileno() >= 0:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
        self.transport.abort()

    def _abort_unsent(self) -> None:
        self._send_timer = None
        if self.transport.get_write_buffer_size() > 0:
            self.abort()


def use_guarded_protocol(send_timeout_s: Callable[[], float]) -> None:
    """Make every uvicorn server that this process starts from now on use GuardedProtocol."""

    def protocol(*args: Any, **kwargs: Any) -> GuardedProtocol:
        return GuardedProtocol(send_timeout_s, *args, **kwargs)

    auto.AutoHTTPProtocol = protocol  # type: ignore[assignment]


def _unchunked(cycle: RequestResponseCycle) -> Callable[[Any], Awaitable[None]]:
    """Return a `send` whose answers without a Content-Length end with the connection, as HTTP/1.0 knows no chunks."""
    send, is_unbounded = cycle.send, False

    async def send_unchunked(message: Any) -> None:
        nonlocal is_unbounded
        if message["type"] == "http.response.start":
            is_unbounded = all(name.lower() != b"content-length" for name, _ in message["headers"])
            if is_unbounded:
                cycle.chunked_encoding = False
        elif is_unbounded:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_unchunked


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
