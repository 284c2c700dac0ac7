"""Which prompts in progress advance in a step: order, chunk sizes, and which prompts share a forward. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from engine.core.burst import Span, burst_s, may_burst, num_together
from engine.core.prompt import Prompt
from engine.core.row import Row
from engine.core.runner import PLAIN, Drafts, ImageLeft, PromptChunk
from engine.core.scheduler_context import SchedulerContext

MIN_IDLE_STEP_S, MAX_IDLE_STEP_S = 0.25, 1.5
"""Bounds in seconds of a step's prefill time while no row decodes: new requests and aborts wait for the end of the
step."""

IDLE_STEP_FIXED_COSTS = 20
"""Within these bounds an idle step lasts this many fixed costs of a forward, so that these are 5 % of it."""

MIN_PREFILL_TOKENS = 16
"""Fewest prompt tokens per step while rows decode, whatever else the step computes."""

FIRST_PREFILL_TOKENS = 64
"""Size of the first chunk, before any chunk has been measured."""

CHUNK_BITS = 3
"""Significant bits of a chunk's size where time limits it: 64, 80, 96, 112, 128, 160, ... tokens. Recurring sizes reuse
compiled kernels, graphs and allocated buffers."""

MIN_CHUNK_FIXED_COSTS = 8
"""A step does not end with a small chunk: one that takes fewer fixed costs of a forward than this waits for the next
step, which may compute it in a larger chunk, unless it completes its prompt or is the first of the step."""

TIMEOUT_PART = 0.25
"""Share of step_timeout_s that a chunk of MIN_PREFILL_TOKENS may be predicted to take; a slower one gets fewer
tokens."""

OLDEST_SHARE = 1 / 3
"""Share of the prefill time that the oldest prompt in progress gets while shorter ones are computed first."""

OLDEST_PER_OTHER_S = OLDEST_SHARE / (1 - OLDEST_SHARE)
"""Seconds that the oldest prompt in progress gets per second of shorter ones."""


@dataclass(slots=True)
class StepBudget:
    """Tokens and seconds that prefill may still use in the current step."""

    num_tokens: int = 0
    seconds: float = 0.0
    num_chunks: int = 0
    """Chunks computed in this step."""

    @property
    def has_started(self) -> bool:
        """Whether a chunk has been computed in this step."""
        return self.num_chunks > 0

    @property
    def is_over(self) -> bool:
        """Whether no further chunk may be computed in this step; the first one ignores the time."""
        return self.num_tokens <= 0 or (self.has_started and self.seconds <= 0)

    def use(self, num_tokens: int, seconds: float) -> None:
        """Account for one chunk or piece of an image."""
        self.num_tokens -= num_tokens
        self.seconds -= seconds
        self.num_chunks += 1

    def limit(self, seconds: float) -> None:
        """Limit the remaining time."""
        self.seconds = min(self.seconds, seconds)

    def close(self) -> None:
        """Allow no further chunk."""
        self.num_tokens = 0


class PrefillScheduler:
    """Chooses what to prefill in the current step.

    Args:
        context: Configuration, clock, cost model, memory budget, evictable memory and prefix lookup.
        running: The decoding rows by row id; the scheduler's own mapping.

    Attributes:
        in_progress: The prompts in progress, in the order of their admission.
        step: What prefill may still use in the current step.
        drafts: The drafts that each decoding row verifies in the current step.
        total_s: Seconds that the engine has spent on prompts.
    """

    def __init__(self, context: SchedulerContext, running: Mapping[str, Row]):
        self.in_progress: list[Prompt] = []
        self.step = StepBudget()
        self.drafts = PLAIN
        self.total_s = 0.0
        self._config = context.config
        self._costs = context.costs
        self._budget = context.budget
        self._evictable = context.evictable
        self._prefixes = context.prefixes
        self._has_bursts = context.has_bursts
        self._whole_image_token = context.whole_image_token
        self._whole_prompts = context.whole_prompts
        self._running = running
        self._owed_s = 0.0  # what the oldest prompt is owed of the time
        self._oldest: Prompt | None = None

    @property
    def num_rows(self) -> int:
        """Rows of the prompts in progress."""
        return sum(len(prompt.rows) for prompt in self.in_progress)

    @property
    def num_free_rows(self) -> int:
        """Rows that neither decode nor belong to a prompt in progress."""
        return self._config.max_running - len(self._running) - self.num_rows

    def add(self, prompt: Prompt) -> None:
        """Begin a prompt with reserved memory."""
        prompt.num_expected = self._prefixes.num_cached(prompt.row)
        self.in_progress.append(prompt)

    def remove(self, row: Row) -> None:
        """Remove one row; its prompt ends with the last of its rows."""
        row.prompt.rows.remove(row)
        if not row.prompt.rows:
            self.in_progress.remove(row.prompt)

    def remaining_s(self, prompt: Prompt) -> float:
        """Predict the seconds until a prompt is complete when it is computed alone."""
        return self._costs.prompt_s(prompt.start, prompt.end) + self.images_s(prompt)

    def images_s(self, prompt: Prompt) -> float:
        """Predict the seconds until a prompt's images are encoded; its first chunk follows them."""
        return max(0.0, sum(map(self._costs.image_s, prompt.patch_counts)) - prompt.encoded_s)

    def source_of(self, prompt: Prompt) -> Prompt | None:
        """Return the prompt in progress that will soon cache a longer prefix of this one than is cached now."""
        return self._prefixes.source_of(prompt, self.in_progress)

    def begin_step(self, drafts: Drafts) -> None:
        """Set the tokens and seconds that prefill may use in this step: decoding rows stall for at most max_stall_s."""
        self.drafts = drafts
        self._budget.release_chunk()
        for prompt in self.in_progress:
            prompt.is_waiting = False
        config = self._config
        if not self._running:
            self.step = StepBudget(config.prefill_chunk_tokens, self._full_step_s)
            return
        left = config.prefill_chunk_tokens - len(self._running) * (drafts.num_tokens + 1)
        busy_tokens = self._costs.busy_tokens(config.prefill_chunk_tokens_busy)
        num_tokens = max(MIN_PREFILL_TOKENS, min(busy_tokens, left))
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
        return min(max(IDLE_STEP_FIXED_COSTS * self._costs.chunk_s(1, 0), MIN_IDLE_STEP_S), MAX_IDLE_STEP_S)

    # The next chunk

    def choose(self) -> Prompt | None:
        """Choose the next prompt to advance; None if none may advance in this step.

        Among the most urgent prompts it is the one with the fewest seconds left, or the oldest when its share of the
        time is due. If that prompt has not begun, and another prompt in progress will soon cache a
        prefix of it, the other one advances instead.
        """
        if not (ready := self._ready()):
            return None
        chosen = self._shortest_or_oldest(ready, self._full_step_s)
        if not chosen.has_started and (source := self.source_of(chosen)) is not None:
            is_soon = self.images_s(source) <= self.remaining_s(chosen)
            return source if is_soon else chosen
        return chosen

    def chunk_tokens(self, prompt: Prompt) -> int:
        """Return the number of tokens of this prompt's next chunk; 0 if the step ends before it.

        Memory for the chunk's intermediate results stays reserved until the next call.
        """
        step, left = self.step, prompt.num_left
        wanted = min(step.num_tokens, left)
        if (in_time := self._tokens_in_time(prompt.num_prefilled)) < wanted:
            wanted = _rounded_down(in_time)
        if wanted < left and step.has_started:  # the next step could compute these tokens in a larger chunk
            min_s = MIN_CHUNK_FIXED_COSTS * self._costs.chunk_s(1, prompt.num_prefilled)
            is_short = wanted < MIN_PREFILL_TOKENS or self._costs.chunk_s(wanted, prompt.num_prefilled) < min_s
            if is_short or (self._whole_prompts and self._undivided(prompt, wanted) > wanted):
                step.close()
                return 0
        self._budget.release_chunk()
        wanted = self._undivided(prompt, max(wanted, 1))
        num_tokens = self._budget.reserve_chunk(prompt, wanted)
        if num_tokens < wanted:
            num_tokens = self._enlarged_chunk(prompt, num_tokens, wanted)
        if (whole := self._undivided(prompt, num_tokens)) > num_tokens:  # memory for it is reserved (least_chunk)
            self._budget.reserve_chunk(prompt, whole, least=whole)
        return whole

    def image_blocks(self, image: ImageLeft) -> int:
        """Return how many vision tower blocks the image's next piece computes; 0 if the step ends before it."""
        step, block_s = self.step, self._costs.image_s(image.num_patches, 1 / image.depth)
        num_blocks = int(step.seconds / block_s)
        if not num_blocks and step.has_started:
            step.close()
            return 0
        return min(max(num_blocks, 1), image.num_blocks)

    def note(self, chunks: Sequence[PromptChunk], seconds: float) -> None:
        """Note a forward in the timelines of its rows, before they take its output.

        Args:
            chunks: The chunks.
            seconds: Wall time of the forward; in a forward of several prompts each gets the same share.
        """
        self.total_s += seconds
        for chunk in chunks:
            for row in chunk.prompt.rows:
                row.record.computed(chunk.num_tokens, seconds / len(chunks))

    def record(self, chunks: Sequence[PromptChunk], seconds: float, device_s: float) -> None:
        """Account for chunks that one forward has computed; each ended at its prompt's num_prefilled.

        Args:
            chunks: The chunks.
            seconds: Wall time of the forward, with snapshots and reservations.
            device_s: The same without earlier work that the device had to finish first.
        """
        longest = max(chunk.num_tokens for chunk in chunks)
        start = max(chunk.prompt.num_prefilled - chunk.num_tokens for chunk in chunks)
        self.step.use(sum(chunk.num_tokens for chunk in chunks), seconds)
        self._costs.record_chunk(longest, start, device_s, len(chunks))
        computed = [chunk.prompt for chunk in chunks]
        for prompt in self.in_progress:
            if prompt in computed:
                self._record_share(prompt, seconds / len(chunks))

    def record_image(self, prompt: Prompt, image: ImageLeft, num_blocks: int, seconds: float, device_s: float) -> None:
        """Account for a piece of an image of this prompt. seconds, device_s: see `record`."""
        prompt.encoded_s += device_s
        self.total_s += seconds
        for row in prompt.rows:
            row.record.encoded(image.num_patches, seconds, is_new=image.num_blocks == image.depth)
        self.step.use(0, seconds)
        self._record_share(prompt, seconds)
        self._costs.record_image(image.num_patches, num_blocks / image.depth, device_s)

    def _undivided(self, prompt: Prompt, num_tokens: int) -> int:
        """Return the size of a chunk that divides no prompt, or no image, where the model forbids it.

        Tokens of the answer that are computed again are no part of what must not be divided.
        """
        if self._whole_prompts:
            return max(num_tokens, prompt.row.num_input_tokens - prompt.num_prefilled)
        if self._whole_image_token is None or not prompt.row.spec.images:
            return num_tokens
        return undivided(prompt, num_tokens, self._whole_image_token)

    def _ready(self) -> list[Prompt]:
        """Return the most urgent prompts that may advance now, in the order of their admission."""
        ready = [prompt for prompt in self.in_progress if not prompt.is_waiting]
        if self._config.scheduler.policy == "priority":
            ready = [one for one in ready if not any(other.is_before(one) for other in ready)]
        return ready

    def _shortest_or_oldest(self, prompts: Sequence[Prompt], chunk_s: float) -> Prompt:
        """Choose among prompts of equal priority, given in the order of their admission.

        Args:
            prompts: At least one prompt in progress.
            chunk_s: Seconds of a chunk. The oldest prompt is chosen once it is owed this much, unless the shortest
                prompt needs less than this.
        """
        oldest = prompts[0]
        if oldest is not self._oldest:
            self._oldest, self._owed_s = oldest, 0.0
        shortest = min(prompts, key=self.remaining_s)
        if shortest is not oldest and self._owed_s >= chunk_s and self.remaining_s(shortest) > chunk_s:
            return oldest
        return shortest

    def _record_share(self, prompt: Prompt, seconds: float) -> None:
        """Account for seconds spent on this prompt, of which the oldest one is owed its share."""
        if prompt is self._oldest:
            self._owed_s = max(0.0, self._owed_s - seconds)
        elif self._oldest is not None:
            self._owed_s += seconds * OLDEST_PER_OTHER_S

    def _tokens_in_time(self, start: int) -> int:
        """Return how many tokens after `start` fit into the remaining time of the step."""
        if not self._costs.is_measured:
            return FIRST_PREFILL_TOKENS
        num_tokens = self._costs.max_tokens(self.step.seconds, start)
        if num_tokens >= MIN_PREFILL_TOKENS or self.step.has_started:
            return num_tokens
        longest_s = TIMEOUT_PART * self._config.step_timeout_s
        return max(num_tokens, min(MIN_PREFILL_TOKENS, self._costs.max_tokens(longest_s, start)))

    def _enlarged_chunk(self, prompt: Prompt, num_tokens: int, wanted: int) -> int:
        """Return the size of this prompt's chunk, after evicting snapshots for a larger one if that saves time."""
        missing = self._budget.chunk_shortfall_bytes(prompt, wanted)
        start, end = prompt.num_prefilled, prompt.end
        saved_s = self._costs.prompt_s(start, end, num_tokens) - self._costs.prompt_s(start, end, wanted)
        if missing and self._evictable.price(missing) < saved_s and self._evictable.evict(missing):
            return self._budget.reserve_chunk(prompt, wanted)
        return num_tokens

    # Several prompts in one forward

    def companions(self, first: PromptChunk) -> list[Prompt]:
        """Return other prompts that may share a forward with this chunk, the shortest first.

        Their number is a prediction: until they begin, their cached prefixes may be evicted.
        """
        chosen = first.prompt
        if not self._may_burst(chosen):
            return []
        others = [one for one in self._ready() if one is not chosen and self._may_burst(one)]
        for one in others:
            if not one.has_started:  # a longer prefix may be cached by now
                one.num_expected = self._prefixes.num_cached(one.row)
        others.sort(key=lambda one: one.end - one.start)
        spans = [(mine := _span(first)), *(_expected_span(one, mine.num_left) for one in others)]
        num = num_together(spans, self._costs, self.step.num_tokens, self.step.seconds)
        return others[: num - 1]

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

    def compute_alone(self, prompts: Sequence[Prompt]) -> None:
        """Begin these prompts anew, each in forwards of its own, after their shared forward has failed."""
        for prompt in prompts:
            for row in prompt.rows:
                row.num_charged = max(row.num_charged, prompt.num_prefilled)
            prompt.is_alone, prompt.num_prefilled = True, 0

    def _may_burst(self, prompt: Prompt) -> bool:
        """Return whether the prompt may share a forward now: it must not wait for another prompt's prefix."""
        if not self._has_bursts or prompt.is_alone or not may_burst(prompt, self._whole_prompts):
            return False
        return prompt.has_started or self.source_of(prompt) is None

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


