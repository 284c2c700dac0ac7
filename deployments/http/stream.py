"""TextDelta -> server-sent events or one response, with usage; and the end of it all when the client leaves, or when
somebody else ends it."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deployments.chat import Generation, TextDelta, TextLogprobs
from deployments.http.client_address import address_group, client_host
from deployments.http.errors import CLIENT_LEFT, ErrorMap
from deployments.http.event_stream import EventStream
from deployments.http.unread_bodies import UnreadBodies, read_body
from deployments.in_flight import Entry, InFlight
from engine.protocol import EngineFailed, OrchardError

logger = logging.getLogger("orchard.http")

T = TypeVar("T")

LEAST_LOGPROB = -9999.0
"""What OpenAI reports for what is most unlikely; JSON has no infinity."""


@dataclass(frozen=True)
class Completion:
    """What all chunks of one answer have in common. created: Unix time in seconds."""

    id: str
    model: str
    created: int
    stream: bool = False
    include_usage: bool = False
    num_choices: int = 1
    logprobs: bool = False

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


class Answer:
    """What the deltas of one generation add up to. One that failed or was aborted raises EngineFailed."""

    def __init__(self, generation: Generation, num_choices: int):
        self._num_prompt_tokens = generation.num_prompt_tokens
        self._prompt_details = prompt_details(generation)
        self._num_tokens = self._num_drafted = self._num_accepted = 0
        self._finish_reasons: list[str | None] = [None] * num_choices

    def add(self, delta: TextDelta) -> None:
        self._num_tokens += delta.num_tokens
        self._num_drafted += delta.num_drafted
        self._num_accepted += delta.num_accepted
        if delta.finish_reason is not None:
            if delta.finish_reason not in ("stop", "length"):
                raise EngineFailed(f"the generation ended with {delta.finish_reason}")
            self._finish_reasons[delta.index] = delta.finish_reason

    def finish_reasons(self) -> list[str]:
        """Of all choices, which must be over."""
        reasons = [reason for reason in self._finish_reasons if reason is not None]
        if len(reasons) < len(self._finish_reasons):
            raise EngineFailed("the generation ended without a finish reason")
        return reasons

    @property
    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self._num_tokens,
            "total_tokens": self._num_prompt_tokens + self._num_tokens,
            "prompt_tokens_details": self._prompt_details,
            # not OpenAI's accepted_prediction_tokens: those are of a prediction that the client sends
            "completion_tokens_details": {
                "drafted_tokens": self._num_drafted,
                "accepted_draft_tokens": self._num_accepted,
            },
        }


def prompt_details(generation: Generation) -> dict[str, Any]:
    """Where a prompt's tokens came from. `specprefill` is there if a sparse prompt was asked for or tried."""
    details: dict[str, Any] = {"cached_tokens": generation.num_cached_tokens}
    if (report := generation.spec_prefill) is not None:
        details["specprefill"] = {
            "skipped_tokens": generation.num_skipped_tokens,
            "scored_tokens": report.num_scored,
            "scoring_ms": round(1000 * report.scoring_s, 1),
            "dense_because": report.dense_because,
        }
    return details


async def collect(generation: Generation, completion: Completion) -> dict[str, Any]:
    """The body of a response that is not streamed. Raises what the generation raises."""
    answer = Answer(generation, completion.num_choices)
    deltas: list[list[TextDelta]] = [[] for _ in range(completion.num_choices)]
    async for delta in generation:
        answer.add(delta)
        deltas[delta.index].append(delta)
    choices = []
    for index, finish_reason in enumerate(answer.finish_reasons()):
        text = "".join(delta.text for delta in deltas[index])
        found = [entry for delta in deltas[index] for entry in delta.logprobs]
        choices.append(
            {
                "index": index,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": logprobs_body(found) if completion.logprobs else None,
                "finish_reason": finish_reason,
            }
        )
    return {**completion.head("chat.completion"), "choices": choices, "usage": answer.usage}


async def events(
    generation: Generation,
    completion: Completion,
    error_body: Callable[[Exception], bytes],
    before_last: Callable[[], None] = lambda: None,
) -> AsyncGenerator[bytes]:
    """Server-sent events up to [DONE], or up to an error event. before_last: called when only the last are missing."""
    answer = Answer(generation, completion.num_choices)
    encoders = [ChoiceEncoder(completion, index) for index in range(completion.num_choices)]
    yield b"".join(encoder.opening for encoder in encoders)
    try:
        async for delta in generation:
            answer.add(delta)
            if sent := encoders[delta.index].encode(delta):
                yield sent
        answer.finish_reasons()
    except Exception as error:
        before_last()
        yield error_event(error_body(error))
        return
    before_last()
    end = b"data: [DONE]\n\n"
    if completion.include_usage:
        end = _event({**completion.head("chat.completion.chunk"), "choices": [], "usage": answer.usage}) + end
    yield end


def error_event(body: bytes) -> bytes:
    """The last event of a stream that failed; no [DONE] follows."""
    return b"data: " + body + b"\n\n"


