"""EventStream: one streamed response, with comments while there is nothing else to send; StreamForm: its form."""

import asyncio
from typing import Protocol

from starlette.requests import ClientDisconnect
from starlette.types import Message, Send

COMMENT = b": waiting\n\n"
"""A comment, which parsers of server-sent events ignore; its bytes reset the timeouts of clients and gateways."""

_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would buffer tokens
]


class StreamForm(Protocol):
    """The content type of a form of streams, and its events without output."""

    @property
    def content_type(self) -> str: ...

    def waiting(self) -> bytes:
        """Return a comment, which clients ignore."""
        ...

    def note(self, header: str, value: str) -> bytes:
        """Return a comment with a header that comes too late."""
        ...


class ServerSentEvents:
    """The form of most dialects."""

    content_type = "text/event-stream; charset=utf-8"

    def waiting(self) -> bytes:
        return COMMENT

    def note(self, header: str, value: str) -> bytes:
        return f": {header}: {value}\n\n".encode()


SERVER_SENT_EVENTS = ServerSentEvents()


class EventStream:
    """A streamed response. The first event or comment commits the status 200.

    Args:
        send: ASGI callable of the response.
        comment_s: Seconds without an event after which `keep_alive` sends a comment.

    Attributes:
        form: Its form; may be set before it opens.
    """

    def __init__(self, send: Send, comment_s: float):
        self._send = send
        self._comment_s = comment_s
        self.form: StreamForm = SERVER_SENT_EVENTS
        self._sending = asyncio.Lock()
        self._last_sent_s = asyncio.get_running_loop().time()
        self.is_open = False
        self.headers: dict[str, str] = {}
        """Additional headers of the answer, to be set before the stream opens."""

    async def send(self, event: bytes) -> None:
        """Send complete events, and before the first ones the headers. Raises ClientDisconnect."""
        async with self._sending:
            if not self.is_open:
                self.is_open = True
                more = [(name.lower().encode(), value.encode("latin-1")) for name, value in self.headers.items()]
                kind = (b"content-type", self.form.content_type.encode())
                await self._pass({"type": "http.response.start", "status": 200, "headers": [kind, *_HEADERS, *more]})
            await self._pass({"type": "http.response.body", "body": event, "more_body": True})
            self._last_sent_s = asyncio.get_running_loop().time()

    async def note(self, header: str, value: str) -> None:
        """Add a value to a header; send it as a comment if the stream is open. Raises ClientDisconnect."""
        if self.is_open:
            await self.send(self.form.note(header, value))
        else:
            self.headers[header] = ", ".join(filter(None, (self.headers.get(header), value)))

    async def keep_alive(self) -> None:
        """Send a comment whenever nothing was sent for comment_s. Runs until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = self._last_sent_s + self._comment_s - loop.time()
            if due_s > 0:
                await asyncio.sleep(due_s)
            else:
                await self.send(self.form.waiting())

    async def end(self) -> None:
        """End the response. Raises ClientDisconnect."""
        await self._pass({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pass(self, message: Message) -> None:
        try:
            await self._send(message)
        except OSError:  # by the ASGI specification the connection is closed
            raise ClientDisconnect from None
