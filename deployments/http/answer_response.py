"""AnswerResponse: reads a request, starts its generation and relays the answer, in every dialect.

It ends early when the client disconnects or the request is cancelled.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deployments.http.answer import Answer, AnswerEncoder
from deployments.http.api_keys import KeyIdentity
from deployments.http.client_address import address_group, client_host
from deployments.http.errors import CLIENT_LEFT, ErrorMap
from deployments.http.event_stream import EventStream
from deployments.http.rate_limits import RateLimits
from deployments.http.unread_bodies import UnreadBodies, read_body
from deployments.in_flight import InFlight, InFlightRequest
from deployments.protocol import Generation
from engine.protocol import OrchardError

logger = logging.getLogger("orchard.http")

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """A parsed request that is ready to start."""

    id: str
    """Id of the answer, by which the request can be cancelled."""
    start: Callable[[KeyIdentity], Awaitable[Generation]]
    """Starts the generation for an API key; called once. Returns at the first token or raises."""
    encoder: AnswerEncoder
    stream: bool
    num_choices: int = 1
    """Choices in flight that the request counts for."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Additional headers of the response."""


class AnswerResponse(Response):
    """Reads the request, starts the generation and sends the answer.

    The request is in flight from its headers on and counts for its choices after its body is parsed; at capacity it is
    refused before its body is read. A cancellation (in_flight) or a client disconnect ends the work at any point, also
    before the first token, and frees its rows. The end of the response is sent after that, since servers report the
    client as disconnected once the last byte is sent.

    A stream commits its status with its first token, or with a comment if the first token takes longer than
    `comment_s`; later errors are sent as events.

    Args:
        understand: Parses a body into a Job. It may raise any exception.
        in_flight: Admission and cancellation.
        bodies: Limits on bodies that are still arriving.
        limits: Limits of the API keys.
        errors: Maps exceptions to responses.
        request_id: For logs, errors and cancellation.
        comment_s: Seconds without an event after which a stream sends a comment.
    """

    def __init__(
        self,
        understand: Callable[[bytes], Awaitable[Job]],
        in_flight: InFlight,
        bodies: UnreadBodies,
        limits: RateLimits,
        errors: ErrorMap,
        request_id: str,
        comment_s: float,
    ):
        super().__init__()
        self._understand = understand
        self._in_flight = in_flight
        self._bodies = bodies
        self._limits = limits
        self._errors = errors
        self._request_id = request_id
        self._comment_s = comment_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = EventStream(send, self._comment_s)
        with contextlib.ExitStack() as stack:
            try:
                address = address_group(client_host(scope))
                entry = stack.enter_context(self._in_flight.enter(self._request_id, address))
            except OrchardError as error:
                response = self._errors.response(error, self._request_id, scope)
                return await response(scope, receive, send)
            try:
                response = await self._answered(entry, Request(scope, receive), stream)
            except (ClientDisconnect, OSError):
                logger.info("request %s: the client disconnected", self._request_id)
                entry.mark_complete()
                if stream.is_open:
                    return
                response = Response(status_code=CLIENT_LEFT)
            if response is not None:
                await response(scope, receive, send)
            else:
                await stream.end()

    async def _answered(self, entry: InFlightRequest, request: Request, stream: EventStream) -> Response | None:
        """Read, admit and answer the request. Returns the response to send; None if it was streamed."""
        try:
            job = await run_until(self._read(request), entry.cancelled)
            self._limits.check(request.state.key, job.num_choices)
            self._in_flight.set_choices(entry, job.id, job.num_choices)
        except (ClientDisconnect, OSError):
            raise
        except Exception as error:
            return self._refused(entry, error, request.scope)
        stream.headers.update(job.headers)
        left = asyncio.ensure_future(wait_disconnected(request.receive))
        try:
            with self._limits.enter(request.state.key, job.num_choices):
                return await run_until(self._work(job, entry, stream, request.scope), entry.cancelled, left)
        except OrchardError as error:  # a cancellation, with its reason; the work answers its own errors itself
            logger.info("request %s was ended: %s", self._request_id, error)
            return await self._failed(job, entry, error, stream, request.scope)
        finally:
            left.cancel()
            await asyncio.gather(left, return_exceptions=True)

    async def _read(self, request: Request) -> Job:
        body = await read_body(request.scope, request.receive, self._bodies)
        if body is None:
            raise ClientDisconnect
        return await self._understand(body)

    async def _work(self, job: Job, entry: InFlightRequest, stream: EventStream, scope: Scope) -> Response | None:
        """Generate the answer, with comments while a stream is silent. Returns as `_answered`."""
        if not job.stream:
            return await self._generate(job, entry, stream, scope)
        comments = asyncio.ensure_future(stream.keep_alive())
        try:
            return await self._generate(job, entry, stream, scope)
        finally:
            comments.cancel()
            await asyncio.gather(comments, return_exceptions=True)

    async def _generate(self, job: Job, entry: InFlightRequest, stream: EventStream, scope: Scope) -> Response | None:
        key: KeyIdentity = scope["state"]["key"]
        try:
            generation = await job.start(key)
        except Exception as error:
            return await self._failed(job, entry, error, stream, scope)
        answer = Answer(generation, job.num_choices, keeps_text=not job.stream)
        try:
            relay = self._send_events if job.stream else self._whole
            return await relay(job, generation, answer, entry, stream)
        except (ClientDisconnect, OSError):
            raise
        except Exception as error:
            return await self._failed(job, entry, error, stream, scope)
        finally:
            self._limits.charge(key, answer.num_prompt_tokens + answer.num_tokens)
            await self._close(generation)

    async def _whole(
        self, job: Job, generation: Generation, answer: Answer, entry: InFlightRequest, stream: EventStream
    ) -> Response:
        async for delta in generation:
            answer.add(delta)
        answer.check_complete()
        content = job.encoder.body(answer)
        body = content if isinstance(content, bytes) else json.dumps(content)
        entry.mark_complete()
        return Response(body, headers=dict(job.headers), media_type="application/json")

    async def _send_events(
        self, job: Job, generation: Generation, answer: Answer, entry: InFlightRequest, stream: EventStream
    ) -> None:
        """Relay the answer as events. Raises what the generation raises."""
        if opening := job.encoder.opening(generation):
            await stream.send(opening)
        async for delta in generation:
            answer.add(delta)
            if sent := job.encoder.encode(delta):
                await stream.send(sent)
        answer.check_complete()
        closing = job.encoder.closing(answer)
        entry.mark_complete()
        await stream.send(closing)

    async def _failed(
        self, job: Job, entry: InFlightRequest, error: Exception, stream: EventStream, scope: Scope
    ) -> Response | None:
        """Answer with an error: as a response, or as the last event of an open stream."""
        if not stream.is_open:
            return self._refused(entry, error, scope)
        entry.mark_complete()
        await stream.send(job.encoder.failed(self._errors.failure(error, self._request_id)))
        return None

    def _refused(self, entry: InFlightRequest, error: Exception, scope: Scope) -> Response:
        entry.mark_complete()
        return self._errors.response(error, self._request_id, scope)

    async def _close(self, generation: Generation) -> None:
        try:
            await generation.aclose()
        except Exception:
            logger.exception("request %s: the generation could not be closed", self._request_id)


async def run_until(work: Coroutine[Any, Any, T], *ends: asyncio.Future[Any]) -> T:
    """Run `work` until it returns or one of `ends` is done; then, or if the caller is cancelled, cancel it.

    A cancelled `work` is awaited until its clean-up is done.

    Args:
        work: The coroutine.
        ends: Futures whose result is an exception.

    Raises:
        Exception: The result of the end that was first, or whatever the work raises.
    """
    worker = asyncio.ensure_future(work)
    try:
        await asyncio.wait({worker, *ends}, return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise next(end.result() for end in ends if end.done())
    finally:
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)
    return worker.result()


async def wait_disconnected(receive: Receive) -> ClientDisconnect:
    """Wait until the client disconnects. The whole body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass
    return ClientDisconnect()
