"""GET /v1/status/stream: the figures of /v1/status as server-sent events, at most one a second."""

import asyncio
import json
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deployments.http.answer_response import in_background, run_until, wait_disconnected
from deployments.http.context import HttpContext
from deployments.http.event_stream import EventStream
from deployments.http.operation import Operation
from deployments.http.status_view import status_of
from engine import retry_after
from engine.errors import Overloaded

PATH = "/v1/status/stream"

PERIOD_S = 1.0
"""Time between two looks at the status."""

MAX_STREAMS = 32
"""Open streams of one ingress."""

MAX_STREAM_S = 600.0
"""A stream ends after this time, so that its client is checked again when it reconnects."""

LEFT_OUT = frozenset({"config", "ignored_fields", "text", "mllm"})
"""Sections of /v1/status that are not sent: they hardly change, or are large."""

Body = dict[str, Any]


class StatusStream:
    """The endpoint /v1/status/stream, with the access rules of /v1/status. It makes no call to an engine's thread.

    The first event, `status`, has all figures with the name and the rights of the API key; each further one, `change`,
    has the sections that have changed. While nothing changes, nothing is sent but comments. The stream ends with its
    client, after MAX_STREAM_S, and when the server shuts down.
    """

    def __init__(self, context: HttpContext):
        self._context = context
        self._num_open = 0

    @property
    def operations(self) -> tuple[Operation, ...]:
        summary = "Send the figures of /v1/status as server-sent events when they change, at most one a second."
        return (Operation("GET", PATH, self.stream, summary, media_type="text/event-stream"),)

    async def stream(self, request: Request) -> Response:
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        first = await self.live(request)
        if self._num_open >= MAX_STREAMS:
            raise Overloaded(
                f"{self._num_open} streams of the status are open; the limit is {MAX_STREAMS}. Use GET /v1/status.",
                retry_after.MAX_S,
            )
        return _StatusEvents(self, request, first)

    async def live(self, request: Request) -> Body:
        """Return the body of an event `status`."""
        page = await status_of(self._context, request)
        key = {"is_administrative": request.state.is_administrative, "key": request.state.key.name or None}
        return {**key, **{name: section for name, section in page.items() if name not in LEFT_OUT}}

    async def send_all(self, stream: EventStream, request: Request, first: Body) -> None:
        """Send events until the stream is to end. Raises ClientDisconnect."""
        self._num_open += 1
        try:
            await stream.send(_event("status", first))
            async with asyncio.timeout(MAX_STREAM_S):
                await self._send_changes(stream, request, first)
        except TimeoutError:
            pass
        finally:
            self._num_open -= 1

    async def _send_changes(self, stream: EventStream, request: Request, sent: Body) -> None:
        while not self._context.backend.in_flight.is_draining:
            await asyncio.sleep(PERIOD_S)
            now = await self.live(request)
            changed = {name: section for name, section in now.items() if section != sent.get(name)}
            if changed:
                await stream.send(_event("change", changed))
            sent = now

    def new_stream(self, send: Send) -> EventStream:
        return EventStream(send, self._context.config.stream_comment_s)


class _StatusEvents(Response):
    """The response of one stream."""

    def __init__(self, endpoint: StatusStream, request: Request, first: Body):
        super().__init__()
        self._endpoint = endpoint
        self._request = request
        self._first = first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = self._endpoint.new_stream(send)
        try:
            async with in_background(wait_disconnected(receive)) as left, in_background(stream.keep_alive()):
                await run_until(self._endpoint.send_all(stream, self._request, self._first), left)
            await stream.end()
        except ClientDisconnect:
            pass


def _event(name: str, body: Body) -> bytes:
    return f"event: {name}\ndata: {json.dumps(body)}\n\n".encode()
