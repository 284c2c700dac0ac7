"""The event loop's side of a request: output that its reader has not consumed yet."""

import asyncio
from typing import Any

from engine.protocol import FinishReason, TokenChunk, TokenLogprobs


class ChoiceTokens:
    """Output of one choice that its reader has not consumed yet; at most max_tokens token ids."""

    def __init__(self) -> None:
        self.finish: TokenChunk | None = None
        self._num_cached = self._num_skipped = 0
        self._clear()

    def _clear(self) -> None:
        self.has_news = False
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._num_drafted = self._num_accepted = 0

    def put(self, chunk: TokenChunk) -> None:
        """Append a chunk. Chunks after a finish reason are ignored: tokens of an aborted request may still arrive."""
        if self.finish is not None:
            return
        self.has_news = True
        self._token_ids.extend(chunk.token_ids)
        self._logprobs.extend(chunk.logprobs)
        self._num_drafted += chunk.num_drafted
        self._num_accepted += chunk.num_accepted
        self._num_cached = max(self._num_cached, chunk.num_cached)  # 0 in chunks made by TokenStream.end
        self._num_skipped = max(self._num_skipped, chunk.num_skipped)
        if chunk.finish_reason is not None:
            self.finish = chunk

    def take(self, index: int) -> TokenChunk:
        """Return everything since the last call as one chunk."""
        end = self.finish or TokenChunk(())
        token_ids, logprobs = tuple(self._token_ids), tuple(self._logprobs)
        figures = self._num_drafted, self._num_accepted, self._num_cached, self._num_skipped
        chunk = TokenChunk(
            token_ids, end.finish_reason, end.error, index, logprobs, *figures, end.retry_after_s, end.embedding
        )
        self._clear()
        return chunk


class TokenStream:
    """The output of all choices of one request."""

    def __init__(self, num_choices: int) -> None:
        self.choices = [ChoiceTokens() for _ in range(num_choices)]
        self._waiter: asyncio.Future[None] | None = None
        self._wake_at = 0.0  # when to wake the reader without output, on the loop's clock
        self._alarm: asyncio.TimerHandle | None = None

    @property
    def num_open(self) -> int:
        """Choices that have not finished."""
        return sum(choice.finish is None for choice in self.choices)

    @property
    def is_finished(self) -> bool:
        return self.num_open == 0

    def put(self, chunk: TokenChunk) -> None:
        """Append a chunk and wake the reader."""
        self.choices[chunk.index].put(chunk)
        self._wake()

    def end(self, reason: FinishReason, error: str | None = None, retry_after_s: float | None = None) -> None:
        """Finish every choice that has not finished."""
        for index in range(len(self.choices)):
            self.put(TokenChunk((), reason, error, index, retry_after_s=retry_after_s))

    async def settled(self, work: asyncio.Future[Any], timeout_s: float | None = None) -> bool:
        """Wait for `work` or for the end of all choices; return False on timeout."""
        if not self.is_finished and not work.done():
            self._waiter = asyncio.get_running_loop().create_future()
            await asyncio.wait({work, self._waiter}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return work.done() or self.is_finished

    async def get(self, timeout_s: float | None = None) -> list[TokenChunk]:
        """Wait for output and return one chunk per choice with any; [] after timeout_s without output."""
        if not any(choice.has_news for choice in self.choices):
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            if timeout_s is not None:
                self._wake_at = loop.time() + timeout_s
                self._alarm = self._alarm or loop.call_later(timeout_s, self._look, loop)
            await self._waiter
        return [choice.take(index) for index, choice in enumerate(self.choices) if choice.has_news]

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

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
