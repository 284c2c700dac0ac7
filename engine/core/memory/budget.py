"""The memory budget: everything a row needs is reserved, in bytes, before it is admitted. Pure.

A row reserves slots for its prompt and at most `reserve_tokens` of its answer, and extends the reservation as it grows.
grouping.py decides which rows share a decode group, in which every row takes the slots of the longest. A prompt in
progress reserves the intermediate results of a chunk on top. Caches count with their current size and are evicted when
a row needs the memory.
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
"""Largest share of `request_bytes` for the intermediate results of one chunk: late in long prompts chunks become
smaller."""

MIN_CHUNK_TOKENS = 16

MIN_CHUNK_TOKENS_BESIDE = 64
"""Admission beside other rows reserves the memory of a chunk of this many tokens; larger chunks use free memory."""

HEADROOM_SHARE, MAX_HEADROOM = 0.125, 8 * 2**30
"""Default headroom: this share of the limit, at most MAX_HEADROOM bytes."""

MIN_ROW_TOKENS = 16
"""The engine refuses to start if its memory does not hold one row of this many tokens."""


class Runner(Protocol):
    """The attributes of core.batch.ModelRunner that the budget depends on."""

    costs: MemoryCosts
    memory_limit_bytes: int


@dataclass(frozen=True)
class MemoryNeed:
    """The memory need of a request."""

    num_rows: int  # One row per choice.
    num_prompt: int  # Prompt tokens of each row.
    num_tokens: int  # Prompt tokens and reserved answer tokens of each row.
    sampling_bytes: int = 0  # Per row, for the sampling parameters that it uses.
    image_bytes: int = 0  # Features of its images, during prefill.
    image_step_bytes: int = 0  # Intermediate results of encoding its largest image.


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


@dataclass(frozen=True)
class Accounts:
    """The limit's bytes by purpose; together they equal the limit."""

    weights_bytes: int
    """Weights, and everything else allocated without any request."""
    row_bytes: int
    """Rows in their decode groups, from admission on."""
    prefill_bytes: int
    """Images of prompts in progress, and caches that several rows will copy."""
    transient_bytes: int
    """The largest allocation within a step."""
    prefix_cache_bytes: int
    """Snapshots, without keys and values that are lent to rows."""
    image_cache_bytes: int
    """Image features that are cached for later requests."""
    unaccounted_bytes: int
    """Device memory in use that no other account explains."""
    free_bytes: int
    """The remainder; negative while evictions are in progress."""


