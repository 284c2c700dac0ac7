"""The memory budget: what every row will need is reserved, in bytes, before it starts. Pure.

A row reserves the slots that its prompt and (at most `reserve_tokens` of) its answer take, and more while it grows
beyond that. Which rows share a decode group, and take the slots of the longest, is decided in grouping.py and paid for
here. While a prompt is computed, the intermediate results of a chunk come on top. What the caches hold counts as it is,
and is evicted when a row needs the memory.
"""

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Protocol

from engine.config import EngineConfig
from engine.core.memory.costs import MemoryCosts
from engine.core.memory.evictable import Evictable, NothingEvictable
from engine.core.memory.grouping import DecodeGroupPlan, Grouping, GroupMerge
from engine.core.request import Request, RequestState
from engine.protocol import EngineFailed

MAX_STEP_SHARE = 0.25
"""Largest part of what requests may use for the intermediate results of one chunk: behind long prompts chunks become
smaller."""

MIN_CHUNK_TOKENS = 16

MIN_CHUNK_TOKENS_BESIDE = 64
"""For chunks of so many tokens there is room when a prompt is admitted beside others; larger ones take what is free."""

HEADROOM_SHARE, MAX_HEADROOM = 0.125, 8 * 2**30
"""Of the limit, what is kept free where the configuration does not say."""

MIN_ROW_TOKENS = 16
"""An engine whose memory holds no longer row does not start."""


class Runner(Protocol):
    """What the books need to know of core.batch.ModelRunner."""

    costs: MemoryCosts
    memory_limit_bytes: int


@dataclass(frozen=True)
class Need:
    """What a request asks for: num_rows rows of num_tokens, the first num_prompt of which are the prompt.

    sampling_bytes: of each row, for what it asks of its logits. image_bytes: of its pictures, as long as the prompt is
    taken in; image_step_bytes: of computing the largest one.
    """

    num_rows: int
    num_prompt: int
    num_tokens: int
    sampling_bytes: int = 0
    image_bytes: int = 0
    image_step_bytes: int = 0


@dataclass(slots=True, eq=False)
class PrefillReservation:
    """What a prompt in progress needs beside its rows."""

    row_ids: set[str]
    """The rows that share the prompt."""
    cache_bytes: int
    """Its images, and a cache that several rows copy. That of a single row moves to its place layer by layer."""
    min_step_bytes: int
    """Intermediate results of its smallest chunk or its largest image."""
    step_bytes: int
    """Intermediate results of its present chunk."""


@dataclass(frozen=True)
class Accounts:
    """What the bytes of the limit are for; together they are the limit."""

    weights_bytes: int
    """Weights, and all else that is there without any request."""
    row_bytes: int
    """Rows, in their decode groups, from their admission on."""
    prefill_bytes: int
    """Images of prompts in progress, and caches that several rows will copy."""
    transient_bytes: int
    """The most that is needed within a step and given back with it."""
    prefix_cache_bytes: int
    """Snapshots, except what is lent to rows."""
    image_cache_bytes: int
    """Features of images that are kept in case the images come back."""
    unaccounted_bytes: int
    """Device memory in use that no other account explains."""
    free_bytes: int
    """The rest; negative while evictions are under way."""


