"""Which prompts in progress advance in a step: in which order, by how many tokens, and which share a forward. Pure."""

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
from engine.core.request_queue import Group

MIN_PREFILL_TOKENS = 16
"""A step computes at least so many prompt tokens, however much else there is to do."""

FIRST_PREFILL_TOKENS = 64
"""Size of the first chunk, before the pace of prefill is known."""

CHUNK_BITS = 3
"""Significant bits of a chunk's size where its time bounds it: 64, 80, 96, 112, 128, 160 .. tokens. A size that comes
again finds its kernels and graphs compiled, and its memory allocated."""

MIN_FIXED_PARTS = 8
"""A further chunk of a step that does not end its prompt takes at least so many times a forward's fixed time."""

TIMEOUT_PART = 0.25
"""Part of step_timeout_s that the smallest chunk may be predicted to take; beyond it a chunk has fewer tokens."""


class Prefixes(Protocol):
    """Answers which prefix of a prompt is cached, see core/prefix_cache/reuse.py."""

    def num_cached(self, row: Request) -> int:
        """Return how many tokens of a row's prompt the cache would serve."""
        ...

    def source_of(self, row: Request) -> Request | None:
        """Return the first row of the prompt in progress that will soon leave a longer prefix of this row's prompt in
        the cache than there is now, None without one."""
        ...

    def promise(self, rows: Sequence[Request]) -> bool:
        """Count what a request will take over from the cache as the request's; False if that is nothing."""
        ...

    def cancel(self, rows: Sequence[Request]) -> None:
        """Take back what was promised: the request is not admitted."""
        ...


class NoPrefixes:
    """Nothing is cached."""

    def num_cached(self, row: Request) -> int:
        return 0

    def source_of(self, row: Request) -> Request | None:
        return None

    def promise(self, rows: Sequence[Request]) -> bool:
        return False

    def cancel(self, rows: Sequence[Request]) -> None:
        """Nothing was promised."""


