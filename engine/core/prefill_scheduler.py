"""Which prompts in progress advance in a step: order, chunk sizes, and which prompts share a forward. Pure."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from engine.config import EngineConfig
from engine.core.batch import ImageLeft, PromptChunk
from engine.core.burst import Span, burst_s, may_burst, num_together
from engine.core.cost_model import CostModel
from engine.core.memory.budget import MemoryBudget
from engine.core.memory.evictable import Evictable
from engine.core.prefill import (
    FIXED_PARTS,
    MAX_IDLE_STEP_S,
    MIN_IDLE_STEP_S,
    Prefill,
    PrefillOrder,
    StepBudget,
)
from engine.core.request import Request
from engine.core.request_queue import QueueEntry

MIN_PREFILL_TOKENS = 16
"""Fewest prompt tokens per step while rows decode, whatever else the step computes."""

FIRST_PREFILL_TOKENS = 64
"""Size of the first chunk, before any chunk has been measured."""

CHUNK_BITS = 3
"""Significant bits of a chunk's size where time limits it: 64, 80, 96, 112, 128, 160, ... tokens. Recurring sizes reuse
compiled kernels, graphs and allocated buffers."""

MIN_FIXED_PARTS = 8
"""A further chunk of a step that does not complete its prompt takes at least this many times a forward's fixed time."""

TIMEOUT_PART = 0.25
"""Share of step_timeout_s that a chunk of MIN_PREFILL_TOKENS may be predicted to take; a slower one gets fewer
tokens."""


class Prefixes(Protocol):
    """Looks up cached prefixes of prompts, see core/prefix_cache/lookup.py."""

    def num_cached(self, row: Request) -> int:
        """Return how many tokens of a row's prompt are cached."""
        ...

    def source_of(self, row: Request) -> Request | None:
        """Return the first row of the prompt in progress that will soon cache a longer prefix of this row's prompt.

        The prefix is longer than what is cached now. Returns None without such a prompt.
        """
        ...

    def promise(self, rows: Sequence[Request]) -> bool:
        """Count the cached keys and values that the request will take over as the request's memory.

        Returns whether there are any.
        """
        ...

    def cancel(self, rows: Sequence[Request]) -> None:
        """Revoke `promise` for a request that is not admitted."""
        ...


class NoPrefixes:
    """An empty prefix cache."""

    def num_cached(self, row: Request) -> int:
        return 0

    def source_of(self, row: Request) -> Request | None:
        return None

    def promise(self, rows: Sequence[Request]) -> bool:
        return False

    def cancel(self, rows: Sequence[Request]) -> None:
        """Nothing was promised."""


