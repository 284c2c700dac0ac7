"""MemoryNeeds: the bytes that a prompt and its rows need, before anything is reserved for it. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine.core.memory.costs import MemoryCosts
from engine.core.row import Row, RowState, by_prompt
from engine.errors import MemoryExceeded
from engine.protocol import EngineRequest

MAX_STEP_SHARE = 0.25
"""Largest share of `request_bytes` for the intermediate results of one chunk: late in long prompts chunks become
smaller."""

MIN_CHUNK_TOKENS = 16


@dataclass(frozen=True)
class MemoryNeed:
    """The memory need of a prompt and its rows."""

    num_rows: int  # One row per choice.
    num_prompt: int  # Prompt tokens of each row.
    num_tokens: int  # Prompt tokens and reserved answer tokens of each row.
    sampling_bytes: int = 0  # Per row, for the sampling parameters that it uses.
    image_bytes: int = 0  # Kept of its images during prefill, between their pieces and as features.
    image_step_bytes: int = 0  # Intermediate results of encoding its largest image.
    least_chunk: int = MIN_CHUNK_TOKENS  # Tokens of the smallest chunk that it may have to be computed in.


@dataclass(slots=True, eq=False)
class PrefillReservation:
    """Memory reserved for a prompt in progress in addition to its rows."""

    row_ids: set[str]
    """The rows that share the prompt."""
    cache_bytes: int
    """Its images, and a cache that several rows copy. The cache of a single row moves to the decode batch layer by
    layer."""
    min_step_bytes: int
    """Intermediate results of its smallest chunk or its largest image."""
    step_bytes: int
    """Intermediate results of its current chunk."""


class MemoryNeeds:
    """Adds up the bytes of prompts and rows, and compares them with the limit.

    Args:
        costs: Bytes of rows, prompts and images.
        limit_bytes: Memory of the engine, weights included.
        reserve_tokens: See MemoryConfig.reserve_tokens.
        whole_images: See ModelRunner.whole_images.
        whole_prompts: Whether each prompt is one chunk, see ModelRunner.whole_prompts.
    """

    def __init__(
        self,
        costs: MemoryCosts,
        limit_bytes: int,
        reserve_tokens: int,
        whole_images: bool = False,
        whole_prompts: bool = False,
    ):
        self.costs = costs
        self._whole_images = whole_images
        self._whole_prompts = whole_prompts
        self.limit_bytes = limit_bytes
        self._reserve_tokens = reserve_tokens

    @property
    def request_bytes(self) -> int:
        """Bytes that requests and caches share."""
        return self.limit_bytes - self.costs.base_bytes

    @property
    def step_limit_bytes(self) -> float:
        """Most bytes for the intermediate results of one chunk."""
        return MAX_STEP_SHARE * self.request_bytes

    def need(self, rows: Sequence[Row], whole: bool = False) -> MemoryNeed:
        """Return the memory need of the rows that share a prompt, and of the prompt.

        Args:
            rows: The rows that share the prompt.
            whole: Whether to reserve the whole answer instead of `reserve_tokens`, which each preemption by growth
                doubles: with the same reserve the row would soon be preempted again.
        """
        row, images, costs = rows[0], rows[0].spec.images, self.costs
        left = row.num_tokens_left
        answer = left if whole else min(left, self._reserve_tokens << row.num_growth_preemptions)
        return MemoryNeed(
            len(rows),
            row.num_tokens,
            row.num_tokens + answer + costs.overshoot,
            costs.sampling(row),
            sum(costs.kept_image(len(image.patches), image.num_tokens) for image in images),
            max((costs.image(len(image.patches)) for image in images), default=0),
            max(
                self._least_chunk(row.num_input_tokens),
                *(image.num_tokens for image in images if self._whole_images),
                MIN_CHUNK_TOKENS,
            ),
        )

    def _least_chunk(self, num_prompt: int) -> int:
        return num_prompt if self._whole_prompts else MIN_CHUNK_TOKENS

    def min_bytes(self, need: MemoryNeed) -> int:
        """Return the least bytes that a prompt and its rows need, with no other row in the engine.

        This covers prefilling all of it again at the end of its answer, in case it is preempted there and its state is
        lost. A prompt that needs more than `request_bytes` can never run.
        """
        end, sizes = need.num_tokens, [(need.num_rows, self.costs.slots(need.num_tokens))]
        reservation = self.prefill_reservation(need, chunk_tokens=0, end=end)
        return self.total_bytes(sizes, [reservation], need.num_rows * need.sampling_bytes)

    def max_row_tokens(self, pinned_bytes: int = 0) -> int:
        """Return the tokens of the longest row that fits with no other row, when nearly all of it is prompt."""
        overshoot, room = self.costs.overshoot, self.request_bytes - pinned_bytes

        def longest(num_tokens: int) -> MemoryNeed:
            return MemoryNeed(1, num_tokens, num_tokens + overshoot, least_chunk=self._least_chunk(num_tokens))

        return largest(0, 2**24, lambda n: self.min_bytes(longest(n)) <= room)

    def max_answer_tokens(self, need: MemoryNeed, num_tokens: int, limit: int) -> int:
        """Return how many of `num_tokens` answer tokens fit after the prompt into `limit` bytes; 0 if none does."""
        overshoot = self.costs.overshoot
        return largest(
            0,
            num_tokens,
            lambda n: self.min_bytes(replace(need, num_tokens=need.num_prompt + n + overshoot)) <= limit,
        )

    def clamp_max_tokens(self, request: EngineRequest, pinned_bytes: int) -> EngineRequest:
        """Lower max_tokens, which is a ceiling, to what the memory holds. Safe to call from any thread.

        Args:
            request: The request, before it is queued.
            pinned_bytes: Bytes that are never evicted, see CoreFigures.pinned_bytes.

        Raises:
            MemoryExceeded: The request would not fit even with no other request in the engine.
        """
        limit, max_tokens = self.request_bytes - pinned_bytes, request.sampling.max_tokens
        rows = [Row(request, index) for index in request.open_choices]
        longest = max(len(row.output_token_ids) for row in rows)
        for sharing in by_prompt(rows):  # each is prefilled, and may run, without the others
            whole, num_before = self.need(sharing, whole=True), len(sharing[0].output_token_ids)
            if self.min_bytes(whole) <= limit:
                continue
            num_left = request.sampling.max_tokens - num_before
            num_fitting = 0 if request.pooling else self.max_answer_tokens(whole, num_left, limit)
            max_tokens = min(max_tokens, num_before + num_fitting)
            if max_tokens <= longest:
                num_tokens, num_bytes = self.max_row_tokens(pinned_bytes), self.min_bytes(whole)
                raise MemoryExceeded(whole.num_prompt, num_left, num_tokens, num_bytes, limit)
        if max_tokens == request.sampling.max_tokens:
            return request
        return replace(request, sampling=replace(request.sampling, max_tokens=max_tokens))

    def grown_slots(self, row: Row, slots: int, num_tokens: int) -> int:
        """Return a row's reserved slots after it has generated `num_tokens` more tokens, see MemoryBudget.extend."""
        left = row.num_tokens_left
        end = row.num_tokens + min(num_tokens, left) + self.costs.overshoot
        if not num_tokens or end <= slots or row.state is not RowState.RUNNING:
            return slots
        reserve = max(1, self._reserve_tokens << row.num_growth_preemptions)
        grown = slots + -(-(end - slots) // reserve) * reserve
        return self.costs.slots(min(grown, row.num_tokens + left + self.costs.overshoot))

    def prefill_reservation(self, need: MemoryNeed, chunk_tokens: int, end: int) -> PrefillReservation:
        """Return the reservation of a prompt that has not begun.

        Args:
            need: The prompt's need.
            chunk_tokens: Tokens of the chunk that must fit, beyond the smallest one.
            end: Prompt tokens at the end of that chunk.
        """
        costs, num_tokens = self.costs, need.num_prompt
        smallest = costs.chunk(min(end, need.least_chunk), end)
        wanted = costs.chunk(min(num_tokens, chunk_tokens), end)
        step = max(smallest, min(wanted, int(self.step_limit_bytes)), need.image_step_bytes)
        shared_bytes = 0 if need.num_rows == 1 else costs.prompt(num_tokens)
        return PrefillReservation(set(), need.image_bytes + shared_bytes, step, step)

    def row_bytes(self, groups: Sequence[tuple[int, int]], sampling: int) -> int:
        """Return the bytes of all rows, given as (rows, slots) of each decode group."""
        return sum(self.costs.rows(*group) for group in groups) + sampling

    def total_bytes(
        self, groups: Sequence[tuple[int, int]], prefills: Sequence[PrefillReservation], sampling: int
    ) -> int:
        """Return the bytes of all rows and prefills.

        Only one group is rebuilt at a time, layer by layer, and only one chunk is computed at a time.

        Args:
            groups: (rows, slots) of each decode group.
            prefills: Reservations of the prompts in progress.
            sampling: Bytes for the rows' sampling parameters.
        """
        rebuilt = max((self.costs.layer(*group) for group in groups), default=0)
        cache_bytes = sum(one.cache_bytes for one in prefills)
        return self.row_bytes(groups, sampling) + cache_bytes + max(rebuilt, step_bytes(prefills))


def step_bytes(prefills: Sequence[PrefillReservation]) -> int:
    """Return the bytes reserved for intermediate results: only one chunk is computed at a time."""
    return max((one.step_bytes for one in prefills), default=0)


def largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """Return the largest value from low to high that fits; `fits` is monotonic, and low is assumed to fit."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