class ChoiceEncoder:
    """Deltas of one choice -> its chunks. Per token only the text is encoded: the bytes around it are always the same.

    opening: the chunk before the first token.
    """

    def __init__(self, completion: Completion, index: int):
        self._completion = completion
        self._index = index
        self.opening = self._chunk({"role": "assistant", "content": "", "refusal": None})
        self._before, self._after = self._chunk({"content": "\0"}).split(b'"\\u0000"')

    def encode(self, delta: TextDelta) -> bytes:
        """One chunk for text or logprobs, one for the end, both or none."""
        chunks = b""
        if delta.logprobs:
            chunks = self._chunk({"content": delta.text}, logprobs_body(delta.logprobs))
        elif delta.text:
            chunks = self._before + json.dumps(delta.text).encode() + self._after
        if delta.finish_reason is not None:
            chunks += self._chunk({}, finish_reason=delta.finish_reason)
        return chunks

    def _chunk(
        self, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
    ) -> bytes:
        choice = {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        chunk = {**self._completion.head("chat.completion.chunk"), "choices": [choice]}
        return _event({**chunk, "usage": None} if self._completion.include_usage else chunk)


def logprobs_body(entries: Sequence[TextLogprobs]) -> dict[str, Any]:
    content = [
        {**_token(entry.token, entry.logprob), "top_logprobs": [_token(*other) for other in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _token(token: bytes, logprob: float) -> dict[str, Any]:
    text = token.decode(errors="replace")
    return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(token)}


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


class Asked(NamedTuple):
    """What the body of a request asks for. start: returns when the answer has begun; raises why it does not."""

    completion: Completion
    start: Callable[[], Awaitable[Generation]]


class CompletionResponse(Response):
    """Reads the request, starts the generation and sends what comes of it.

    The request is in flight from its headers on, but takes its place only when its body has been read: where there is
    no room for it, its body is not even read. Whoever wants it ended (in_flight), or a client that leaves, cancels the
    work where it stands, also before the first token, and its row is freed. What ends the response is sent after that,
    since servers report every client as gone once they have its last byte.

    A stream commits its status with its first token, or earlier, with a comment, when the first token takes longer than
    `comment_s`; an error after that is an event.

    understand: makes of the body what it asks for. It may raise anything.
    """

    def __init__(
        self,
        understand: Callable[[bytes], Awaitable[Asked]],
        in_flight: InFlight,
        bodies: UnreadBodies,
        errors: ErrorMap,
        request_id: str,
        comment_s: float,
    ):
        super().__init__()
        self._understand = understand
        self._in_flight = in_flight
        self._bodies = bodies
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
                response = self._errors.response(error, self._request_id)
                return await response(scope, receive, send)
            try:
                response = await self._answered(entry, Request(scope, receive), stream)
            except (ClientDisconnect, OSError):
                logger.info("request %s: the client left", self._request_id)
                entry.answered()
                if stream.is_open:
                    return
                response = Response(status_code=CLIENT_LEFT)
            if response is not None:
                await response(scope, receive, send)
            else:
                await stream.end()

    async def _answered(self, entry: Entry, request: Request, stream: EventStream) -> Response | None:
        """The response that is still to be sent; None if events have been."""
        try:
            asked = await unless(self._read(request), entry.must_end)
            self._in_flight.understood(entry, asked.completion.id, asked.completion.num_choices)
        except (ClientDisconnect, OSError):
            raise
        except Exception as error:
            return await self._failed(entry, error, stream)
        left = asyncio.ensure_future(_left(request.receive))
        try:
            return await unless(self._work(asked, entry, stream), entry.must_end, left)
        except OrchardError as error:  # whoever ended it says why; what the work itself raises, it answers itself
            logger.info("request %s was ended: %s", self._request_id, error)
            return await self._failed(entry, error, stream)
        finally:
            left.cancel()
            await asyncio.gather(left, return_exceptions=True)

    async def _read(self, request: Request) -> Asked:
        body = await read_body(request.scope, request.receive, self._bodies)
        if body is None:
            raise ClientDisconnect
        return await self._understand(body)

    async def _work(self, asked: Asked, entry: Entry, stream: EventStream) -> Response | None:
        """See `_answered`."""
        if not asked.completion.stream:
            return await self._generate(asked, entry, stream)
        comments = asyncio.ensure_future(stream.keep_alive())
        try:
            return await self._generate(asked, entry, stream)
        finally:
            comments.cancel()
            await asyncio.gather(comments, return_exceptions=True)

    async def _generate(self, asked: Asked, entry: Entry, stream: EventStream) -> Response | None:
        try:
            generation = await asked.start()
        except Exception as error:
            return await self._failed(entry, error, stream)
        try:
            if asked.completion.stream:
                return await self._send_events(generation, asked.completion, entry, stream)
            return await self._whole(generation, asked.completion, entry, stream)
        finally:
            await self._close(generation)

    async def _whole(
        self, generation: Generation, completion: Completion, entry: Entry, stream: EventStream
    ) -> Response | None:
        try:
            body = json.dumps(await collect(generation, completion))
        except Exception as error:
            return await self._failed(entry, error, stream)
        entry.answered()
        return Response(body, media_type="application/json")

    async def _send_events(
        self, generation: Generation, completion: Completion, entry: Entry, stream: EventStream
    ) -> None:
        made = events(generation, completion, self._error_body, entry.answered)
        async with contextlib.aclosing(made) as chunks:
            async for chunk in chunks:
                await stream.send(chunk)

    async def _failed(self, entry: Entry, error: Exception, stream: EventStream) -> Response | None:
        """The answer is an error, and nothing else any more: a response, or the last event of an open stream."""
        entry.answered()
        if not stream.is_open:
            return self._errors.response(error, self._request_id)
        await stream.send(error_event(self._error_body(error)))
        return None

    def _error_body(self, error: Exception) -> bytes:
        return self._errors.failure(error, self._request_id).event_body()

    async def _close(self, generation: Generation) -> None:
        try:
            await generation.aclose()
        except Exception:
            logger.exception("request %s: its generation could not be closed", self._request_id)


async def unless(work: Coroutine[Any, Any, T], *ends: asyncio.Future[Any]) -> T:
    """Does the work. If one of `ends` is done before it, or the caller is cancelled, cancels it and waits for its
    clean-up.

    Raises the error that is the result of that end, or what the work raises.
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


async def _left(receive: Receive) -> ClientDisconnect:
    """Returns when the client leaves. All of the request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
    return ClientDisconnect()