def undivided(prompt: Prompt, num_tokens: int, image_token_id: int) -> int:
    """Return the size of a prompt's next chunk that divides no run of image tokens, which see each other.

    Args:
        prompt: The prompt.
        num_tokens: Wanted size.
        image_token_id: See ModelRunner.

    Returns:
        `num_tokens` if they end outside of a run; else the tokens before that run; if there are none, the whole run.
    """
    spec, start = prompt.row.spec, prompt.num_prefilled
    ids = spec.token_ids if spec.sparse is None else spec.token_ids[spec.sparse.positions]
    end = start + num_tokens
    if end >= len(ids) or not (ids[end - 1] == ids[end] == image_token_id):
        return num_tokens
    others = np.flatnonzero(ids != image_token_id)
    behind = int(np.searchsorted(others, end))
    begin = int(others[behind - 1]) + 1 if behind else 0
    if begin > start:
        return begin - start
    return (int(others[behind]) if behind < len(others) else len(ids)) - start


def _span(chunk: PromptChunk) -> Span:
    prompt = chunk.prompt
    return Span(chunk.num_tokens, prompt.num_prefilled, prompt.num_left - chunk.num_tokens)


def _expected_span(prompt: Prompt, num_left: int) -> Span:
    """Predict the span of a prompt that has not begun, with a boundary `num_left` tokens before its end."""
    num_tokens = prompt.end - prompt.start
    num_left = min(num_left, num_tokens - 1)
    return Span(num_tokens - num_left, prompt.start, num_left)
