"""Which prompts in progress advance in a step: order, chunk sizes, and which prompts share a forward. Pure."""

from collections.abc import Mapping, Sequence

from engine.core.batch import PLAIN, Drafts, ImageLeft, PromptChunk
from engine.core.burst import Span, burst_s, may_burst, num_together
from engine.core.memory.chunks import ChunkMemory
from engine.core.prefill import (
    FIXED_PARTS,
    MAX_IDLE_STEP_S,
    MIN_IDLE_STEP_S,
    Prefill,
    PrefillOrder,
    StepBudget,
)
from engine.core.prefills_in_progress import PrefillsInProgress
from engine.core.request import Request
from engine.core.request_queue import QueueEntry
from engine.core.scheduler_context import SchedulerContext

MIN_PREFILL_TOKENS = 16
"""Fewest prompt tokens per step while rows decode, whatever else the step computes."""

FIRST_PREFILL_TOKENS = 64
"""Size of the first chunk, before any chunk has been measured."""

CHUNK_BITS = 3
"""Significant bits of a chunk's size where time limits it: 64, 80, 96, 112, 128, 160, ... tokens. Recurring sizes reuse
compiled kernels, graphs and allocated buffers."""

MIN_FIXED_PARTS = 8
"""After the first chunk of a step, a chunk that would neither complete its prompt nor take this many times a forward's
fixed time is left to the next step, which may compute it in a larger chunk."""

TIMEOUT_PART = 0.25
"""Share of step_timeout_s that a chunk of MIN_PREFILL_TOKENS may be predicted to take; a slower one gets fewer
tokens."""