class MemoryBudget:
    """Reserves device memory for rows and prompts, in bytes.

    Args:
        costs: Bytes of rows, prompts and images.
        limit_bytes: Memory of the engine, weights included.
        reserve_tokens: See MemoryConfig.reserve_tokens.
        evictable: The prefix cache and the cache of image features.

    Attributes:
        unaccounted_bytes: Device memory in use that no reservation explains, as found by `observe`; counts as used.
        num_underestimates: How often `observe` found more memory in use than before.
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
        self._sampling: dict[str, int] = {}  # MemoryNeed.sampling_bytes by row id
        self._prefills: list[PrefillReservation] = []
        self.unaccounted_bytes = 0
        self.num_underestimates = 0

    # Memory needs

    @property
    def request_bytes(self) -> int:
        """Bytes that requests and caches share."""
        return self.limit_bytes - self.costs.base_bytes

    def need(self, rows: Sequence[Request], whole: bool = False) -> MemoryNeed:
        """Return the memory need of a request's rows.

        Args:
            rows: The request's rows.
            whole: Whether to reserve the whole answer instead of `reserve_tokens`. Each preemption by growth doubles a
                row's reserve, because with the same one it would soon be preempted again.
        """
        row, images, costs = rows[0], rows[0].spec.images, self.costs
        left = row.sampling.max_tokens - len(row.output_token_ids)
        answer = left if whole else min(left, self._reserve_tokens << row.num_growth_preemptions)
        return MemoryNeed(
            len(rows),
            row.num_prompt_tokens,
            row.num_prompt_tokens + answer + costs.overshoot,
            costs.sampling(row),
            costs.image_token_bytes * sum(image.num_tokens for image in images),
            max((costs.image(len(image.patches)) for image in images), default=0),
        )

    def min_bytes(self, need: MemoryNeed) -> int:
        """Return the least bytes that a request needs, with no other row in the engine.

        This covers prefilling all of it again at the end of its answer, in case it is preempted there and its state is
        lost. A request that needs more than `request_bytes` can never run.
        """
        end, sizes = need.num_tokens, [(need.num_rows, self.costs.slots(need.num_tokens))]
        reservation = self._reservation(need, chunk_tokens=0, end=end)
        return self._total(sizes, [reservation], need.num_rows * need.sampling_bytes)

    def max_row_tokens(self, pinned_bytes: int = 0) -> int:
        """Return the tokens of the longest row that fits with no other row, when nearly all of it is prompt."""
        overshoot, room = self.costs.overshoot, self.request_bytes - pinned_bytes
        return _largest(0, 2**24, lambda n: self.min_bytes(MemoryNeed(1, n, n + overshoot)) <= room)

    def max_answer_tokens(self, need: MemoryNeed, num_tokens: int, limit: int) -> int:
        """Return how many of `num_tokens` answer tokens fit after the prompt into `limit` bytes; 0 if none does."""
        overshoot = self.costs.overshoot
        return _largest(
            0,
            num_tokens,
            lambda n: self.min_bytes(replace(need, num_tokens=need.num_prompt + n + overshoot)) <= limit,
        )

    def max_chunk(self, row: Request, wanted: int) -> int:
        """Return how many of `wanted` tokens the row's next prefill chunk may have, at least MIN_CHUNK_TOKENS.

        The chunk's intermediate results must fit into free memory and stay reserved until `end_chunk`.
        """
        reservation, start = self._reservation_of(row.id), row.num_prefilled
        assert reservation is not None
        least, room = min(wanted, MIN_CHUNK_TOKENS), self._chunk_room
        num_tokens = _largest(least, wanted, lambda n: self.costs.chunk(n, start + n) <= room)
        reservation.step_bytes = max(reservation.step_bytes, self.costs.chunk(num_tokens, start + num_tokens))
        return num_tokens

    def chunk_shortfall_bytes(self, row: Request, wanted: int) -> int:
        """Return how many bytes to free for a chunk of `wanted` tokens, or for the largest chunk that is allowed."""
        end = row.num_prefilled + wanted
        return max(0, min(self.costs.chunk(wanted, end), int(self._step_limit)) - int(self._chunk_room))

    def reserve_burst(self, rows: Sequence[Request], num_tokens: int, end: int) -> int:
        """Reserve memory for a forward with a chunk of each row's prompt, until `end_chunk`.

        Args:
            rows: One row per prompt.
            num_tokens: Tokens of the longest chunk, to which the others are padded.
            end: Prompt tokens up to the end of the chunk, of the longest prompt.

        Returns:
            0, or the missing bytes if nothing was reserved; `sys.maxsize` if no eviction would help.
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

    # Reserve and release

    def shortfall_bytes(self, rows: Sequence[Request], without: Collection[str] = (), growth_tokens: int = 0) -> int:
        """Return how many bytes to free for a request's rows and its prompt; 0 if they fit.

        Args:
            rows: The request's rows.
            without: Ids of rows to ignore, as if they had been dropped.
            growth_tokens: Predicted tokens that each decoding row generates before the prompt is computed. Rows that
                outgrow their reservations by then count with the extended ones.
        """
        return self._shortfall_bytes(self.need(rows), None, without, growth_tokens)[
            0
        ]  # a group of their own needs the least

    def group_shortfall_bytes(self, rows: Sequence[Request], growth_tokens: int = 0) -> int:
        """Return how many bytes to free for a request's rows to join an existing decode group; 0 if none.

        Args:
            rows: The request's rows.
            growth_tokens: See `shortfall_bytes`.
        """
        need = self.need(rows)
        group = self._choose(need)
        evictable = self._evictable.evictable_bytes
        return 0 if group is None else self._shortfall_bytes(need, group, (), growth_tokens, evictable)[0]

    def reserve(self, rows: Sequence[Request], growth_tokens: int = 0) -> int:
        """Reserve memory for a request's rows and its prompt, and assign the rows to a decode group.

        Args:
            rows: The request's rows.
            growth_tokens: See `shortfall_bytes`. Growth is not reserved, but must be free or evictable.

        Returns:
            0, or the missing bytes if nothing was reserved; `sys.maxsize` if no eviction would help.
        """
        need = self.need(rows)
        evictable = self._evictable.evictable_bytes
        missing, reservation = self._shortfall_bytes(need, None, (), growth_tokens, evictable)
        if missing:
            return missing
        group = self._choose(need)
        if group is not None:
            missing, among_others = self._shortfall_bytes(need, group, (), growth_tokens, evictable)
            group, reservation = (None, reservation) if missing else (group, among_others)
        reservation.row_ids |= {row.id for row in rows}
        self._prefills.append(reservation)
        self._sampling |= {row.id: need.sampling_bytes for row in rows}
        self.grouping.put(group, rows, self.costs.slots(need.num_tokens))
        return 0

    def _choose(self, need: MemoryNeed) -> DecodeGroupPlan | None:
        return self.grouping.choose(need.num_rows, need.num_prompt, self.costs.slots(need.num_tokens))

    def _shortfall_bytes(
        self,
        need: MemoryNeed,
        group: DecodeGroupPlan | None,
        without: Collection[str] = (),
        growth_tokens: int = 0,
        evictable_bytes: int = 0,
    ) -> tuple[int, PrefillReservation]:
        """Return the missing bytes and the prefill reservation of a request, in a given decode group or a new one.

        Beside other rows a chunk of MIN_CHUNK_TOKENS_BESIDE must fit; with no other row the smallest chunk suffices.

        Args:
            need: The request's need.
            group: The decode group to join; None for a new one.
            without: Ids of rows to ignore.
            growth_tokens: See `shortfall_bytes`.
            evictable_bytes: Cached bytes that predicted growth may evict later; nothing is evicted for it now.
        """
        others = [row_id for row_id in self._sampling if row_id not in without]
        reservation = self._reservation(need, MIN_CHUNK_TOKENS_BESIDE if others else 0, need.num_prompt)
        sampling = sum(self._sampling[row_id] for row_id in others) + need.num_rows * need.sampling_bytes
        prefills = [*(one for one in self._prefills if not one.row_ids <= set(without)), reservation]
        slots, limit = self.costs.slots(need.num_tokens), self._limit(is_only_request=not others)

        def total(growth: int) -> int:
            return self._total(self._sizes(group, need.num_rows, slots, without, growth), prefills, sampling)

        grown = total(growth_tokens) - limit if growth_tokens else 0
        if evictable_bytes and grown > 0:
            grown = sys.maxsize if grown > evictable_bytes else 0
        return max(0, total(0) - limit, grown), reservation

    def _limit(self, is_only_request: bool) -> int:
        """Return the bytes that requests may reserve.

        With no other row running, unaccounted bytes are ignored: they may never be freed, and the headroom covers them.
        """
        limit = self.request_bytes - self._cached_bytes
        return limit if is_only_request else limit - self.unaccounted_bytes

    def release_prefill(self, row: Request) -> None:
        """Release the prefill reservation of a row's prompt; its rows have joined the decode batch."""
        self._prefills = [one for one in self._prefills if row.id not in one.row_ids]

    def end_chunk(self) -> None:
        """Reduce all prefill reservations to their smallest chunks until the next chunk is chosen."""
        for one in self._prefills:
            one.step_bytes = one.min_step_bytes

    def needs_more_slots(self, row: Request) -> bool:
        """Return whether the row may need more slots in the next step than it has reserved."""
        return row.num_prompt_tokens + self.costs.overshoot > self.grouping.of(row.id).slots[row.id]

    def row_share(self, row: Request) -> float:
        """Return the share of `request_bytes` that is reserved for the row."""
        row_bytes = self.costs.rows(1, self.grouping.of(row.id).slots[row.id]) + self._sampling[row.id]
        return row_bytes / max(self.request_bytes, 1)

    def extend(self, row: Request) -> int:
        """Reserve more slots for a row that has used up its own; return 0, or the missing bytes.

        With missing bytes, nothing was reserved.
        """
        slots = self.costs.slots(self.need([row]).num_tokens)
        group = self.grouping.of(row.id)
        if slots > group.num_slots:
            total = self._total(self._sizes(group, 0, slots), self._prefills, self._sampling_bytes)
            missing = total - self._limit(is_only_request=len(self.grouping) == 1)
            if missing > 0:
                return missing
        group.slots[row.id] = slots
        return 0

    def merge_shortfall_bytes(self, merge: GroupMerge) -> int:
        """Return how many bytes to free for a merge of two decode groups; 0 if none."""
        return max(0, self._merged_bytes(merge) - self._limit(is_only_request=False))

    def merge_bytes(self, merge: GroupMerge) -> int:
        """Return how many bytes more are reserved after a merge of two decode groups."""
        return self._merged_bytes(merge) - self.reserved_bytes

    def _merged_bytes(self, merge: GroupMerge) -> int:
        source, target = self.grouping.groups[merge.source], self.grouping.groups[merge.target]
        sizes = self._sizes(target, len(source.rows), source.num_slots)
        sizes.remove((len(source.rows), source.num_slots))
        return self._total(sizes, self._prefills, self._sampling_bytes)

    def release(self, row_id: str) -> None:
        """Release a row's memory, and its prompt's with the last of its rows. Unknown ids are ignored."""
        for one in self._prefills:
            one.row_ids.discard(row_id)
        self._prefills = [one for one in self._prefills if one.row_ids]
        self.grouping.remove(row_id)
        self._sampling.pop(row_id, None)

    def observe(self, active_bytes: int) -> None:
        """Update unaccounted_bytes from the device memory in use between two steps."""
        accounts = self.accounts
        known = self.limit_bytes - accounts.free_bytes - accounts.unaccounted_bytes - accounts.transient_bytes
        self.num_underestimates += active_bytes > known + self.unaccounted_bytes
        self.unaccounted_bytes = max(0, active_bytes - known)

    # Accounts

    @property
    def accounts(self) -> Accounts:
        """The limit's bytes by purpose."""
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
        """Bytes reserved for rows, prefills and the intermediate results of a step."""
        return self._total(self._sizes(None, 0, 0), self._prefills, self._sampling_bytes)

    @property
    def free_bytes(self) -> int:
        """Bytes used by neither requests nor caches; negative while evictions are in progress."""
        used = self.costs.base_bytes + self.reserved_bytes + self._cached_bytes + self.unaccounted_bytes
        return self.limit_bytes - used

    def status(self) -> dict[str, int]:
        """Return the accounts, which add up to `limit_bytes`, with sums and counts for the status page."""
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
        return MAX_STEP_SHARE * self.request_bytes

    def _reservation(self, need: MemoryNeed, chunk_tokens: int, end: int) -> PrefillReservation:
        """Return the reservation of a prompt that has not begun.

        Args:
            need: The request's need.
            chunk_tokens: Tokens of the chunk that must fit, beyond the smallest one.
            end: Prompt tokens at the end of that chunk.
        """
        costs, num_tokens = self.costs, need.num_prompt
        smallest = costs.chunk(min(end, MIN_CHUNK_TOKENS), end)
        wanted = costs.chunk(min(num_tokens, chunk_tokens), end)
        step = max(smallest, min(wanted, int(self._step_limit)), need.image_step_bytes)
        shared_bytes = 0 if need.num_rows == 1 else costs.prompt(num_tokens)
        return PrefillReservation(set(), need.image_bytes + shared_bytes, step, step)

    def _total(self, groups: Sequence[tuple[int, int]], prefills: Sequence[PrefillReservation], sampling: int) -> int:
        """Return the bytes of all rows and prefills.

        Only one group is rebuilt at a time, layer by layer, and only one chunk is computed at a time.

        Args:
            groups: (rows, slots) of each group.
            prefills: Reservations of the prompts in progress.
            sampling: Bytes for the rows' sampling parameters.
        """
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
        """Return (rows, slots) of all groups, with `num_rows` rows of `slots` slots added to one.

        Args:
            changed: The group to add them to; None for a new group.
            num_rows: Rows to add; 0 only widens the group.
            slots: Slots of each added row.
            without: Ids of rows to ignore.
            growth_tokens: See `shortfall_bytes`.
        """
        sizes = []
        for one in self.grouping.groups.values():
            size = sum(row_id not in without for row_id in one.rows)
            widest = self._grown_slots(one, growth_tokens, without)
            if one is changed:
                size, widest = size + num_rows, max(widest, slots)
            sizes.append((size, widest))
        return [*sizes, (num_rows, slots)] if changed is None and num_rows else sizes

    def _grown_slots(self, group: DecodeGroupPlan, num_tokens: int, without: Collection[str] = ()) -> int:
        """Return a group's slots, without some rows, after each other row has generated `num_tokens` more tokens."""
        rows = [row for row in group.rows.values() if row.id not in without]
        return max((self._row_slots(row, group.slots[row.id], num_tokens) for row in rows), default=0)

    def _row_slots(self, row: Request, slots: int, num_tokens: int) -> int:
        """Return a row's reserved slots after it has generated `num_tokens` more tokens, see `extend`."""
        left = row.sampling.max_tokens - len(row.output_token_ids)
        end = row.num_prompt_tokens + min(num_tokens, left) + self.costs.overshoot
        if not num_tokens or end <= slots or row.state is not RequestState.RUNNING:
            return slots
        reserve = max(1, self._reserve_tokens << row.num_growth_preemptions)
        grown = slots + -(-(end - slots) // reserve) * reserve
        return self.costs.slots(min(grown, row.num_prompt_tokens + left + self.costs.overshoot))


def make_memory_budget(config: EngineConfig, runner: Runner, evictable: Evictable) -> MemoryBudget:
    """Create the budget from the configured limits and the runner's costs.

    Raises:
        EngineFailed: The limit does not leave enough memory for a request of MIN_ROW_TOKENS.
    """
    limits, costs = config.memory, runner.costs
    limit = runner.memory_limit_bytes if limits.limit_gb is None else int(limits.limit_gb * 2**30)
    headroom = min(limit * HEADROOM_SHARE, MAX_HEADROOM) if limits.headroom_gb is None else limits.headroom_gb * 2**30
    budget = MemoryBudget(costs, limit - int(headroom), limits.reserve_tokens, evictable)
    if budget.max_row_tokens() < MIN_ROW_TOKENS:
        raise EngineFailed(
            f"the model takes {costs.base_bytes} bytes, which leaves too few for a request of {MIN_ROW_TOKENS} tokens: "
            f"the limit is {limit} bytes (memory.limit_gb), of which {int(headroom)} stay free (memory.headroom_gb)"
        )
    return budget


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """Return the largest value from low to high that fits; `fits` is monotonic, and low is assumed to fit."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
