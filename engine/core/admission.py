"""The books of the memory: what every row will need is reserved, in bytes, before it starts. Pure.

A row reserves the slots that its prompt and (at most `reserve_tokens` of) its answer take, and more while it grows
beyond that. Rows that decode together share a rectangle: each takes the slots of the longest. So which rows share one
is decided here, where it is paid for. While a prompt is taken in, its own cache and the intermediate results of a chunk
come on top; afterwards they are given back. What the prefix cache holds counts as it is, and leaves when a row needs
the room.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Protocol

from engine.config import EngineConfig
from engine.core.request import Request
from engine.protocol import EngineFailed

MAX_WASTE_SHARE = 0.125
"""Of what all requests may use, for slots of rectangles that no row has asked for."""

MAX_STEP_SHARE = 0.25
"""Of the same, for the intermediate results of one chunk of a prompt: behind long prompts chunks become smaller."""

MIN_CHUNK_TOKENS = 16

HEADROOM_SHARE, MAX_HEADROOM = 0.125, 8 * 2**30
"""Of the limit, what is kept free where the configuration does not say."""

MIN_ROW_TOKENS = 16
"""An engine whose memory holds no longer row does not start."""


@dataclass(frozen=True)
class MemoryCosts:
    """Bytes, measured at the start where no formula holds on every device (worker/memory_costs.py).

    base_bytes: weights, and all else that is there without any request. token_bytes: one slot of one row, in all
    attention layers, the MTP head's included; state_bytes: of a row, its recurrent states; layer_share: of a row, its
    largest layer: rectangles are rebuilt layer by layer. snapshot_slack: by which a snapshot's buffers may be larger
    than its arrays. slots_step: slots come in so many. overshoot: tokens that
    may be computed behind a row's last.
    row_step_bytes, slot_step_bytes: intermediate results of a decode step, per row, and per slot of a row.
    feed_bytes: of a token that the MTP head has not read yet, of which at most feed_tokens wait.
    chunk_bytes + token_step_bytes * tokens + pair_bytes * tokens * (the prompt up to its end): of a chunk of a prompt,
    where attention looks at no more than max_queries tokens at once.
    image_bytes + patch_bytes * patches + patch_pair_bytes * patches ** 2: of one picture; image_token_bytes: of one
    placeholder, as long as its prompt is taken in.
    """

    base_bytes: int = 0
    token_bytes: int = 0
    state_bytes: int = 0
    layer_share: float = 1.0
    snapshot_slack: int = 0
    slots_step: int = 1
    overshoot: int = 0
    row_step_bytes: int = 0
    slot_step_bytes: float = 0.0
    feed_bytes: int = 0
    feed_tokens: int = 0
    chunk_bytes: int = 0
    token_step_bytes: float = 0.0
    pair_bytes: float = 0.0
    max_queries: int = 2**31
    image_bytes: int = 0
    patch_bytes: float = 0.0
    patch_pair_bytes: float = 0.0
    image_token_bytes: int = 0

    def slots(self, num_tokens: int) -> int:
        return -(-num_tokens // self.slots_step) * self.slots_step

    def rows(self, num_rows: int, slots: int) -> int:
        """A rectangle, and what its rows need in a step."""
        per_slot = self.token_bytes + self.slot_step_bytes
        waiting = min(slots, self.feed_tokens) * self.feed_bytes
        return int(num_rows * (slots * per_slot + self.state_bytes + self.row_step_bytes + waiting))

    def layer(self, num_rows: int, slots: int) -> int:
        """The largest layer of a rectangle, which is there twice while it is rebuilt."""
        return int(num_rows * (slots * self.token_bytes + self.state_bytes) * self.layer_share)

    def prompt(self, num_tokens: int) -> int:
        """The cache of a prompt in progress."""
        return self.slots(num_tokens) * self.token_bytes + self.state_bytes

    def chunk(self, num_tokens: int, end: int) -> int:
        """The intermediate results of so many tokens of a prompt, the last of which is its `end`-th."""
        num_pairs = min(num_tokens, self.max_queries) * end
        return int(self.chunk_bytes + num_tokens * self.token_step_bytes + num_pairs * self.pair_bytes)

    def image(self, num_patches: int) -> int:
        return int(self.image_bytes + num_patches * (self.patch_bytes + self.patch_pair_bytes * num_patches))


class Runner(Protocol):
    """What the books need to know of core.batch.ModelRunner."""

    costs: MemoryCosts
    memory_limit_bytes: int


@dataclass(frozen=True)
class Need:
    """What a request asks for: num_rows rows of num_tokens, the first num_prompt of which are the prompt.

    image_bytes: of its pictures, as long as the prompt is taken in; image_step_bytes: of computing the largest one.
    """

    num_rows: int
    num_prompt: int
    num_tokens: int
    image_bytes: int = 0
    image_step_bytes: int = 0


@dataclass(slots=True, eq=False)
class Rectangle:
    """Rows that decode together; slots: of the one that may become the longest."""

    id: int
    slots: int = 0
    rows: dict[str, Request] = field(default_factory=dict)

    def waste(self, length: int) -> int:
        """Slots that attention would look at in vain, if a row that is so long now joined."""
        lengths = [row.num_prompt_tokens for row in self.rows.values()] + [length]
        return max(lengths) * len(lengths) - sum(lengths)


@dataclass(slots=True)
class PromptBooks:
    """The rows that share it, and what it needs as long as it is taken in: its cache, and the largest of its steps."""

    row_ids: set[str]
    cache_bytes: int
    step_bytes: int


class Ledger:
    """budget: bytes for all that the engine keeps, weights included. reserve_tokens, chunk_tokens: see
    MemoryConfig.reserve_tokens and EngineConfig.prefill_chunk_tokens. cached_bytes: what prefix cache and vision cache
    hold now.

    unaccounted_bytes: what the device holds beyond the books, as `observe` has found; it counts as used.
    """

    def __init__(
        self,
        costs: MemoryCosts,
        budget: int,
        reserve_tokens: int,
        chunk_tokens: int,
        cached_bytes: Callable[[], int] = lambda: 0,
    ):
        self.costs = costs
        self.budget = budget
        self._reserve_tokens = reserve_tokens
        self._chunk_tokens = chunk_tokens
        self._cached_bytes = cached_bytes
        self._rectangles: dict[int, Rectangle] = {}
        self._of_row: dict[str, Rectangle] = {}
        self._slots: dict[str, int] = {}  # by row id
        self._prompt: PromptBooks | None = None
        self._ids = count()
        self.unaccounted_bytes = 0
        self.num_underestimates = 0

    # What would be needed

    @property
    def for_requests(self) -> int:
        """Bytes that requests and caches share."""
        return self.budget - self.costs.base_bytes

    def need(self, rows: Sequence[Request], whole: bool = False) -> Need:
        """whole: with all of the answer, not only what is reserved of it at first."""
        row, images, costs = rows[0], rows[0].spec.images, self.costs
        left = row.sampling.max_tokens - len(row.output_token_ids)
        answer = left if whole else min(left, self._reserve_tokens)
        return Need(
            len(rows),
            row.num_prompt_tokens,
            row.num_prompt_tokens + answer + costs.overshoot,
            costs.image_token_bytes * sum(image.num_tokens for image in images),
            max((costs.image(len(image.patches)) for image in images), default=0),
        )

    def alone(self, need: Need) -> int:
        """Bytes of a request in an engine that has nothing else to do. More than for_requests: it can never run."""
        slots = self.costs.slots(need.num_tokens)
        return self._total([(need.num_rows, slots)], self._books(set(), need, moves=False))

    def max_tokens_alone(self, pinned_bytes: int = 0) -> int:
        """Prompt and answer of the longest row that fits, when the prompt is nearly all of it."""
        overshoot, room = self.costs.overshoot, self.for_requests - pinned_bytes
        return _largest(0, 2**24, lambda n: self.alone(Need(1, n, n + overshoot)) <= room)

    def max_answer(self, need: Need, num_tokens: int, limit: int) -> int:
        """How many of so many tokens of an answer fit behind the prompt; 0 if none does."""
        overshoot = self.costs.overshoot
        return _largest(
            0,
            num_tokens,
            lambda n: self.alone(replace(need, num_tokens=need.num_prompt + n + overshoot)) <= limit,
        )

    def max_chunk(self, num_prompt: int, wanted: int) -> int:
        """How many of so many tokens a chunk may take of a prompt that is so long: at least MIN_CHUNK_TOKENS."""
        least = min(wanted, MIN_CHUNK_TOKENS)
        return _largest(least, wanted, lambda n: self.costs.chunk(n, num_prompt) <= self._step_limit)

    # Reserving and giving back

    def missing(self, rows: Sequence[Request]) -> int:
        """Bytes that are not free for a request's rows and its prompt, 0 if all are."""
        need = self.need(rows)
        return max(0, self._added(None, need) - self.free_bytes)  # a rectangle of their own takes the least

    def reserve(self, rows: Sequence[Request]) -> int:
        """For a request's rows and its prompt, which is taken in next. Returns 0, or how many bytes are missing: then
        nothing is reserved. Tells the rows with whom they will decode (`Request.rectangle`)."""
        assert self._prompt is None
        if missing := self.missing(rows):
            return missing
        need = self.need(rows)
        rectangle = self._choose(need)
        if rectangle is not None and self._added(rectangle, need) > self.free_bytes:
            rectangle = None
        self._prompt = self._books({row.id for row in rows}, need, moves=rectangle is None and len(rows) == 1)
        self._put(rectangle, rows, self.costs.slots(need.num_tokens))
        return 0

    def _added(self, rectangle: Rectangle | None, need: Need) -> int:
        books = self._books(set(), need, moves=rectangle is None and need.num_rows == 1)
        rectangles = self._with(rectangle, need.num_rows, self.costs.slots(need.num_tokens))
        return self._total(rectangles, books) - self.reserved_bytes

    def joined(self) -> None:
        """The prompt has been taken in: its own cache is gone."""
        self._prompt = None

    def is_used_up(self, row: Request) -> bool:
        """Whether the row may need more slots in the next step than it has reserved."""
        return row.num_prompt_tokens + self.costs.overshoot > self._slots[row.id]

    def row_share(self, rows: Sequence[Request]) -> float:
        """Which part of what requests may use is reserved for these."""
        num_bytes = sum(self.costs.rows(1, self._slots[row.id]) for row in rows)
        return num_bytes / max(self.for_requests, 1)

    def extend(self, row: Request) -> int:
        """For a row that has used up its slots. Returns 0, or how many bytes are missing."""
        slots = self.costs.slots(self.need([row]).num_tokens)
        rectangle = self._of_row[row.id]
        if slots > rectangle.slots:
            missing = self._total(self._with(rectangle, 0, slots), self._prompt) - self.reserved_bytes - self.free_bytes
            if missing > 0:
                return missing
            rectangle.slots = slots
        self._slots[row.id] = slots
        return 0

    def release(self, row_id: str) -> None:
        """All of a row, and of its prompt with the last of its rows. Unknown ids are ignored."""
        if self._prompt is not None and row_id in self._prompt.row_ids:
            self._prompt.row_ids.discard(row_id)
            if not self._prompt.row_ids:
                self._prompt = None
        rectangle = self._of_row.pop(row_id, None)
        if rectangle is None:
            return
        del rectangle.rows[row_id], self._slots[row_id]
        if not rectangle.rows:
            del self._rectangles[rectangle.id]
        else:  # the runner gives back what only the longest has needed
            rectangle.slots = max(self._slots[other] for other in rectangle.rows)

    def observe(self, active_bytes: int) -> None:
        """What the device holds between two steps. What is not in the books counts as used, until it is gone."""
        known = self.used_bytes - self.unaccounted_bytes - self.transient_bytes
        self.num_underestimates += active_bytes > known + self.unaccounted_bytes
        self.unaccounted_bytes = max(0, active_bytes - known)

    # Where the memory is

    @property
    def row_bytes(self) -> int:
        return sum(self.costs.rows(len(r.rows), r.slots) for r in self._rectangles.values())

    @property
    def prompt_bytes(self) -> int:
        return self._prompt.cache_bytes if self._prompt is not None else 0

    @property
    def transient_bytes(self) -> int:
        """The most that is needed within a step and given back with it."""
        return self.reserved_bytes - self.row_bytes - self.prompt_bytes

    @property
    def reserved_bytes(self) -> int:
        """By requests."""
        return self._total(self._with(None, 0, 0), self._prompt)

    @property
    def used_bytes(self) -> int:
        """Of the budget, by all."""
        return self.costs.base_bytes + self.reserved_bytes + self._cached_bytes() + self.unaccounted_bytes

    @property
    def free_bytes(self) -> int:
        return self.budget - self.used_bytes

    def status(self) -> dict[str, int]:
        return {
            "budget_bytes": self.budget,
            "base_bytes": self.costs.base_bytes,
            "reserved_bytes": self.reserved_bytes,
            "row_bytes": self.row_bytes,
            "prompt_bytes": self.prompt_bytes,
            "transient_bytes": self.transient_bytes,
            "cached_bytes": self._cached_bytes(),
            "unaccounted_bytes": self.unaccounted_bytes,
            "free_bytes": self.free_bytes,
            "num_rectangles": len(self._rectangles),
            "num_underestimates": self.num_underestimates,
        }

    @property
    def _step_limit(self) -> float:
        return MAX_STEP_SHARE * self.for_requests

    def _books(self, row_ids: set[str], need: Need, moves: bool) -> PromptBooks:
        """moves: the only row takes the prompt's cache over instead of copying it."""
        costs, num_tokens = self.costs, need.num_prompt
        smallest = costs.chunk(min(num_tokens, MIN_CHUNK_TOKENS), num_tokens)
        largest = costs.chunk(min(num_tokens, self._chunk_tokens), num_tokens)
        step = max(smallest, min(largest, int(self._step_limit)), need.image_step_bytes)
        return PromptBooks(row_ids, need.image_bytes + (0 if moves else costs.prompt(num_tokens)), step)

    def _total(self, rectangles: Sequence[tuple[int, int]], prompt: PromptBooks | None) -> int:
        """Rectangles as (rows, slots). One of them at a time is rebuilt, layer by layer, between chunks of a prompt."""
        costs = self.costs
        rows = sum(costs.rows(*rectangle) for rectangle in rectangles)
        rebuilt = max((costs.layer(*rectangle) for rectangle in rectangles), default=0)
        if prompt is None:
            return rows + rebuilt
        return rows + prompt.cache_bytes + max(rebuilt, prompt.step_bytes)

    def _with(self, changed: Rectangle | None, num_rows: int, slots: int) -> list[tuple[int, int]]:
        """All rectangles, with so many more rows of so many slots in one of them, or in a new one."""
        sizes = [
            (len(r.rows) + num_rows, max(r.slots, slots)) if r is changed else (len(r.rows), r.slots)
            for r in self._rectangles.values()
        ]
        return [*sizes, (num_rows, slots)] if changed is None and num_rows else sizes

    def _choose(self, need: Need) -> Rectangle | None:
        """Where the rows would waste least; None: among their own. A step reads the weights once per rectangle, so the
        slots that are looked at in vain may weigh as much as the weights, but no more; and no more than a part of the
        memory may stay empty for it."""
        best = min(self._rectangles.values(), key=lambda r: r.waste(need.num_prompt), default=None)
        if best is None or best.waste(need.num_prompt) * self.costs.token_bytes > self.costs.base_bytes:
            return None
        slots = self.costs.slots(need.num_tokens)
        num_rows, widest = len(best.rows) + need.num_rows, max(best.slots, slots)
        asked = sum(self._slots[row_id] for row_id in best.rows) + need.num_rows * slots
        empty = (num_rows * widest - asked) * self.costs.token_bytes
        return best if empty <= MAX_WASTE_SHARE * self.for_requests else None

    def _put(self, rectangle: Rectangle | None, rows: Sequence[Request], slots: int) -> None:
        if rectangle is None:
            rectangle = Rectangle(next(self._ids))
            self._rectangles[rectangle.id] = rectangle
        rectangle.slots = max(rectangle.slots, slots)
        for row in rows:
            row.rectangle = rectangle.id
            rectangle.rows[row.id] = row
            self._of_row[row.id], self._slots[row.id] = rectangle, slots


def make_ledger(config: EngineConfig, runner: Runner, cached_bytes: Callable[[], int]) -> Ledger:
    """Raises EngineFailed where the limit leaves nothing for requests."""
    limits, costs = config.memory, runner.costs
    limit = runner.memory_limit_bytes if limits.limit_gb is None else int(limits.limit_gb * 2**30)
    headroom = min(limit * HEADROOM_SHARE, MAX_HEADROOM) if limits.headroom_gb is None else limits.headroom_gb * 2**30
    ledger = Ledger(costs, limit - int(headroom), limits.reserve_tokens, config.prefill_chunk_tokens, cached_bytes)
    if ledger.max_tokens_alone() < MIN_ROW_TOKENS:
        raise EngineFailed(
            f"the model takes {costs.base_bytes} bytes, which leaves no room for a request: the limit is {limit} bytes "
            f"(memory.limit_gb), {int(headroom)} of which are kept free (memory.headroom_gb)"
        )
    return ledger


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest of low to high that fits, if all smaller ones do; low itself is not asked."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
