"""EngineStream: the chunks of a started request, from one engine after the other if they are lost or must leave."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from deployments.calls.replica_calls import CancelledThere, Silent, cause_of, is_replica_lost
from deployments.http.timeline import ENGINE, current
from deployments.requests import Plan
from engine import retry_after
from engine.errors import Cancelled, EngineFailed, InvalidRequest, OrchardError, Unavailable
from engine.protocol import GRAMMAR_FAILED, EngineRequest, FinishReason, Progress, TokenChunk

log = logging.getLogger("ray.serve")

SILENCE_LIMIT_S = 20.0
"""Silence after which an engine counts as lost. It sends a heartbeat every 5 s (model_replica.py); gRPC itself would
take minutes to detect an unreachable node."""

LAST_READ_S = 1.0
"""Longest wait for the regular end of a stream after the last finish reason."""

MAX_MOVES = 3
"""How often an answer may go on elsewhere."""

MAX_LOSSES = 2
"""Lost engines after which an answer ends with an error: it may be what kills them."""

LOST = "The engine was lost in the middle of the answer. Please send the request again."

CLOSE_TIMEOUT_S = 10.0
"""Longest wait of a caller for the clean-up of a stream. After that the clean-up continues in the background, as the
engine may be unreachable."""


class StreamMessage(Protocol):
    """An item of an engine's call."""

    @property
    def is_heartbeat(self) -> bool: ...


M = TypeVar("M", bound=StreamMessage)


class ChunkReader(Generic[M]):
    """Reads the chunks of one call, drops heartbeats, and limits the silence between items.

    One timer watches all reads of a call, as a timeout around each read would cost more than everything else that the
    ingress does per token. Only time spent inside a read counts, not the time in which the client consumes a chunk.
    """

    def __init__(self, chunks: Any, silence_limit_s: float, clock: Callable[[], float] | None = None):
        """Start to watch a call; must be called in a running event loop.

        Args:
            chunks: The call's items, of one class.
            silence_limit_s: Longest wait for the next item, heartbeats included.
            clock: Monotonic seconds; the event loop's by default.
        """
        loop = asyncio.get_running_loop()
        self._chunks = chunks
        self._limit_s = silence_limit_s
        self._clock = clock or loop.time
        self._call_later = loop.call_later
        self._reader: asyncio.Task[Any] | None = None
        self._since = 0.0
        self._is_silent = False
        self._timer = self._call_later(silence_limit_s, self._look)

    async def next(self) -> M | None:
        """Return the next chunk that is not a heartbeat; None at the end of the stream.

        Raises:
            Silent: Nothing arrived for silence_limit_s.
            CancelledThere: The replica has cancelled the call.
            Exception: Whatever the call raises.
        """
        task = asyncio.current_task()
        assert task is not None
        num_cancels = task.cancelling()
        self._reader = task
        try:
            while True:
                self._since = self._clock()
                chunk = await anext(self._chunks, None)
                if chunk is None or not chunk.is_heartbeat:
                    return chunk
        except asyncio.CancelledError:
            if self._is_silent and task.uncancel() <= num_cancels:
                raise Silent(f"the engine sent nothing for {self._limit_s:g} s") from None
            if not task.cancelling():
                raise CancelledThere("the replica cancelled the call") from None
            raise
        finally:
            self._reader = None

    def _look(self) -> None:
        left_s = self._limit_s if self._reader is None else self._since + self._limit_s - self._clock()
        if self._reader is not None and left_s <= 0:
            self._is_silent = True
            self._reader.cancel()
        else:
            self._timer = self._call_later(left_s, self._look)

    async def read_end(self, request_id: str) -> None:
        """Let the call end by itself after its last chunk.

        A cancellation could overtake the regular end, and Serve would then count a cancelled request.
        """
        try:
            async with asyncio.timeout(LAST_READ_S):
                while await self.next() is not None:
                    pass
        except Exception as error:
            log.info("request %s: the stream did not end after its last choice: %r", request_id, error)

    def close(self) -> None:
        """Stop the timer. It does not cancel the call."""
        self._timer.cancel()


@dataclass
class AnswerPart:
    """The chunks that one engine sends of an answer, from its first one on."""

    node_id: str
    """'' without Ray."""
    replica_id: str
    first: TokenChunk
    rest: ChunkReader[TokenChunk]
    resources: AsyncExitStack
    """Its call, which ends with it."""


Move = Callable[[AnswerPart, tuple[Progress, ...], bool], Awaitable[AnswerPart]]
"""Continues an answer on another engine than that of a part, after the tokens that the client has; returns at the first
chunk. The last argument tells whether the engine is lost, and not only stopping. Raises OrchardError, or an error for
which `is_replica_lost` holds."""


