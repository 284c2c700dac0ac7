"""MergedGeneration: merges the generations of several prompts into one."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace

from deployments.http.generation import Generation, TextDelta
from deployments.requests import SpecPrefillReport

Start = Callable[[], Awaitable[Generation]]


class MergedGeneration:
    """See http.generation. Choice j of generation i becomes choice i * num_choices + j; token counts are sums.

    Iterating raises the first error of any generation.
    """

    def __init__(self, generations: Sequence[Generation], num_choices: int):
        self.node_ids = tuple(dict.fromkeys(node_id for one in generations for node_id in one.node_ids))
        self.num_prompt_tokens = sum(generation.num_prompt_tokens for generation in generations)
        self.num_cached_tokens = sum(generation.num_cached_tokens for generation in generations)
        self.num_skipped_tokens = sum(generation.num_skipped_tokens for generation in generations)
        self.context_limited = any(generation.context_limited for generation in generations)
        self.spec_prefill = _merged_reports([generation.spec_prefill for generation in generations])
        self.left_open = generations[0].left_open if generations else ()
        self._generations = generations
        self._num_choices = num_choices
        self._deltas: asyncio.Queue[TextDelta | Exception | None] = asyncio.Queue(len(generations))
        self._pumps: list[asyncio.Task[None]] = []

    async def __aiter__(self) -> AsyncIterator[TextDelta]:
        self._pumps = [asyncio.ensure_future(self._pump(index)) for index in range(len(self._generations))]
        num_open = len(self._pumps)
        while num_open:
            delta = await self._deltas.get()
            if isinstance(delta, Exception):
                raise delta
            if delta is None:
                num_open -= 1
            else:
                yield delta

    async def aclose(self) -> None:
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        await _close_all(self._generations)

    async def _pump(self, index: int) -> None:
        first = index * self._num_choices
        try:
            async for delta in self._generations[index]:
                await self._deltas.put(replace(delta, index=first + delta.index))
        except Exception as error:
            await self._deltas.put(error)
        else:
            await self._deltas.put(None)


async def start_all(starts: Sequence[Start], num_choices: int) -> Generation:
    """Start all generations concurrently.

    Args:
        starts: One per generation.
        num_choices: Choices of each generation.

    Raises:
        OrchardError: The first error; the other generations are closed.
    """
    if len(starts) == 1:
        return await starts[0]()
    tasks = [asyncio.ensure_future(start()) for start in starts]
    try:
        return MergedGeneration(await asyncio.gather(*tasks), num_choices)
    except BaseException:
        for task in tasks:
            task.cancel()
        started = await asyncio.gather(*tasks, return_exceptions=True)
        await _close_all([generation for generation in started if not isinstance(generation, BaseException)])
        raise


async def _close_all(generations: Sequence[Generation]) -> None:
    """Close all generations, then raise the first error if there is one."""
    closed = await asyncio.gather(*(generation.aclose() for generation in generations), return_exceptions=True)
    for error in closed:
        if error is not None:
            raise error


def _merged_reports(reports: Sequence[SpecPrefillReport | None]) -> SpecPrefillReport | None:
    """Merge the reports; None if there are none. Prompts are scored concurrently, so the longest time counts."""
    there = [report for report in reports if report is not None]
    if not there:
        return None
    reasons = [report.dense_because for report in there if report.dense_because is not None]
    return SpecPrefillReport(
        sum(report.num_scored for report in there),
        max(report.scoring_s for report in there),
        reasons[0] if reasons else None,
    )
