"""What the engine has produced and its reader has not taken yet: the event loop's end of a request."""

import asyncio
from typing import Any

from engine.protocol import FinishReason, TokenChunk, TokenLogprobs


class ChoiceTokens:
    """What one choice has produced and its reader has not taken yet. At most max_tokens token ids wait in it."""

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
        """Nothing is taken after a finish reason: tokens of an aborted request may still be on their way."""
        if self.finish is not None:
            return
        self.has_news = True
        self._token_ids.extend(chunk.token_ids)
        self._logprobs.extend(chunk.logprobs)
        self._num_drafted += chunk.num_drafted
        self._num_accepted += chunk.num_accepted
        self._num_cached = max(self._num_cached, chunk.num_cached)  # what we end ourselves does not know them
        self._num_skipped = max(self._num_skipped, chunk.num_skipped)
        if chunk.finish_reason is not None:
            self.finish = chunk

    def take(self, index: int) -> TokenChunk:
        end = self.finish or TokenChunk(())
        token_ids, logprobs = tuple(self._token_ids), tuple(self._logprobs)
        figures = self._num_drafted, self._num_accepted, self._num_cached, self._num_skipped
        chunk = TokenChunk(
            token_ids, end.finish_reason, end.error, index, logprobs, *figures, end.retry_after_s, end.embedding
        )
        self._clear()
        return chunk


class TokenStream:
    """All choices of one request."""

    def __init__(self, num_choices: int) -> None:
        self.choices = [ChoiceTokens() for _ in range(num_choices)]
        self._waiter: asyncio.Future[None] | None = None
        self._wake_at = 0.0  # when the reader wants to be woken although nothing came, on the loop's clock
        self._alarm: asyncio.TimerHandle | None = None

    @property
    def num_open(self) -> int:
        """Choices that have not ended."""
        return sum(choice.finish is None for choice in self.choices)

    @property
    def is_finished(self) -> bool:
        return self.num_open == 0

    def put(self, chunk: TokenChunk) -> None:
        self.choices[chunk.index].put(chunk)
        self._wake()

    def end(self, reason: FinishReason, error: str | None = None, retry_after_s: float | None = None) -> None:
        """Of every choice that has not ended."""
        for index in range(len(self.choices)):
            self.put(TokenChunk((), reason, error, index, retry_after_s=retry_after_s))

    async def settled(self, work: asyncio.Future[Any], timeout_s: float | None = None) -> bool:
        """True as soon as the work is done or every choice has ended; False after so long."""
        if not self.is_finished and not work.done():
            self._waiter = asyncio.get_running_loop().create_future()
            await asyncio.wait({work, self._waiter}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return work.done() or self.is_finished

    async def get(self, timeout_s: float | None = None) -> list[TokenChunk]:
        """All that came since the last call, one chunk for each choice, waiting for something to come.

        Returns [] after timeout_s without anything.
        """
        if not any(choice.has_news for choice in self.choices):
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            if timeout_s is not None:
                self._wake_at = loop.time() + timeout_s
                self._alarm = self._alarm or loop.call_later(timeout_s, self._look, loop)
            await self._waiter
        return [choice.take(index) for index, choice in enumerate(self.choices) if choice.has_news]

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wakes the reader if it has waited for as long as it wants. One alarm is set for all reads of that time: one
        for each read would cost more than the read."""
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