class PrefillScheduler:
    """Chooses what to prefill in the current step.

    Args:
        context: Configuration, clock, cost model, memory budget, evictable memory and prefix lookup.
        running: The decoding rows by row id; the scheduler's own mapping.

    Attributes:
        in_progress: The prompts in progress.
        step: What prefill may still use in the current step.
        drafts: The drafts that each decoding row verifies in the current step.
        total_s: Seconds that the engine has spent on prompts.
    """

    def __init__(self, context: SchedulerContext, running: Mapping[str, Request]):
        self.in_progress = PrefillsInProgress()
        self.step = StepBudget()
        self.drafts = PLAIN
        self.total_s = 0.0
        self._config = context.config
        self._costs = context.costs
        self._memory = ChunkMemory(context.budget)
        self._evictable = context.evictable
        self._prefixes = context.prefixes
        self._has_bursts = context.has_bursts
        self._running = running
        self._order = PrefillOrder(context.costs)

    def add(self, entry: QueueEntry) -> None:
        """Begin the prompt of a request with reserved memory."""
        self.in_progress.add(Prefill(entry, self._prefixes.num_cached(entry.rows[0])))

    def remaining_s(self, prefill: Prefill) -> float:
        """Predict the seconds until a prompt is complete when it is computed alone."""
        return self._order.remaining_s(prefill)

    def images_s(self, prefill: Prefill) -> float:
        """Predict the seconds until a prompt's images are encoded."""
        return self._order.images_s(prefill)

    def begin_step(self, drafts: Drafts) -> None:
        """Set the tokens and seconds that prefill may use in this step: decoding rows stall for at most max_stall_s."""
        self.drafts = drafts
        self._memory.end_chunk()
        for prefill in self.in_progress:
            prefill.is_waiting = False
        config = self._config
        if not self._running:
            self.step = StepBudget(config.prefill_chunk_tokens, self._full_step_s)
            return
        left = config.prefill_chunk_tokens - len(self._running) * (drafts.num_tokens + 1)
        num_tokens = max(MIN_PREFILL_TOKENS, min(config.prefill_chunk_tokens_busy, left))
        self.step = StepBudget(num_tokens, config.scheduler.max_stall_s)

    @property
    def fills_step(self) -> bool:
        """Whether the prompts in progress are predicted to use all remaining time of the step."""
        num_forwards_saved = max(0, sum(map(self._may_burst, self.in_progress)) - 1)
        seconds = sum(map(self.remaining_s, self.in_progress))
        return seconds - num_forwards_saved * self._costs.chunk_s(1, 0) >= self.step.seconds

    @property
    def _full_step_s(self) -> float:
        """Seconds of prefill in a step while no row decodes."""
        return min(max(FIXED_PARTS * self._costs.chunk_s(1, 0), MIN_IDLE_STEP_S), MAX_IDLE_STEP_S)

    # The next chunk

    def choose(self) -> Prefill | None:
        """Choose the next prompt to advance; None if none may advance in this step.

        Among the most urgent prompts it is the one with the fewest seconds left, or the oldest when its share of the
        time is due (see PrefillOrder). If that prompt has not begun, and another prompt in progress will soon cache a
        prefix of it, the other one advances instead.
        """
        if not (ready := self._ready()):
            return None
        chosen = self._order.choose(ready, self._full_step_s)
        if not chosen.has_started and (source := self._prefixes.source_of(chosen.rows[0])) is not None:
            first = next((prefill for prefill in self.in_progress if source in prefill.rows), chosen)
            is_soon = self._order.images_s(first) <= self._order.remaining_s(chosen)
            return first if is_soon else chosen
        return chosen

    def chunk_tokens(self, rows: Sequence[Request]) -> int:
        """Return the number of tokens of this prompt's next chunk; 0 if the step ends before it.

        Memory for the chunk's intermediate results stays reserved until the next call.
        """
        row, step = rows[0], self.step
        left = row.num_tokens - row.num_prefilled
        wanted = min(step.num_tokens, left)
        if (in_time := self._tokens_in_time(row.num_prefilled)) < wanted:
            wanted = _rounded_down(in_time)
        if wanted < left and step.has_started:  # the next step could compute these tokens in a larger chunk
            min_s = MIN_FIXED_PARTS * self._costs.chunk_s(1, row.num_prefilled)
            if wanted < MIN_PREFILL_TOKENS or self._costs.chunk_s(wanted, row.num_prefilled) < min_s:
                step.close()
                return 0
        self._memory.end_chunk()
        wanted = max(wanted, 1)
        num_tokens = self._memory.reserve_chunk(row, wanted)
        return num_tokens if num_tokens == wanted else self._enlarged_chunk(row, num_tokens, wanted)

    def image_blocks(self, image: ImageLeft) -> int:
        """Return how many vision tower blocks the image's next piece computes; 0 if the step ends before it."""
        step, block_s = self.step, self._costs.image_s(image.num_patches, 1 / image.depth)
        num_blocks = int(step.seconds / block_s)
        if not num_blocks and step.has_started:
            step.close()
            return 0
        return min(max(num_blocks, 1), image.num_blocks)

    def note(self, prompts: Sequence[Sequence[Request]], chunks: Sequence[PromptChunk], seconds: float) -> None:
        """Note a forward in the timelines of its rows, before they take its output.

        Args:
            prompts: The rows that share each prompt.
            chunks: The chunk of each prompt.
            seconds: Wall time of the forward; in a forward of several prompts each gets the same share.
        """
        self.total_s += seconds
        for rows, chunk in zip(prompts, chunks, strict=True):
            for row in rows:
                row.record.computed(chunk.num_tokens, seconds / len(chunks))

    def record(self, chunks: Sequence[PromptChunk], seconds: float, device_s: float) -> None:
        """Account for chunks that one forward has computed; each ended at its row's num_prefilled.

        Args:
            chunks: The chunks.
            seconds: Wall time of the forward, with snapshots and reservations.
            device_s: The same without earlier work that the device had to finish first.
        """
        longest = max(chunk.num_tokens for chunk in chunks)
        start = max(chunk.row.num_prefilled - chunk.num_tokens for chunk in chunks)
        self.step.use(sum(chunk.num_tokens for chunk in chunks), seconds)
        self._costs.record_chunk(longest, start, device_s, len(chunks))
        rows = {chunk.row.id for chunk in chunks}
        for prefill in self.in_progress:
            if prefill.rows[0].id in rows:
                self._order.record(prefill, seconds / len(chunks))

    def record_image(
        self, rows: Sequence[Request], image: ImageLeft, num_blocks: int, seconds: float, device_s: float
    ) -> None:
        """Account for a piece of an image of this prompt. seconds, device_s: see `record`."""
        prefill = self.in_progress.of(rows[0])
        prefill.encoded_s += device_s
        self.total_s += seconds
        for row in rows:
            row.record.encoded(image.num_patches, seconds, is_new=image.num_blocks == image.depth)
        self.step.use(0, seconds)
        self._order.record(prefill, seconds)
        self._costs.record_image(image.num_patches, num_blocks / image.depth, device_s)

    def _ready(self) -> list[Prefill]:
        """Return the most urgent prompts that may advance now, in the order of their admission."""
        ready = [prefill for prefill in self.in_progress if not prefill.is_waiting]
        if self._config.scheduler.policy == "priority":
            ready = [one for one in ready if not any(other.entry.is_before(one.entry) for other in ready)]
        return ready

    def _tokens_in_time(self, start: int) -> int:
        """Return how many tokens after `start` fit into the remaining time of the step."""
        if not self._costs.is_measured:
            return FIRST_PREFILL_TOKENS
        num_tokens = self._costs.max_tokens(self.step.seconds, start)
        if num_tokens >= MIN_PREFILL_TOKENS or self.step.has_started:
            return num_tokens
        longest_s = TIMEOUT_PART * self._config.step_timeout_s
        return max(num_tokens, min(MIN_PREFILL_TOKENS, self._costs.max_tokens(longest_s, start)))

    def _enlarged_chunk(self, row: Request, num_tokens: int, wanted: int) -> int:
        """Return the size of this prompt's chunk, after evicting snapshots for a larger one if that saves time."""
        missing = self._memory.shortfall_bytes(row, wanted)
        start, end = row.num_prefilled, row.num_tokens
        saved_s = self._costs.prompt_s(start, end, num_tokens) - self._costs.prompt_s(start, end, wanted)
        if missing and self._evictable.price(missing) < saved_s and self._evictable.evict(missing):
            return self._memory.reserve_chunk(row, wanted)
        return num_tokens

    # Several prompts in one forward

    def companions(self, first: PromptChunk) -> list[Sequence[Request]]:
        """Return the rows of other prompts that may share a forward with this chunk, the shortest first.

        Their number is a prediction: until they begin, their cached prefixes may be evicted.
        """
        chosen = self.in_progress.of(first.row)
        if not self._may_burst(chosen):
            return []
        others = [one for one in self._ready() if one is not chosen and self._may_burst(one)]
        for one in others:
            if not one.has_started:  # a longer prefix may be cached by now
                one.num_expected = self._prefixes.num_cached(one.rows[0])
        others.sort(key=lambda one: one.end - one.start)
        spans = [(mine := _span(first)), *(_expected_span(one, mine.num_left) for one in others)]
        num = num_together(spans, self._costs, self.step.num_tokens, self.step.seconds)
        return [tuple(one.rows) for one in others[: num - 1]]

    def burst(self, first: PromptChunk, others: Sequence[PromptChunk]) -> Sequence[PromptChunk]:
        """Choose which of these chunks are computed in one forward: `first`, and others while that saves time.

        Memory for the intermediate results stays reserved until the next chunk is chosen.
        """
        chunks = [first, *sorted(others, key=lambda chunk: chunk.num_tokens)]
        spans = [_span(chunk) for chunk in chunks]
        num = num_together(spans, self._costs, self.step.num_tokens, self.step.seconds)
        while num > 1 and not self._reserve_burst(chunks[:num], spans[:num]):
            num -= 1
        return chunks[:num]

    def _may_burst(self, prefill: Prefill) -> bool:
        """Return whether the prompt may share a forward now: it must not wait for another prompt's prefix."""
        if not self._has_bursts or prefill.is_alone or not may_burst(prefill.rows):
            return False
        return prefill.has_started or self._prefixes.source_of(prefill.rows[0]) is None

    def _reserve_burst(self, chunks: Sequence[PromptChunk], spans: Sequence[Span]) -> bool:
        """Reserve memory for the forward, evicting snapshots where that costs less time than the forward saves."""
        rows, longest = [chunk.row for chunk in chunks], max(span.num_tokens for span in spans)
        end = longest + max(span.start for span in spans)
        missing = self._memory.reserve_burst(rows, longest, end)
        one_by_one_s = sum(self._costs.chunk_s(span.num_tokens, span.start) for span in spans)
        if not missing or self._evictable.price(missing) > one_by_one_s - burst_s(spans, self._costs):
            return not missing
        return self._evictable.evict(missing) and not self._memory.reserve_burst(rows, longest, end)


def _rounded_down(num_tokens: int) -> int:
    """Return the largest size with CHUNK_BITS significant bits that is at most `num_tokens`."""
    shift = max(0, num_tokens.bit_length() - CHUNK_BITS)
    return num_tokens >> shift << shift


def _span(chunk: PromptChunk) -> Span:
    row = chunk.row
    return Span(chunk.num_tokens, row.num_prefilled, row.num_tokens - row.num_prefilled - chunk.num_tokens)


def _expected_span(prefill: Prefill, num_left: int) -> Span:
    """Predict the span of a prompt that has not begun, with a boundary `num_left` tokens before its end."""
    num_tokens = prefill.end - prefill.start
    num_left = min(num_left, num_tokens - 1)
    return Span(num_tokens - num_left, prefill.start, num_left)