class PrefillScheduler:
    """Holds the prompts in progress and what prefill may still use of the present step.

    Args:
        running: the decoding rows by row id; the scheduler's own mapping.
        evictable: what may be evicted so that chunks are larger.
        has_bursts: whether several prompts can be computed in one forward.
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
        """In the order in which they were admitted."""
        self.num_draft_tokens = 0
        """Draft tokens that each decoding row verifies in the present step."""
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

    def add(self, group: Group) -> None:
        """Begin the prompt of a request whose memory is reserved."""
        self.in_progress.append(Prefill(group, self._prefixes.num_cached(group.rows[0])))

    def remove(self, row: Request) -> None:
        """Remove one row; its prompt ends with the last of its rows."""
        prefill = self.of(row)
        prefill.rows.remove(row)
        if not prefill.rows:
            self.in_progress.remove(prefill)

    def complete(self, row: Request) -> Group:
        """Remove the prompt of a row, which is computed, and return its request."""
        prefill = self.of(row)
        self.in_progress.remove(prefill)
        return prefill.entry

    def of(self, row: Request) -> Prefill:
        """Return the prompt in progress that a row shares."""
        return next(prefill for prefill in self.in_progress if row in prefill.rows)

    def remaining_s(self, prefill: Prefill) -> float:
        """Predict the seconds until a prompt is complete if it is computed alone."""
        return self._order.remaining_s(prefill)

    def compute_alone(self, rows: Sequence[Request]) -> None:
        """Begin the prompts of these rows anew, one after the other: a forward that they shared has failed."""
        for row in rows:
            row.num_charged, row.num_prefilled = max(row.num_charged, row.num_prefilled), 0
            self.of(row).is_alone = True

    def wait_for_disk(self, rows: Sequence[Request]) -> None:
        """Choose other prompts in this step: this one's snapshot is still being read from disk."""
        for prefill in self.in_progress:
            prefill.is_waiting |= rows[0] in prefill.rows

    # The step

    def begin_step(self, num_draft_tokens: int) -> None:
        """Set what prefill may use of this step: decoding rows come first, and wait no longer than max_stall_s."""
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
        """Leave no more than max_stall_s of this step: a row has joined the decode batch, and waits from now on."""
        self._step.seconds = min(self._step.seconds, self._config.scheduler.max_stall_s)

    @property
    def has_begun_step(self) -> bool:
        """Whether a chunk was computed in this step."""
        return self._step.num_chunks > 0

    @property
    def is_step_over(self) -> bool:
        step = self._step
        return step.num_tokens <= 0 or (self.has_begun_step and step.seconds <= 0)

    @property
    def fills_step(self) -> bool:
        """Whether the prompts in progress are predicted to take all of the step's time that is left."""
        num_forwards_saved = max(0, sum(map(self._may_burst, self.in_progress)) - 1)
        seconds = sum(map(self.remaining_s, self.in_progress))
        return seconds - num_forwards_saved * self._costs.chunk_s(1, 0) >= self._step.seconds

    @property
    def _full_step_s(self) -> float:
        """Seconds of prefill in a step while no row decodes."""
        return min(max(FIXED_PARTS * self._costs.chunk_s(1, 0), MIN_IDLE_STEP_S), MAX_IDLE_STEP_S)

    # The next chunk

    def choose(self) -> Prefill | None:
        """The next prompt to advance: of the most urgent ones the shortest, or the one that leaves its prefix."""
        if not (ready := self._ready()):
            return None
        chosen = self._order.choose(ready, self._full_step_s)
        if not chosen.has_begun and (source := self._prefixes.source_of(chosen.rows[0])) is not None:
            first = next((prefill for prefill in self.in_progress if source in prefill.rows), chosen)
            is_soon = self._order.images_s(first) <= self._order.remaining_s(chosen)
            return first if is_soon else chosen
        return chosen

    def chunk_tokens(self, rows: Sequence[Request]) -> int:
        """How many tokens the next chunk of this prompt may have; 0 when the step ends before it.

        The memory for the chunk's intermediate results stays reserved until the next call.
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
        """Whether a chunk is better computed in this step than together with the next one in the next step."""
        is_long = self._costs.chunk_s(num_tokens, start) >= MIN_FIXED_PARTS * self._costs.chunk_s(1, start)
        return num_tokens >= MIN_PREFILL_TOKENS and is_long

    def image_blocks(self, image: ImageLeft) -> int:
        """How many blocks of the vision tower the next piece of an image passes; 0 when the step ends before it."""
        step, block_s = self._step, self._costs.image_s(image.num_patches, 1 / image.depth)
        num_blocks = int(step.seconds / block_s)
        if not num_blocks and step.num_chunks:
            step.close()
            return 0
        return min(max(num_blocks, 1), image.num_blocks)

    def record(self, chunks: Sequence[PromptChunk], seconds: float, device_s: float) -> None:
        """Account for chunks that one forward has computed; each ended at its row's num_prefilled.

        Args:
            seconds: how long they took.
            device_s: the same without what the device had to do before them.
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
        """Account for a piece of an image of this prompt; see `record`."""
        prefill = self.of(rows[0])
        prefill.encoded_s += device_s
        self._step.use(0, seconds)
        self._order.record(prefill, seconds)
        self._costs.record_image(image.num_patches, num_blocks / image.depth, device_s)

    def _ready(self) -> list[Prefill]:
        """Prompts in progress, in the order of their admission, that may advance now: the most urgent ones."""
        ready = [prefill for prefill in self.in_progress if not prefill.is_waiting]
        if self._config.scheduler.policy == "priority":
            ready = [one for one in ready if not any(other.entry.is_before(one.entry) for other in ready)]
        return ready

    def _tokens_in_time(self, start: int) -> int:
        """How many tokens behind `start` fit into the time that is left of the step."""
        if not self._costs.is_measured:
            return FIRST_PREFILL_TOKENS
        num_tokens = self._costs.max_tokens(self._step.seconds, start)
        if num_tokens >= MIN_PREFILL_TOKENS or self._step.num_chunks:
            return num_tokens
        longest_s = TIMEOUT_PART * self._config.step_timeout_s
        return max(num_tokens, min(MIN_PREFILL_TOKENS, self._costs.max_tokens(longest_s, start)))

    def _enlarged_chunk(self, row: Request, num_tokens: int, wanted: int) -> int:
        """Evict snapshots so that the chunks of this prompt may be larger, if that saves more time than it costs."""
        missing = self._budget.chunk_shortfall_bytes(row, wanted)
        start, end = row.num_prefilled, row.num_prompt_tokens
        saved_s = self._costs.prompt_s(start, end, num_tokens) - self._costs.prompt_s(start, end, wanted)
        if missing and self._evictable.price(missing) < saved_s and self._evictable.free(missing):
            return self._budget.max_chunk(row, wanted)
        return num_tokens

    # Several prompts in one forward

    def companions(self, first: PromptChunk) -> list[Sequence[Request]]:
        """Rows of other prompts that may be computed in one forward with this chunk, the shortest first.

        How many is predicted: those that have not begun may begin behind a snapshot that is evicted meanwhile.
        """
        chosen = self.of(first.row)
        if not self._may_burst(chosen):
            return []
        others = [one for one in self._ready() if one is not chosen and self._may_burst(one)]
        for one in others:
            if not one.has_begun:  # the cache may have more of it by now
                one.num_expected = self._prefixes.num_cached(one.rows[0])
        others.sort(key=lambda one: one.end - one.start)
        spans = [(mine := _span(first)), *(_expected_span(one, mine.num_left) for one in others)]
        num = num_together(spans, self._costs, self._step.num_tokens, self._step.seconds)
        return [tuple(one.rows) for one in others[: num - 1]]

    def burst(self, first: PromptChunk, others: Sequence[PromptChunk]) -> Sequence[PromptChunk]:
        """Choose which of these chunks are computed in one forward: `first`, and others as long as that saves time.

        The memory for the intermediate results stays reserved until the next chunk is chosen.
        """
        chunks = [first, *sorted(others, key=lambda chunk: chunk.num_tokens)]
        spans = [_span(chunk) for chunk in chunks]
        num = num_together(spans, self._costs, self._step.num_tokens, self._step.seconds)
        while num > 1 and not self._has_reserved_burst(chunks[:num], spans[:num]):
            num -= 1
        return chunks[:num]

    def _may_burst(self, prefill: Prefill) -> bool:
        """Whether the prompt may share a forward: it waits neither for the disk nor for the prefix of another one."""
        if not self._has_bursts or prefill.is_alone or not may_burst(prefill.rows):
            return False
        return prefill.has_begun or self._prefixes.source_of(prefill.rows[0]) is None

    def _has_reserved_burst(self, chunks: Sequence[PromptChunk], spans: Sequence[Span]) -> bool:
        """Reserve memory for the forward, evicting snapshots where that costs less time than the forward saves."""
        rows, longest = [chunk.row for chunk in chunks], max(span.num_tokens for span in spans)
        end = longest + max(span.start for span in spans)
        missing = self._budget.reserve_burst(rows, longest, end)
        one_by_one_s = sum(self._costs.chunk_s(span.num_tokens, span.start) for span in spans)
        if not missing or self._evictable.price(missing) > one_by_one_s - burst_s(spans, self._costs):
            return not missing
        return self._evictable.free(missing) and not self._budget.reserve_burst(rows, longest, end)


def _rounded_down(num_tokens: int) -> int:
    """The next smaller size of a chunk, of those with CHUNK_BITS significant bits."""
    shift = max(0, num_tokens.bit_length() - CHUNK_BITS)
    return num_tokens >> shift << shift


def _span(chunk: PromptChunk) -> Span:
    row = chunk.row
    return Span(chunk.num_tokens, row.num_prefilled, row.num_prompt_tokens - row.num_prefilled - chunk.num_tokens)


def _expected_span(prefill: Prefill, num_left: int) -> Span:
    """Predict the span of a prompt that has not begun: a boundary is expected `num_left` tokens before its end."""
    num_tokens = prefill.end - prefill.start
    num_left = min(num_left, num_tokens - 1)
    return Span(num_tokens - num_left, prefill.start, num_left)