class EngineStream:
    """A request whose first chunk has arrived. Iterate it once, or close it.

    If its engine is lost or must leave, the answer goes on elsewhere: the tokens of each choice are sent along as its
    progress, and those that follow are the ones that would have come.

    Args:
        plan: The plan, without pixels.
        part: What the first engine sends.
        move: Continues the answer elsewhere; None: it ends with its engine.
        note_loss: Called with the unique id of a lost replica.
    """

    def __init__(
        self,
        plan: Plan,
        part: AnswerPart,
        move: Move | None = None,
        note_loss: Callable[[str], None] = lambda replica_id: None,
    ):
        self.plan = plan
        self.num_cached_tokens = part.first.num_cached
        self.num_skipped_tokens = part.first.num_skipped
        self.num_moves = 0
        self._part = part
        self._move = move
        self._note_loss = note_loss
        self._tokens: list[list[int]] = [[] for _ in range(plan.request.num_choices)]
        self._open = set(range(plan.request.num_choices))
        self._left_there = set[int]()  # choices that the engine has given up although they are not finished
        self._num_losses = 0
        self._is_at_end = False
        self._closing: asyncio.Task[None] | None = None
        self._timeline = current()

    @property
    def node_id(self) -> str:
        """The node of the engine that generates the answer now; '' without Ray."""
        return self._part.node_id

    async def __aiter__(self) -> AsyncIterator[TokenChunk]:
        """Yield the chunks, the first one included.

        Raises:
            Unavailable: The engine was lost before the end, and the answer could not go on elsewhere.
        """
        try:
            chunk: TokenChunk | None = self._part.first
            while chunk is not None:
                if chunk.finish_reason is FinishReason.MOVED:
                    self._left_there.add(chunk.index)
                    chunk = replace(chunk, finish_reason=None)
                elif chunk.finish_reason is not None:
                    self._open.discard(chunk.index)
                self._tokens[chunk.index] += chunk.token_ids
                yield chunk
                chunk = await self._next()
            self._is_at_end = True
        except Exception as error:
            self._is_at_end = True
            raise cause_of(error) from None
        finally:
            await self.aclose()

    async def _next(self) -> TokenChunk | None:
        """Return the next chunk of the engine, or the first one of the engine that takes over; None at the end."""
        if self._open and self._left_there >= self._open:
            return await self._continue_elsewhere(None)
        try:
            chunk = await self._part.rest.next()
        except Exception as error:
            cause = cause_of(error)
            if not is_replica_lost(cause):
                raise
            return await self._continue_elsewhere(cause)
        self._timeline.lap(ENGINE)
        if chunk is not None and chunk.timeline is not None:
            self._timeline.add_row(chunk.timeline)
        return chunk

    async def _continue_elsewhere(self, loss: Exception | None) -> TokenChunk:
        """Continue on another engine, and return its first chunk.

        Args:
            loss: Why the engine is lost; None if it is stopping and has given the answer up in order.

        Raises:
            Unavailable: The answer may not move, has moved MAX_MOVES times, its engines were lost MAX_LOSSES times, or
                no engine took it.
        """
        request_id = self.plan.request.request_id
        while True:
            if loss is not None:
                log.warning("request %s: the engine was lost: %s", request_id, loss)
                self._num_losses += 1
                self._note_loss(self._part.replica_id)
            if self._move is None or self.num_moves >= MAX_MOVES or self._num_losses >= MAX_LOSSES:
                raise Unavailable(LOST, retry_after.REPLICA_LOST_S) from loss
            self.num_moves += 1
            left, self._left_there = self._part, set()
            self._end_of(left)
            try:
                self._part = await self._move(left, self._progress(), loss is not None)
            except Exception as error:
                loss = cause_of(error)
                if is_replica_lost(loss):
                    continue
                log.warning("request %s goes on at no other engine: %r", request_id, loss)
                reason = f" {loss.message}" if isinstance(loss, OrchardError) else ""  # others may reveal paths
                raise Unavailable(LOST + reason, retry_after.REPLICA_LOST_S) from error
            self._timeline.node_id = self._part.node_id
            num_tokens = sum(map(len, self._tokens))
            log.info("request %s goes on at node %s after %d tokens", request_id, self._part.node_id, num_tokens)
            self._timeline.lap("move", node_id=self._part.node_id, num_tokens=num_tokens)
            return self._part.first

    def _progress(self) -> tuple[Progress, ...]:
        return tuple(
            Progress(tuple(token_ids), is_finished=index not in self._open)
            for index, token_ids in enumerate(self._tokens)
        )

    def _end_of(self, part: AnswerPart) -> None:
        """End the call of a part in the background: its engine may be unreachable."""
        ending = asyncio.ensure_future(part.resources.aclose())
        ending.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def aclose(self) -> None:
        """Free the rows. Continues in its own task if the caller is cancelled or it takes too long."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        done, _ = await asyncio.wait({self._closing}, timeout=CLOSE_TIMEOUT_S)
        if done:
            self._closing.result()
        else:
            unconfirmed = "request %s: the engine has not confirmed its end within %g s"
            log.warning(unconfirmed, self.plan.request.request_id, CLOSE_TIMEOUT_S)

    async def _close(self) -> None:
        if not self._open and not self._is_at_end:
            await self._part.rest.read_end(self.plan.request.request_id)
        await self._part.resources.aclose()


def failure_of(chunk: TokenChunk, request: EngineRequest) -> OrchardError | None:
    """Return the error with which a chunk ends its choice; None if the choice goes on or ended normally."""
    if chunk.finish_reason is FinishReason.ABORT:
        return Cancelled(chunk.error or "The request was cancelled.")
    if chunk.finish_reason is not FinishReason.ERROR:
        return None
    message = chunk.error or "The engine ended the request with an error."
    if message.startswith(GRAMMAR_FAILED) and request.grammar is not None:
        return InvalidRequest(f"The answer cannot be constrained further: {message}.", request.grammar.field)
    return EngineFailed(message) if chunk.retry_after_s is None else Unavailable(message, chunk.retry_after_s)
