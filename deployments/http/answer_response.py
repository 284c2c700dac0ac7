"""AnswerResponse: reads a request, starts its generation and relays the answer, in every dialect.

It ends early when the client disconnects or the request is cancelled.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deployments.http.answer import NO_USAGE, Answer
from deployments.http.api_keys import KeyIdentity
from deployments.http.client_address import address_group, client_host
from deployments.http.context import IGNORED_HEADER, NODE_HEADER, HttpContext
from deployments.http.errors import CLIENT_LEFT
from deployments.http.event_stream import EventStream
from deployments.http.fields import left_open_names
from deployments.http.figures import KeyUsage
from deployments.http.generation import Generation
from deployments.http.in_flight import InFlightRequest
from deployments.http.job import Job, PlainJob
from deployments.http.parsed_request import ParsedRequest
from deployments.http.shared_limits import Use
from deployments.http.timeline import ARRIVED_HEADER, TRACE_HEADERS, RequestTimeline, arrived_s, current, use
from deployments.http.timing import TIMING_HEADER, server_timing, told
from engine.errors import OrchardError

logger = logging.getLogger("orchard.http")

T = TypeVar("T")


class AnswerResponse(Response):
    """Reads the request, starts the generation and sends the answer.

    The request is in flight from its headers on and counts for its choices after its body is parsed; at capacity it is
    refused before its body is read. A cancellation (in_flight) or a client disconnect ends the work at any point, also
    before the first token, and frees its rows. The end of the response is sent after that, since servers report the
    client as disconnected once the last byte is sent.

    A stream commits its status with its first token, or with a comment if the first token takes longer than
    `http.stream_comment_s`; later errors are sent as events.

    Args:
        context: Shared state of the endpoints.
        request_id: For logs, errors and cancellation.
        kind: Of the body, see Dialect.bodies.
        id_prefix: The id of the answer begins with it; the request can be cancelled by that id.
        make_job: Makes the job of the parsed body. It may raise any exception.

    Attributes:
        id: The id of the answer.
    """

    def __init__(
        self,
        context: HttpContext,
        request_id: str,
        kind: str,
        id_prefix: str,
        make_job: Callable[[ParsedRequest], Awaitable[Job | PlainJob]],
    ):
        super().__init__()
        self._context = context
        self._request_id = request_id
        self._kind = kind
        self.id = context.new_id(id_prefix)
        self._make_job = make_job
        self._is_read = False
        self._so_far: Answer | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, key = Headers(scope=scope), scope["state"]["key"]
        timeline = RequestTimeline(self._request_id, scope["path"], key.name, arrived_s(headers.get(ARRIVED_HEADER)))
        timeline.trace_context = {name: headers[name] for name in TRACE_HEADERS if name in headers}
        use(timeline)
        try:
            await self._serve(scope, receive, send, timeline)
        except asyncio.CancelledError:
            timeline.end("disconnected", CLIENT_LEFT)
            raise
        except Exception as error:
            timeline.failed(500, type(error).__name__)
            raise
        finally:
            timeline.end("answered", 200)
            self._context.backend.timelines.keep(timeline)
            logger.info("%s", told(timeline), extra={"request_id": self._request_id})

    async def _serve(self, scope: Scope, receive: Receive, send: Send, timeline: RequestTimeline) -> None:
        address = address_group(client_host(scope))
        stream = EventStream(send, self._context.config.stream_comment_s)
        try:
            with self._context.backend.in_flight.enter(self._request_id, address) as entry:
                try:
                    response = await self._answer(Request(scope, receive), entry, stream)
                except ClientDisconnect:
                    entry.mark_complete()
                    timeline.note = f"the client disconnected {self._left_at()}"
                    timeline.end("disconnected", CLIENT_LEFT)
                    response = None if stream.is_open else Response(status_code=CLIENT_LEFT)
                except asyncio.CancelledError:  # by Serve's HTTP proxy, when its client disconnects
                    timeline.note = f"the client disconnected {self._left_at()}"
                    raise
                if response is not None:
                    await response(scope, receive, send)
        except OrchardError as error:  # the request is not admitted; `_answer` answers all other errors
            failure = self._context.errors.failure(error, self._request_id)
            await self._context.errors.response_to(failure, self._request_id, scope)(scope, receive, send)
            timeline.failed(failure.status, failure.code or failure.type)

    async def _answer(self, request: Request, entry: InFlightRequest, stream: EventStream) -> Response | None:
        """Read, admit and answer the request. Returns the response to send; None if it was streamed.

        Raises ClientDisconnect.
        """
        limits, in_flight = self._context.limits, self._context.backend.in_flight
        key: KeyIdentity = request.state.key
        job = None
        try:
            job = await run_until(self._read(request, stream), entry.cancelled)
            self._is_read = True
            current().answer_id = self.id
            limits.check(key, job.num_choices)
            in_flight.set_choices(entry, self.id, job.num_choices)
            async with (
                limits.enter(key, job.num_choices) as use,
                in_background(wait_disconnected(request.receive)) as left,
            ):
                answering = (
                    self._work(job, use, entry, stream)
                    if isinstance(job, PlainJob)
                    else self._generate(job, use, entry, stream)
                )
                response = await run_until(answering, entry.cancelled, left)
            if response is None:
                await stream.end()
            return response
        except ClientDisconnect:
            raise
        except Exception as error:
            entry.mark_complete()
            if entry.cancelled.done():
                logger.info("request %s was ended: %s", self._request_id, error)
            failure = self._context.errors.failure(error, self._request_id)
            current().failed(failure.status, failure.code or failure.type)
            if not isinstance(job, Job) or not stream.is_open:
                return self._context.errors.response_to(failure, self._request_id, request.scope)
            await stream.send(job.encoder.failed(failure))
            await stream.end()
            return None

    async def _read(self, request: Request, stream: EventStream) -> Job | PlainJob:
        parsed = await self._context.read(request, self._kind, self.id)
        job = await self._make_job(parsed)
        if isinstance(job, Job):
            stream.form = job.form
        stream.headers.update(self._context.ignored_header(parsed))
        return job

    async def _generate(self, job: Job, use: Use, entry: InFlightRequest, stream: EventStream) -> Response | None:
        """Generate the answer, with comments while a stream is silent. Returns as `_answer`."""
        async with in_background(stream.keep_alive()) if job.stream else nullcontext():
            generation = await job.start()
            if generation.node_ids:
                await stream.note(NODE_HEADER, ", ".join(generation.node_ids))
            if generation.left_open:
                await stream.note(IGNORED_HEADER, left_open_names(generation.left_open))
            answer = self._so_far = Answer(generation, job.num_choices, keeps_text=not job.stream)
            try:
                if job.stream:
                    return await self._send_events(job, generation, answer, entry, stream)
                return await self._whole(job, generation, answer, entry, stream)
            finally:
                current().usage = answer.usage()
                use.num_tokens = answer.num_prompt_tokens + answer.num_tokens
                await self._close(generation)

    async def _whole(
        self, job: Job, generation: Generation, answer: Answer, entry: InFlightRequest, stream: EventStream
    ) -> Response:
        async for delta in generation:
            answer.add(delta)
        answer.check_complete()
        content = job.encoder.body(answer)
        self._count(answer)
        entry.mark_complete()
        return _response(content, stream)

    async def _work(self, job: PlainJob, use: Use, entry: InFlightRequest, stream: EventStream) -> Response:
        """Do the work of a request without generated tokens."""
        body = await job.work()
        use.num_tokens = body.num_prompt_tokens
        current().usage = {**NO_USAGE, "num_prompt_tokens": body.num_prompt_tokens}
        self._context.backend.figures.answered(current().key_name, KeyUsage(1, body.num_prompt_tokens, 0, 0))
        entry.mark_complete()
        return _response(body.content, stream)

    async def _send_events(
        self, job: Job, generation: Generation, answer: Answer, entry: InFlightRequest, stream: EventStream
    ) -> None:
        if opening := job.encoder.opening(generation):
            await stream.send(opening)
        async for delta in generation:
            answer.add(delta)
            if sent := job.encoder.encode(delta):
                await stream.send(sent)
        answer.check_complete()
        closing = job.encoder.closing(answer)
        self._count(answer)
        entry.mark_complete()
        await stream.send(closing)

    def _count(self, answer: Answer) -> None:
        """Count the usage of a complete answer for the metrics."""
        tokens = answer.num_prompt_tokens, answer.num_cached_tokens, answer.num_tokens
        self._context.backend.figures.answered(current().key_name, KeyUsage(1, *tokens))

    def _left_at(self) -> str:
        """Return when the client disconnected, and what was done."""
        if not self._is_read:
            return "while its body was read; it was not started"
        if self._so_far is None:
            return "before its first token; it was ended"
        return f"after {self._so_far.num_tokens} tokens of its answer; the rest is not generated"

    async def _close(self, generation: Generation) -> None:
        try:
            await generation.aclose()
        except Exception:
            logger.exception("request %s: the generation could not be closed", self._request_id)


def _response(content: dict[str, Any] | bytes, stream: EventStream) -> Response:
    """Return a whole answer with the headers that its stream would have, and its timing."""
    body = content if isinstance(content, bytes) else json.dumps(content)
    headers = {**stream.headers, TIMING_HEADER: server_timing(current())}
    return Response(body, headers=headers, media_type="application/json")


@asynccontextmanager
async def in_background(work: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Future[T]]:
    """Run work beside the body of the context, and cancel it at the end."""
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


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
    with suppress(OSError):
        while (await receive())["type"] != "http.disconnect":
            pass
    return ClientDisconnect()
