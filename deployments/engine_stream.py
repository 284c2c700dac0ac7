"""EngineStream: the chunks of a started request, until it ends, its engine is lost, or its client disconnects."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

from deployments.protocol import Plan
from deployments.replica_calls import CancelledThere, Silent, cause_of, is_replica_lost
from deployments.timeline import ENGINE, current
from engine import retry_after
from engine.protocol import TokenChunk, Unavailable

log = logging.getLogger("ray.serve")

SILENCE_LIMIT_S = 20.0
"""Silence after which an engine counts as lost. It sends a heartbeat every 5 s (model_replica.py); gRPC itself would
take minutes to detect an unreachable node."""

LAST_READ_S = 1.0
"""Longest wait for the regular end of a stream after the last finish reason."""

CLOSE_TIMEOUT_S = 10.0
"""Longest wait of a caller for the clean-up of a stream. After that the clean-up continues in the background, as the
engine may be unreachable."""


class ChunkReader:
    """Reads the chunks of one call, drops heartbeats, and limits the silence between items.

    One timer watches all reads of a call, as a timeout around each read would cost more than everything else that the
    ingress does per token. Only time spent inside a read counts, not the time in which the client consumes a chunk.
    """

    def __init__(self, chunks: Any, silence_limit_s: float, clock: Callable[[], float] | None = None):
        """Start to watch a call; must be called in a running event loop.

        Args:
            chunks: The call's items, each a TokenChunk.
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

    async def next(self) -> TokenChunk | None:
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

    def close(self) -> None:
        """Stop the timer. It does not cancel the call."""
        self._timer.cancel()


class EngineStream:
    """A request whose first chunk has arrived. Iterate it once, or close it."""

    def __init__(
        self,
        plan: Plan,
        node_id: str,
        first: TokenChunk,
        rest: ChunkReader,
        resources: AsyncExitStack,
        note_loss: Callable[[], None] = lambda: None,
    ):
        self.plan = plan
        self.node_id = node_id
        self.num_cached_tokens = first.num_cached
        self.num_skipped_tokens = first.num_skipped
        self._first = first
        self._rest = rest
        self._resources = resources
        self._note_loss = note_loss
        self._num_open = plan.request.num_choices
        self._is_at_end = False
        self._closing: asyncio.Task[None] | None = None
        self._timeline = current()

    async def __aiter__(self) -> AsyncIterator[TokenChunk]:
        """Yield the chunks, the first one included. Raises Unavailable when the engine is lost before the end."""
        try:
            chunk: TokenChunk | None = self._first
            while chunk is not None:
                self._num_open -= chunk.finish_reason is not None
                yield chunk
                chunk = await self._rest.next()
                self._timeline.lap(ENGINE)
                if chunk is not None and chunk.timeline is not None:
                    self._timeline.add_row(chunk.timeline)
            self._is_at_end = True
        except Exception as error:
            self._is_at_end = True
            cause = cause_of(error)
            if is_replica_lost(cause):
                log.warning("request %s: the engine was lost: %s", self.plan.request.request_id, cause)
                self._note_loss()
                lost = "The engine was lost in the middle of the answer. Please send the request again."
                raise Unavailable(lost, retry_after.REPLICA_LOST_S) from error
            raise cause from None
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Free the rows and the slot. Continues in its own task if the caller is cancelled or it takes too long."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        done, _ = await asyncio.wait({self._closing}, timeout=CLOSE_TIMEOUT_S)
        if done:
            self._closing.result()
        else:
            unconfirmed = "request %s: the engine has not confirmed its end within %g s"
            log.warning(unconfirmed, self.plan.request.request_id, CLOSE_TIMEOUT_S)

    async def _close(self) -> None:
        if self._num_open <= 0 and not self._is_at_end:
            await self._read_end()
        await self._resources.aclose()

    async def _read_end(self) -> None:
        """Let the call end by itself after the last choice.

        A cancellation could overtake the regular end: Serve would then count a cancelled request and ask the replica to
        release a slot that is not reserved.
        """
        try:
            async with asyncio.timeout(LAST_READ_S):
                while await self._rest.next() is not None:
                    pass
        except Exception as error:
            unended = "request %s: the stream did not end after its last choice: %r"
            log.info(unended, self.plan.request.request_id, error)
