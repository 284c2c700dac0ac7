"""The event loop's side of a request: output that its reader has not consumed yet."""

import asyncio
from collections.abc import Container, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from engine.protocol import FinishReason, TokenChunk


class TokenStream:
    """The output of all choices of one request.

    Args:
        num_choices: Choices of the request.
        open_choices: Indices of those that are not finished; None for all.
    """

    def __init__(self, num_choices: int, open_choices: Container[int] | None = None) -> None:
        self._unread: list[list[TokenChunk]] = [[] for _ in range(num_choices)]  # at most max_tokens token ids each
        self._is_open = [open_choices is None or index in open_choices for index in range(num_choices)]
        self._num_cached = self._num_skipped = 0
        self._waiter: asyncio.Future[None] | None = None
        self._wake_at = 0.0  # when to wake the reader without output, on the loop's clock
        self._alarm: asyncio.TimerHandle | None = None
        self._has_begun = [False] * num_choices
        self._is_urgent = False  # a choice begins or ends in the unread output
        self._due_at = 0.0  # when other output may be read, on the loop's clock
        self._pause: asyncio.TimerHandle | None = None  # wakes the reader then

    @property
    def num_open(self) -> int:
        """Choices that have not finished."""
        return sum(self._is_open)

    @property
    def is_finished(self) -> bool:
        return not any(self._is_open)

    def put(self, chunk: TokenChunk) -> None:
        """Append a chunk and wake the reader. Tokens of an aborted request may still arrive; they are ignored."""
        if self._is_open[chunk.index]:
            self._unread[chunk.index].append(chunk)
            self._is_open[chunk.index] = chunk.finish_reason is None
            self._num_cached, self._num_skipped = chunk.num_cached, chunk.num_skipped
            self._is_urgent |= chunk.finish_reason is not None or not self._has_begun[chunk.index]
            self._has_begun[chunk.index] = True
        if self._is_due():
            self._wake()

    def end(self, reason: FinishReason, error: str | None = None, retry_after_s: float | None = None) -> None:
        """Finish every choice that has not finished."""
        chunk = TokenChunk(
            token_ids=(),
            finish_reason=reason,
            error=error,
            num_cached=self._num_cached,
            num_skipped=self._num_skipped,
            retry_after_s=retry_after_s,
        )
        for index in range(len(self._is_open)):
            self.put(replace(chunk, index=index))

    async def settled(self, work: asyncio.Future[Any], timeout_s: float | None = None) -> bool:
        """Wait for `work` or for the end of all choices; return False on timeout."""
        if not self.is_finished and not work.done():
            self._waiter = asyncio.get_running_loop().create_future()
            await asyncio.wait({work, self._waiter}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return work.done() or self.is_finished

    async def get(self, timeout_s: float | None = None, gap_s: float = 0.0) -> list[TokenChunk]:
        """Wait for output and return one chunk per choice with any; [] after timeout_s without output.

        Args:
            timeout_s: Longest wait; None: no limit. After it, output that was held back is returned too.
            gap_s: Shortest time until the next output, unless a choice begins or ends in it: the tokens of several
                steps come together then.
        """
        loop = asyncio.get_running_loop()
        if not any(self._unread) or not self._is_due():
            self._waiter = loop.create_future()
            if timeout_s is not None:
                self._wake_at = loop.time() + timeout_s
                self._alarm = self._alarm or loop.call_later(timeout_s, self._look, loop)
            await self._waiter
        merged = [_merged(chunks) for chunks in self._unread if chunks]
        for chunks in self._unread:
            chunks.clear()
        if merged:
            self._due_at, self._is_urgent = loop.time() + gap_s, False
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        return merged

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wake the reader if its timeout has passed.

        One timer serves all reads within a timeout, because a timer per read would cost more than the read.
        """
        self._alarm = None
        if self._waiter is None or self._waiter.done():
            return
        if loop.time() >= self._wake_at:
            self._wake()
        else:
            self._alarm = loop.call_at(self._wake_at, self._look, loop)

    def _is_due(self) -> bool:
        """Tell whether output may be read; if not yet, have the reader woken once it may."""
        if self._is_urgent:
            return True
        loop = asyncio.get_running_loop()
        if loop.time() >= self._due_at:
            return True
        self._pause = self._pause or loop.call_at(self._due_at, self._resume)
        return False

    def _resume(self) -> None:
        self._pause = None
        if any(self._unread):
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _merged(chunks: Sequence[TokenChunk]) -> TokenChunk:
    """Merge consecutive chunks of a choice, of which only the last one may finish it."""
    if len(chunks) == 1:
        return chunks[0]
    return replace(
        chunks[-1],
        token_ids=tuple(chain.from_iterable(chunk.token_ids for chunk in chunks)),
        logprobs=tuple(chain.from_iterable(chunk.logprobs for chunk in chunks)),
        prompt_logprobs=next((one for chunk in chunks if (one := chunk.prompt_logprobs) is not None), None),
        num_drafted=sum(chunk.num_drafted for chunk in chunks),
        num_accepted=sum(chunk.num_accepted for chunk in chunks),
    )