class MemoryBudget:
    """Reserve device memory for rows and prompts, in bytes.

    Args:
        costs: Bytes of rows, prompts and images.
        limit_bytes: Memory of the engine, weights included.
        reserve_tokens: See MemoryConfig.reserve_tokens.
        evictable: What the prefix cache and the cache of images hold.

    Attributes:
        unaccounted_bytes: Device memory in use that no reservation explains, as found by `observe`; counts as used.
    """

    def __init__(
        self,
        costs: MemoryCosts,
        limit_bytes: int,
        reserve_tokens: int,
        evictable: Evictable | None = None,
    ):
        self.costs = costs
        self.limit_bytes = limit_bytes
        self._reserve_tokens = reserve_tokens
        self._evictable = evictable or NothingEvictable()
        self.grouping = Grouping(costs, limit_bytes - costs.base_bytes)
        self._sampling: dict[str, int] = {}  # Need.sampling_bytes by row id
        self._prefills: list[PrefillReservation] = []
        self.unaccounted_bytes = 0
        self.num_underestimates = 0

    # What would be needed

    @property
    def for_requests(self) -> int:
        """Bytes that requests and caches share."""
        return self.limit_bytes - self.costs.base_bytes

    def need(self, rows: Sequence[Request], whole: bool = False) -> Need:
        """Return what a request's rows need.

        whole: with all of the answer, not only what is reserved of it at first. A row that lost its place to growth
        asks for twice as much each time: with the same reserve it would soon lose it again.
        """
        row, images, costs = rows[0], rows[0].spec.images, self.costs
        left = row.sampling.max_tokens - len(row.output_token_ids)
        answer = left if whole else min(left, self._reserve_tokens << row.num_outgrown)
        return Need(
            len(rows),
            row.num_prompt_tokens,
            row.num_prompt_tokens + answer + costs.overshoot,
            costs.sampling(row),
            costs.image_token_bytes * sum(image.num_tokens for image in images),
            max((costs.image(len(image.patches)) for image in images), default=0),
        )

    def alone(self, need: Need) -> int:
        """Bytes that a request needs at least, in an engine that has nothing else to do, also to begin again at the end
        of its answer. More than for_requests: it can never run."""
        end, sizes = need.num_tokens, [(need.num_rows, self.costs.slots(need.num_tokens))]
        books = self._books(need, chunk_tokens=0, end=end)
        return self._total(sizes, [books], need.num_rows * need.sampling_bytes)

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

    def max_chunk(self, row: Request, wanted: int) -> int:
        """Return how many of `wanted` tokens the next chunk of a row's prompt may take, at least MIN_CHUNK_TOKENS.

        The chunk's intermediate results must fit into what is free now; they stay reserved until `end_chunk`.
        """
        reservation, start = self._reservation_of(row.id), row.num_prefilled
        assert reservation is not None
        least, room = min(wanted, MIN_CHUNK_TOKENS), self._chunk_room
        num_tokens = _largest(least, wanted, lambda n: self.costs.chunk(n, start + n) <= room)
        reservation.step_bytes = max(reservation.step_bytes, self.costs.chunk(num_tokens, start + num_tokens))
        return num_tokens

    def chunk_shortfall_bytes(self, row: Request, wanted: int) -> int:
        """Return how many bytes would have to be freed for `wanted` tokens in the next chunk, or for as many as may."""
        end = row.num_prefilled + wanted
        return max(0, min(self.costs.chunk(wanted, end), int(self._step_limit)) - int(self._chunk_room))

    def reserve_burst(self, rows: Sequence[Request], num_tokens: int, end: int) -> int:
        """Reserve memory for a forward of so many tokens of each row's prompt, until `end_chunk`.

        Args:
            rows: one of each prompt.
            num_tokens: of the longest chunk, to which the others are padded.
            end: tokens of the longest prompt behind its chunk.

        Returns:
            0, or how many bytes are missing; then nothing is reserved. `sys.maxsize` for what no eviction could change.
        """
        reservation, wanted = self._reservation_of(rows[0].id), self.costs.burst(len(rows), num_tokens, end)
        assert reservation is not None
        if wanted > self._step_limit:
            return sys.maxsize
        if wanted > self._chunk_room:
            return wanted - int(self._chunk_room)
        reservation.step_bytes = max(reservation.step_bytes, wanted)
        return 0

    @property
    def _chunk_room(self) -> float:
        return min(self._step_bytes(self._prefills) + max(0, self.free_bytes), self._step_limit)

    # Reserving and giving back

    def missing(self, rows: Sequence[Request], without: Collection[str] = (), growth_tokens: int = 0) -> int:
        """Return how many bytes are not free for a request's rows and its prompt; 0 if all are.

        Args:
            without: rows that would leave.
            growth_tokens: what each decoding row may give out before the prompt is computed. Rows that outgrow their
                reserve by then count with what they will ask for.
        """
        return self._missing(self.need(rows), None, without, growth_tokens)[0]  # a group of their own takes the least

    def group_shortfall_bytes(self, rows: Sequence[Request], growth_tokens: int = 0) -> int:
        """Return how many bytes would have to be freed for a request's rows to decode among others; 0 if none would.

        growth_tokens: see `missing`.
        """
        need = self.need(rows)
        group = self._choose(need)
        evictable = self._evictable.free_bytes
        return 0 if group is None else self._missing(need, group, (), growth_tokens, evictable)[0]

    def reserve(self, rows: Sequence[Request], growth_tokens: int = 0) -> int:
        """Reserve memory for a request's rows and its prompt, and tell the rows with whom they decode.

        Args:
            growth_tokens: see `missing`. What rows will ask for is not reserved, but must be free or evictable.

        Returns:
            0, or how many bytes are missing; then nothing is reserved. `sys.maxsize` for what no eviction could change.
        """
        need = self.need(rows)
        evictable = self._evictable.free_bytes
        missing, books = self._missing(need, None, (), growth_tokens, evictable)
        if missing:
            return missing
        group = self._choose(need)
        if group is not None:
            missing, among_others = self._missing(need, group, (), growth_tokens, evictable)
            group, books = (None, books) if missing else (group, among_others)
        books.row_ids |= {row.id for row in rows}
        self._prefills.append(books)
        self._sampling |= {row.id: need.sampling_bytes for row in rows}
        self.grouping.put(group, rows, self.costs.slots(need.num_tokens))
        return 0

    def _choose(self, need: Need) -> DecodeGroupPlan | None:
        return self.grouping.choose(need.num_rows, need.num_prompt, self.costs.slots(need.num_tokens))

    def _missing(
        self,
        need: Need,
        group: DecodeGroupPlan | None,
        without: Collection[str] = (),
        growth_tokens: int = 0,
        evictable_bytes: int = 0,
    ) -> tuple[int, PrefillReservation]:
        """Return how many bytes are missing for a request among the rows of a group, or in one of its own.

        Beside others its chunks shall not be smaller than they could be; alone, anything is better than to wait.
        evictable_bytes: what foreseen growth may take from the caches later; nothing is evicted for it now.
        """
        others = [row_id for row_id in self._sampling if row_id not in without]
        books = self._books(need, MIN_CHUNK_TOKENS_BESIDE if others else 0, need.num_prompt)
        sampling = sum(self._sampling[row_id] for row_id in others) + need.num_rows * need.sampling_bytes
        prefills = [*(one for one in self._prefills if not one.row_ids <= set(without)), books]
        slots, limit = self.costs.slots(need.num_tokens), self._limit(is_alone=not others)

        def total(growth: int) -> int:
            return self._total(self._sizes(group, need.num_rows, slots, without, growth), prefills, sampling)

        grown = total(growth_tokens) - limit if growth_tokens else 0
        if evictable_bytes and grown > 0:
            grown = sys.maxsize if grown > evictable_bytes else 0
        return max(0, total(0) - limit, grown), books

    def _limit(self, is_alone: bool) -> int:
        """Of what requests may reserve. Who is alone need not wait until something unknown is gone: it may stay, and
        there is the headroom."""
        limit = self.for_requests - self._cached_bytes
        return limit if is_alone else limit - self.unaccounted_bytes

    def release_prefill(self, row: Request) -> None:
        """Give back what the prompt of a row needed beside its rows: they have joined the decode batch."""
        self._prefills = [one for one in self._prefills if row.id not in one.row_ids]

    def end_chunk(self) -> None:
        """Give back what no chunk needs now: the next one has not been chosen yet."""
        for one in self._prefills:
            one.step_bytes = one.min_step_bytes

    def needs_more_slots(self, row: Request) -> bool:
        """Whether the row may need more slots in the next step than it has reserved."""
        return row.num_prompt_tokens + self.costs.overshoot > self.grouping.of(row.id).slots[row.id]

    def row_share(self, row: Request) -> float:
        """Which part of what requests may use is reserved for it."""
        row_bytes = self.costs.rows(1, self.grouping.of(row.id).slots[row.id]) + self._sampling[row.id]
        return row_bytes / max(self.for_requests, 1)

    def extend(self, row: Request) -> int:
        """For a row that has used up its slots. Returns 0, or how many bytes are missing."""
        slots = self.costs.slots(self.need([row]).num_tokens)
        group = self.grouping.of(row.id)
        if slots > group.num_slots:
            total = self._total(self._sizes(group, 0, slots), self._prefills, self._sampling_bytes)
            missing = total - self._limit(is_alone=len(self.grouping) == 1)
            if missing > 0:
                return missing
        group.slots[row.id] = slots
        return 0

    def merge_shortfall_bytes(self, merge: GroupMerge) -> int:
        """Return how many bytes would have to be freed for two decode groups to become one; 0 if none would."""
        return max(0, self._merged_bytes(merge) - self._limit(is_alone=False))

    def merge_bytes(self, merge: GroupMerge) -> int:
        """Return how many bytes more are reserved when two decode groups have become one."""
        return self._merged_bytes(merge) - self.reserved_bytes

    def _merged_bytes(self, merge: GroupMerge) -> int:
        source, target = self.grouping.groups[merge.source], self.grouping.groups[merge.target]
        sizes = self._sizes(target, len(source.rows), source.num_slots)
        sizes.remove((len(source.rows), source.num_slots))
        return self._total(sizes, self._prefills, self._sampling_bytes)

    def release(self, row_id: str) -> None:
        """All of a row, and of its prompt with the last of its rows. Unknown ids are ignored."""
        for one in self._prefills:
            one.row_ids.discard(row_id)
        self._prefills = [one for one in self._prefills if one.row_ids]
        self.grouping.remove(row_id)
        self._sampling.pop(row_id, None)

    def observe(self, active_bytes: int) -> None:
        """What the device holds between two steps. What is not in the books counts as used, until it is gone."""
        accounts = self.accounts
        known = self.limit_bytes - accounts.free_bytes - accounts.unaccounted_bytes - accounts.transient_bytes
        self.num_underestimates += active_bytes > known + self.unaccounted_bytes
        self.unaccounted_bytes = max(0, active_bytes - known)

    # Where the memory is

    @property
    def accounts(self) -> Accounts:
        sizes = self._sizes(None, 0, 0)
        rows = self._row_bytes(sizes, self._sampling_bytes)
        prefills = sum(one.cache_bytes for one in self._prefills)
        reserved = self._total(sizes, self._prefills, self._sampling_bytes)
        return Accounts(
            self.costs.base_bytes,
            rows,
            prefills,
            reserved - rows - prefills,
            self._evictable.snapshot_bytes,
            self._evictable.image_bytes,
            self.unaccounted_bytes,
            self.free_bytes,
        )

    @property
    def reserved_bytes(self) -> int:
        """Bytes that are reserved for requests: rows, prefills and what a step needs for a while."""
        return self._total(self._sizes(None, 0, 0), self._prefills, self._sampling_bytes)

    @property
    def free_bytes(self) -> int:
        """Bytes that neither requests nor caches take; negative while evictions are under way."""
        used = self.costs.base_bytes + self.reserved_bytes + self._cached_bytes + self.unaccounted_bytes
        return self.limit_bytes - used

    def status(self) -> dict[str, int]:
        """Return the accounts, which add up to `limit_bytes`, and a few sums and counts."""
        return asdict(self.accounts) | {
            "limit_bytes": self.limit_bytes,
            "reserved_bytes": self.reserved_bytes,
            "num_decode_groups": len(self.grouping.groups),
            "num_underestimates": self.num_underestimates,
        }

    @property
    def _cached_bytes(self) -> int:
        return self._evictable.snapshot_bytes + self._evictable.image_bytes

    @property
    def _sampling_bytes(self) -> int:
        return sum(self._sampling.values())

    @property
    def _step_limit(self) -> float:
        return MAX_STEP_SHARE * self.for_requests

    def _books(self, need: Need, chunk_tokens: int, end: int) -> PrefillReservation:
        """chunk_tokens: of the chunks that there shall be room for at least. end: the prompt's."""
        costs, num_tokens = self.costs, need.num_prompt
        smallest = costs.chunk(min(end, MIN_CHUNK_TOKENS), end)
        wanted = costs.chunk(min(num_tokens, chunk_tokens), end)
        step = max(smallest, min(wanted, int(self._step_limit)), need.image_step_bytes)
        shared_bytes = 0 if need.num_rows == 1 else costs.prompt(num_tokens)
        return PrefillReservation(set(), need.image_bytes + shared_bytes, step, step)

    def _total(self, groups: Sequence[tuple[int, int]], prefills: Sequence[PrefillReservation], sampling: int) -> int:
        """groups: (rows, slots) of each. One is rebuilt at a time, layer by layer, and one chunk computed at a time."""
        costs = self.costs
        rows = self._row_bytes(groups, sampling)
        rebuilt = max((costs.layer(*group) for group in groups), default=0)
        cache_bytes = sum(one.cache_bytes for one in prefills)
        return rows + cache_bytes + max(rebuilt, self._step_bytes(prefills))

    def _row_bytes(self, groups: Sequence[tuple[int, int]], sampling: int) -> int:
        return sum(self.costs.rows(*group) for group in groups) + sampling

    @staticmethod
    def _step_bytes(prefills: Sequence[PrefillReservation]) -> int:
        return max((one.step_bytes for one in prefills), default=0)

    def _reservation_of(self, row_id: str) -> PrefillReservation | None:
        return next((one for one in self._prefills if row_id in one.row_ids), None)

    def _sizes(
        self,
        changed: DecodeGroupPlan | None,
        num_rows: int,
        slots: int,
        without: Collection[str] = (),
        growth_tokens: int = 0,
    ) -> list[tuple[int, int]]:
        """(rows, slots) of all groups, with so many more rows of so many slots in one of them, or in a new one."""
        sizes = []
        for one in self.grouping.groups.values():
            size = sum(row_id not in without for row_id in one.rows)
            widest = self._grown_slots(one, growth_tokens, without)
            if one is changed:
                size, widest = size + num_rows, max(widest, slots)
            sizes.append((size, widest))
        return [*sizes, (num_rows, slots)] if changed is None and num_rows else sizes

    def _grown_slots(self, group: DecodeGroupPlan, num_tokens: int, without: Collection[str] = ()) -> int:
        """Slots of a group without some of its rows when each of the others has given out so many more tokens."""
        rows = [row for row in group.rows.values() if row.id not in without]
        return max((self._row_slots(row, group.slots[row.id], num_tokens) for row in rows), default=0)

    def _row_slots(self, row: Request, slots: int, num_tokens: int) -> int:
        """Slots that a row will have reserved when it has given out so many more tokens: see `extend`."""
        left = row.sampling.max_tokens - len(row.output_token_ids)
        end = row.num_prompt_tokens + min(num_tokens, left) + self.costs.overshoot
        if not num_tokens or end <= slots or row.state is not RequestState.RUNNING:
            return slots
        reserve = max(1, self._reserve_tokens << row.num_outgrown)
        grown = slots + -(-(end - slots) // reserve) * reserve
        return self.costs.slots(min(grown, row.num_prompt_tokens + left + self.costs.overshoot))


def make_memory_budget(config: EngineConfig, runner: Runner, evictable: Evictable) -> MemoryBudget:
    """Raises EngineFailed where the limit leaves nothing for requests."""
    limits, costs = config.memory, runner.costs
    limit = runner.memory_limit_bytes if limits.limit_gb is None else int(limits.limit_gb * 2**30)
    headroom = min(limit * HEADROOM_SHARE, MAX_HEADROOM) if limits.headroom_gb is None else limits.headroom_gb * 2**30
    budget = MemoryBudget(costs, limit - int(headroom), limits.reserve_tokens, evictable)
    if budget.max_tokens_alone() < MIN_ROW_TOKENS:
        raise EngineFailed(
            f"the model takes {costs.base_bytes} bytes, which leaves no room for a request: the limit is {limit} bytes "
            f"(memory.limit_gb), {int(headroom)} of which are kept free (memory.headroom_gb)"
        )
    return budget


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest of low to high that fits, if all smaller ones do; low itself is not asked."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