class PrefillScheduler:
    """Holds the prompts in progress and chooses what to prefill in the current step.

    Args:
        config: The engine's configuration.
        costs: Predicts seconds; learns from `record`.
        budget: The memory budget.
        running: The decoding rows by row id; the scheduler's own mapping.
        evictable: Cached memory that may be evicted for larger chunks.
        prefixes: Looks up cached prefixes.
        has_bursts: Whether several prompts can be computed in one forward.
    """

    def __init__(
        self,
        config: EngineConfig,
        costs: CostModel,
        budget: MemoryBudget,
        running: Mapping[str, Request],
        evictable: Evictable,
        prefixes: Prefixes,
        has_bursts: bool,
    ):
        self.in_progress: list[Prefill] = []
        """In the order of their admission."""
        self.num_draft_tokens = 0
        """Draft tokens that each decoding row verifies in the current step."""
        self._config = config
        self._costs = costs
        self._budget = budget
        self._running = running
        self._evictable = evictable
        self._prefixes = prefixes
        self._has_bursts = has_bursts
        self._order = PrefillOrder(costs)
        self._step = StepBudget()

    @property
    def num_rows(self) -> int:
        """Rows of the prompts in progress."""
        return sum(len(prefill.rows) for prefill in self.in_progress)

    # The prompts in progress

    def add(self, entry: QueueEntry) -> None:
        """Begin the prompt of a request with reserved memory."""
        self.in_progress.append(Prefill(entry, self._prefixes.num_cached(entry.rows[0])))

    def remove(self, row: Request) -> None:
        """Remove one row; its prompt ends with the last of its rows."""
        prefill = self.of(row)
        prefill.rows.remove(row)
        if not prefill.rows:
            self.in_progress.remove(prefill)

    def complete(self, row: Request) -> QueueEntry:
        """Remove the computed prompt of a row and return its request."""
        prefill = self.of(row)
        self.in_progress.remove(prefill)
        return prefill.entry

    def of(self, row: Request) -> Prefill:
        """Return the prompt in progress of a row."""
        return next(prefill for prefill in self.in_progress if row in prefill.rows)

    def remaining_s(self, prefill: Prefill) -> float:
        """Predict the seconds until a prompt is complete when it is computed alone."""
        return self._order.remaining_s(prefill)

    def compute_alone(self, rows: Sequence[Request]) -> None:
        """Restart these rows' prompts, each in forwards of its own, after their shared forward has failed."""
        for row in rows:
            row.num_charged, row.num_prefilled = max(row.num_charged, row.num_prefilled), 0
            self.of(row).is_alone = True

    def wait_for_disk(self, rows: Sequence[Request]) -> None:
        """Skip this prompt for the rest of the step: its snapshot is still being read from disk."""
        for prefill in self.in_progress:
            prefill.is_waiting |= rows[0] in prefill.rows

    # The step

    def begin_step(self, num_draft_tokens: int) -> None:
        """Set the tokens and seconds that prefill may use in this step: decoding rows stall for at most max_stall_s."""
        self.num_draft_tokens = num_draft_tokens
        for prefill in self.in_progress:
            prefill.is_waiting = False
        config = self._config
        if not self._running:
            self._step = StepBudget(config.prefill_chunk_tokens, self._full_step_s)
            return
        left = config.prefill_chunk_tokens - len(self._running) * (num_draft_tokens + 1)
        num_tokens = max(MIN_PREFILL_TOKENS, min(config.prefill_chunk_tokens_busy, left))
        self._step = StepBudget(num_tokens, config.scheduler.max_stall_s)

    def end_step(self) -> None:
        """Compute no further chunk in this step."""
        self._step.close()

    def limit_step(self) -> None:
        """Limit the rest of this step to max_stall_s, because a row has joined the decode batch."""
        self._step.seconds = min(self._step.seconds, self._config.scheduler.max_stall_s)

    @property
    def has_started_step(self) -> bool:
        """Whether a chunk has been computed in this step."""
        return self._step.num_chunks > 0

    @property
    def is_step_over(self) -> bool:
        step = self._step
        return step.num_tokens <= 0 or (self.has_started_step and step.seconds <= 0)

    @property
    def fills_step(self) -> bool:
        """Whether the prompts in progress are predicted to use all remaining time of the step."""
        num_forwards_saved = max(0, sum(map(self._may_burst, self.in_progress)) - 1)
        seconds = sum(map(self.remaining_s, self.in_progress))
        return seconds - num_forwards_saved * self._costs.chunk_s(1, 0) >= self._step.seconds

    @property
    def _full_step_s(self) -> float:
        """Seconds of prefill in a step while no row decodes."""
        return min(max(FIXED_PARTS * self._costs.chunk_s(1, 0), MIN_IDLE_STEP_S), MAX_IDLE_STEP_S)

    # The next chunk

    def choose(self) -> Prefill | None:
        """Choose the next prompt to advance; None if none may advance in this step.

        The shortest of the most urgent prompts is chosen, or the prompt in progress that will soon cache its prefix.
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
        row, step = rows[0], self._step
        left = row.num_prompt_tokens - row.num_prefilled
        wanted = min(step.num_tokens, left)
        if (in_time := self._tokens_in_time(row.num_prefilled)) < wanted:
            wanted = _rounded_down(in_time)
        if wanted < left and step.num_chunks and not self._pays(wanted, row.num_prefilled):
            step.close()
            return 0
        self._budget.end_chunk()
        wanted = max(wanted, 1)
        num_tokens = self._budget.max_chunk(row, wanted)
        return num_tokens if num_tokens == wanted else self._enlarged_chunk(row, num_tokens, wanted)

    def _pays(self, num_tokens: int, start: int) -> bool:
        """Return whether a chunk is worth a forward in this step, rather than merging it with the next step's chunk."""
        is_long = self._costs.chunk_s(num_tokens, start) >= MIN_FIXED_PARTS * self._costs.chunk_s(1, start)
        return num_tokens >= MIN_PREFILL_TOKENS and is_long

    def image_blocks(self, image: ImageLeft) -> int:
        """Return how many vision tower blocks the image's next piece computes; 0 if the step ends before it."""
        step, block_s = self._step, self._costs.image_s(image.num_patches, 1 / image.depth)
        num_blocks = int(step.seconds / block_s)
        if not num_blocks and step.num_chunks:
            step.close()
            return 0
        return min(max(num_blocks, 1), image.num_blocks)

    def record(self, chunks: Sequence[PromptChunk], seconds: float, device_s: float) -> None:
        """Account for chunks that one forward has computed; each ended at its row's num_prefilled.

        Args:
            chunks: The chunks.
            seconds: Wall time of the forward, with snapshots and reservations.
            device_s: The same without earlier work that the device had to finish first.
        """
        longest = max(chunk.num_tokens for chunk in chunks)
        start = max(chunk.row.num_prefilled - chunk.num_tokens for chunk in chunks)
        self._step.use(sum(chunk.num_tokens for chunk in chunks), seconds)
        self._costs.record_chunk(longest, start, device_s, len(chunks))
        rows = {chunk.row.id for chunk in chunks}
        for prefill in self.in_progress:
            if prefill.rows[0].id in rows:
                self._order.record(prefill, seconds / len(chunks))

    def record_image(
        self, rows: Sequence[Request], image: ImageLeft, num_blocks: int, seconds: float, device_s: float
    ) -> None:
        """Account for a piece of an image of this prompt. seconds, device_s: see `record`."""
        prefill = self.of(rows[0])
        prefill.encoded_s += device_s
        self._step.use(0, seconds)
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
        num_tokens = self._costs.max_tokens(self._step.seconds, start)
        if num_tokens >= MIN_PREFILL_TOKENS or self._step.num_chunks:
            return num_tokens
        longest_s = TIMEOUT_PART * self._config.step_timeout_s
        return max(num_tokens, min(MIN_PREFILL_TOKENS, self._costs.max_tokens(longest_s, start)))

    def _enlarged_chunk(self, row: Request, num_tokens: int, wanted: int) -> int:
        """Return the size of this prompt's chunk, after evicting snapshots for a larger one if that saves time."""
        missing = self._budget.chunk_shortfall_bytes(row, wanted)
        start, end = row.num_prefilled, row.num_prompt_tokens
        saved_s = self._costs.prompt_s(start, end, num_tokens) - self._costs.prompt_s(start, end, wanted)
        if missing and self._evictable.price(missing) < saved_s and self._evictable.evict(missing):
            return self._budget.max_chunk(row, wanted)
        return num_tokens

    # Several prompts in one forward

    def companions(self, first: PromptChunk) -> list[Sequence[Request]]:
        """Return the rows of other prompts that may share a forward with this chunk, the shortest first.

        Their number is a prediction: until they begin, their cached prefixes may be evicted.
        """
        chosen = self.of(first.row)
        if not self._may_burst(chosen):
            return []
        others = [one for one in self._ready() if one is not chosen and self._may_burst(one)]
        for one in others:
            if not one.has_started:  # a longer prefix may be cached by now
                one.num_expected = self._prefixes.num_cached(one.rows[0])
        others.sort(key=lambda one: one.end - one.start)
        spans = [(mine := _span(first)), *(_expected_span(one, mine.num_left) for one in others)]
        num = num_together(spans, self._costs, self._step.num_tokens, self._step.seconds)
        return [tuple(one.rows) for one in others[: num - 1]]

    def burst(self, first: PromptChunk, others: Sequence[PromptChunk]) -> Sequence[PromptChunk]:
        """Choose which of these chunks are computed in one forward: `first`, and others while that saves time.

        Memory for the intermediate results stays reserved until the next chunk is chosen.
        """
        chunks = [first, *sorted(others, key=lambda chunk: chunk.num_tokens)]
        spans = [_span(chunk) for chunk in chunks]
        num = num_together(spans, self._costs, self._step.num_tokens, self._step.seconds)
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
        missing = self._budget.reserve_burst(rows, longest, end)
        one_by_one_s = sum(self._costs.chunk_s(span.num_tokens, span.start) for span in spans)
        if not missing or self._evictable.price(missing) > one_by_one_s - burst_s(spans, self._costs):
            return not missing
        return self._evictable.evict(missing) and not self._budget.reserve_burst(rows, longest, end)


def _rounded_down(num_tokens: int) -> int:
    """Return the largest size with CHUNK_BITS significant bits that is at most `num_tokens`."""
    shift = max(0, num_tokens.bit_length() - CHUNK_BITS)
    return num_tokens >> shift << shift


def _span(chunk: PromptChunk) -> Span:
    row = chunk.row
    return Span(chunk.num_tokens, row.num_prefilled, row.num_prompt_tokens - row.num_prefilled - chunk.num_tokens)


def _expected_span(prefill: Prefill, num_left: int) -> Span:
    """Predict the span of a prompt that has not begun, with a boundary `num_left` tokens before its end."""
    num_tokens = prefill.end - prefill.start
    num_left = min(num_left, num_tokens - 1)
    return Span(num_tokens - num_left, prefill.start, num_left)
