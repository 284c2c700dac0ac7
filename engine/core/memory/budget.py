"""The memory budget: everything a row needs is reserved, in bytes, before it is admitted. Pure.

A row reserves slots for its prompt and at most `reserve_tokens` of its answer, and extends the reservation as it grows.
grouping.py decides which rows share a decode group, in which every row takes the slots of the longest. A prompt in
progress reserves the intermediate results of a chunk on top. Caches count with their current size and are evicted when
a row needs the memory.
"""

import sys
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from engine.config import EngineConfig, MemoryConfig
from engine.core.memory.grouping import DecodeGroupPlan, Grouping
from engine.core.memory.needs import (
    MIN_CHUNK_TOKENS,
    MemoryNeed,
    MemoryNeeds,
    PrefillReservation,
    largest,
    step_bytes,
)
from engine.core.prompt import Prompt
from engine.core.row import Row
from engine.core.runner import ModelRunner
from engine.errors import EngineFailed

MIN_CHUNK_TOKENS_BESIDE = 64
"""Admission beside other rows reserves the memory of a chunk of this many tokens; larger chunks use free memory."""

HEADROOM_SHARE, MAX_HEADROOM = 0.125, 8 * 2**30
"""Default headroom: this share of the limit, at most MAX_HEADROOM bytes."""

MIN_ROW_TOKENS = 16
"""The engine refuses to start if its memory does not hold one row of this many tokens."""

OBSERVATIONS = 4
"""Steps in a row that must find memory which no reservation explains before the device is waited for, and asked again.
On an H200 there were up to 2.2 GB right behind a chunk, gone soon after, and 0.15 GB for four steps behind a prompt of
8,204 tokens, gone as soon as the device was waited for."""


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


class Evictable(Protocol):
    """Cached memory that can be evicted, see EvictableMemory."""

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of the prefix cache."""
        ...

    @property
    def image_bytes(self) -> int:
        """Bytes of cached image features."""
        ...

    @property
    def evictable_bytes(self) -> int:
        """Bytes that can be evicted now."""
        ...

    def evict(self, num_bytes: int) -> bool:
        """Evict `num_bytes`. Return False, with nothing evicted, if that is impossible."""
        ...

    def price(self, num_bytes: int) -> float:
        """Return the expected seconds of recomputation that `evict` would cause."""
        ...


class MemoryBudget:
    """Reserves device memory for rows and prompts, in bytes.

    Args:
        needs: The needs of requests, and the limit.
        evictable: The prefix cache and the cache of image features.

    Attributes:
        needs: The needs of requests, and the limit.
        costs: Bytes of rows, prompts and images.
        prefills: Reservations of the prompts in progress.
        unaccounted_bytes: Device memory in use that no reservation explains, the least of what the last OBSERVATIONS
            calls of `observe` found, and that was still there once the device was waited for; counts as used.
        num_underestimates: How often these bytes have grown.
    """

    def __init__(self, needs: MemoryNeeds, evictable: Evictable):
        self.needs = needs
        self.costs = needs.costs
        self._evictable = evictable
        self.grouping = Grouping(needs.costs, needs.request_bytes)
        self._sampling: dict[str, int] = {}  # MemoryNeed.sampling_bytes by row id
        self.prefills: list[PrefillReservation] = []
        self.unaccounted_bytes = 0
        self.num_underestimates = 0
        self._unexplained = deque([0] * OBSERVATIONS, OBSERVATIONS)

    def shortfall_bytes(self, rows: Sequence[Row], without: Collection[str] = (), growth_tokens: int = 0) -> int:
        """Return how many bytes to free for a prompt and its rows; 0 if they fit.

        Args:
            rows: The rows that share the prompt.
            without: Ids of rows to ignore, as if they had been dropped.
            growth_tokens: Predicted tokens that each decoding row generates before the prompt is computed. Rows that
                will need more slots by then are counted as extended.
        """
        missing, _ = self._shortfall_bytes(self.needs.need(rows), None, without, growth_tokens)  # in their own group
        return missing

    def group_shortfall_bytes(self, rows: Sequence[Row], growth_tokens: int = 0) -> int:
        """Return how many bytes to free for a prompt's rows to join an existing decode group; 0 if none.

        Args:
            rows: The rows that share the prompt.
            growth_tokens: See `shortfall_bytes`.
        """
        need = self.needs.need(rows)
        group = self._choose(need)
        evictable = self._evictable.evictable_bytes
        return 0 if group is None else self._shortfall_bytes(need, group, (), growth_tokens, evictable)[0]

    def reserve(self, rows: Sequence[Row], growth_tokens: int = 0) -> int:
        """Reserve memory for a prompt and its rows, and assign the rows to a decode group.

        Args:
            rows: The rows that share the prompt.
            growth_tokens: See `shortfall_bytes`. Growth is not reserved, but must be free or evictable.

        Returns:
            0, or the missing bytes if nothing was reserved; `sys.maxsize` if no eviction would help.
        """
        need = self.needs.need(rows)
        evictable = self._evictable.evictable_bytes
        missing, reservation = self._shortfall_bytes(need, None, (), growth_tokens, evictable)
        if missing:
            return missing
        group = self._choose(need)
        if group is not None:
            missing, among_others = self._shortfall_bytes(need, group, (), growth_tokens, evictable)
            group, reservation = (None, reservation) if missing else (group, among_others)
        reservation.row_ids |= {row.id for row in rows}
        self.prefills.append(reservation)
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
        """Return the missing bytes and the prefill reservation of a prompt, in a given decode group or a new one.

        Beside other rows a chunk of MIN_CHUNK_TOKENS_BESIDE must fit; with no other row the smallest chunk suffices.

        Args:
            need: The prompt's need.
            group: The decode group to join; None for a new one.
            without: Ids of rows to ignore.
            growth_tokens: See `shortfall_bytes`.
            evictable_bytes: Cached bytes that predicted growth may evict later; nothing is evicted for it now.
        """
        others = [row_id for row_id in self._sampling if row_id not in without]
        reservation = self.needs.prefill_reservation(need, MIN_CHUNK_TOKENS_BESIDE if others else 0, need.num_prompt)
        sampling = sum(self._sampling[row_id] for row_id in others) + need.num_rows * need.sampling_bytes
        prefills = [*(one for one in self.prefills if not one.row_ids <= set(without)), reservation]
        slots, limit = self.costs.slots(need.num_tokens), self._limit(is_only_prompt=not others)

        def total(growth: int) -> int:
            return self.needs.total_bytes(self._sizes(group, need.num_rows, slots, without, growth), prefills, sampling)

        grown = total(growth_tokens) - limit if growth_tokens else 0
        if evictable_bytes and grown > 0:
            grown = sys.maxsize if grown > evictable_bytes else 0
        return max(0, total(0) - limit, grown), reservation

    def _limit(self, is_only_prompt: bool) -> int:
        """Return the bytes that requests may reserve.

        With no other row running, unaccounted bytes are ignored: they may never be freed, and the headroom covers them.
        """
        limit = self.needs.request_bytes - self._cached_bytes
        return limit if is_only_prompt else limit - self.unaccounted_bytes

    def release_chunk(self) -> None:
        """Reduce all prefill reservations to their smallest chunks until the next chunk is chosen."""
        for one in self.prefills:
            one.step_bytes = one.min_step_bytes

    def reserve_chunk(self, prompt: Prompt, wanted: int, least: int = MIN_CHUNK_TOKENS) -> int:
        """Return how many of `wanted` tokens the prompt's next chunk may have, at least `least`.

        The chunk's intermediate results must fit into free memory and stay reserved until `release_chunk`.
        """
        costs, start, room = self.costs, prompt.num_prefilled, self._chunk_bytes
        num_tokens = largest(min(wanted, least), wanted, lambda n: costs.chunk(n, start + n) <= room)
        reservation = self._reservation_of(prompt.row)
        reservation.step_bytes = max(reservation.step_bytes, costs.chunk(num_tokens, start + num_tokens))
        return num_tokens

    def chunk_shortfall_bytes(self, prompt: Prompt, wanted: int) -> int:
        """Return how many bytes to free for a chunk of `wanted` tokens, or for the largest chunk that is allowed."""
        wanted_bytes = self.costs.chunk(wanted, prompt.num_prefilled + wanted)
        return max(0, min(wanted_bytes, int(self.needs.step_limit_bytes)) - int(self._chunk_bytes))

    def reserve_burst(self, rows: Sequence[Row], num_tokens: int, end: int) -> int:
        """Reserve memory for a forward with a chunk of each row's prompt, until `release_chunk`.

        Args:
            rows: One row per prompt.
            num_tokens: Tokens of the longest chunk, to which the others are padded.
            end: Prompt tokens up to the end of the chunk, of the longest prompt.

        Returns:
            0, or the missing bytes if nothing was reserved; `sys.maxsize` if no eviction would help.
        """
        reservation, wanted = self._reservation_of(rows[0]), self.costs.burst(len(rows), num_tokens, end)
        if wanted > self.needs.step_limit_bytes:
            return sys.maxsize
        if wanted > self._chunk_bytes:
            return wanted - int(self._chunk_bytes)
        reservation.step_bytes = max(reservation.step_bytes, wanted)
        return 0

    @property
    def _chunk_bytes(self) -> float:
        """Bytes that the intermediate results of a chunk may take."""
        room = step_bytes(self.prefills) + max(0, self.free_bytes)
        return min(room, self.needs.step_limit_bytes)

    def _reservation_of(self, row: Row) -> PrefillReservation:
        return next(one for one in self.prefills if row.id in one.row_ids)

    def release_prefill(self, row: Row) -> None:
        """Release the prefill reservation of a row's prompt; its rows have joined the decode batch."""
        self.prefills = [one for one in self.prefills if row.id not in one.row_ids]

    def needs_more_slots(self, row: Row) -> bool:
        """Return whether the row may need more slots in the next step than it has reserved."""
        return row.num_tokens + self.costs.overshoot > self.grouping.of(row).slots[row.id]

    def row_share(self, row: Row) -> float:
        """Return the share of `request_bytes` that is reserved for the row."""
        row_bytes = self.costs.rows(1, self.grouping.of(row).slots[row.id]) + self._sampling[row.id]
        return row_bytes / max(self.needs.request_bytes, 1)

    def extend(self, row: Row) -> int:
        """Reserve more slots for a row that has used up its own; return 0, or the missing bytes.

        With missing bytes, nothing was reserved.
        """
        slots = self.costs.slots(self.needs.need([row]).num_tokens)
        group = self.grouping.of(row)
        if slots > group.num_slots:
            total = self.needs.total_bytes(self._sizes(group, 0, slots), self.prefills, self._sampling_bytes)
            missing = total - self._limit(is_only_prompt=len(self.grouping) == 1)
            if missing > 0:
                return missing
        group.slots[row.id] = slots
        return 0

    def release(self, row_id: str) -> None:
        """Release a row's memory, and its prompt's with the last of its rows. Unknown ids are ignored."""
        for one in self.prefills:
            one.row_ids.discard(row_id)
        self.prefills = [one for one in self.prefills if one.row_ids]
        self.grouping.remove(row_id)
        self._sampling.pop(row_id, None)

    def observe(self, active_bytes: int, settled_bytes: Callable[[], int]) -> None:
        """Update unaccounted_bytes from the device memory in use between two steps, of which one may be in flight.

        The reservation of the last chunk must still be there: some of its intermediate results may be in use for some
        milliseconds after it was waited for.

        Args:
            active_bytes: Bytes in use, with results of finished work that are not freed yet.
            settled_bytes: Waits for the device and returns the bytes in use then. It is called when more memory than
                before has been unexplained OBSERVATIONS times in a row.
        """
        known = self.needs.limit_bytes - self.free_bytes - self.unaccounted_bytes
        self._unexplained.append(max(0, active_bytes - known))
        if min(self._unexplained) > self.unaccounted_bytes:
            self._unexplained[-1] = max(0, settled_bytes() - known)
        least = min(self._unexplained)
        self.num_underestimates += least > self.unaccounted_bytes
        self.unaccounted_bytes = least

    @property
    def accounts(self) -> Accounts:
        """The limit's bytes by purpose."""
        sizes = self._sizes(None, 0, 0)
        rows = self.needs.row_bytes(sizes, self._sampling_bytes)
        prefills = sum(one.cache_bytes for one in self.prefills)
        reserved = self.needs.total_bytes(sizes, self.prefills, self._sampling_bytes)
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
        return self.needs.total_bytes(self._sizes(None, 0, 0), self.prefills, self._sampling_bytes)

    @property
    def free_bytes(self) -> int:
        """Bytes used by neither requests nor caches; negative while evictions are in progress."""
        used = self.costs.base_bytes + self.reserved_bytes + self._cached_bytes + self.unaccounted_bytes
        return self.needs.limit_bytes - used

    def status(self) -> dict[str, int]:
        """Return the accounts, which add up to `limit_bytes`, with sums and counts for the status page."""
        return asdict(self.accounts) | {
            "limit_bytes": self.needs.limit_bytes,
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
            kept = [row for row in one.rows.values() if row.id not in without]
            grown = (self.needs.grown_slots(row, one.slots[row.id], growth_tokens) for row in kept)
            widest = max(grown, default=0)
            if one is changed:
                sizes.append((len(kept) + num_rows, max(widest, slots)))
            else:
                sizes.append((len(kept), widest))
        return [*sizes, (num_rows, slots)] if changed is None and num_rows else sizes


def limit_and_headroom(limits: MemoryConfig, default_limit_bytes: int) -> tuple[int, int]:
    """Return the bytes that the engine may use, and how many of them stay free.

    Args:
        limits: As configured.
        default_limit_bytes: The limit of this machine, where none is configured.
    """
    limit = default_limit_bytes if limits.limit_gb is None else int(limits.limit_gb * 2**30)
    headroom = min(limit * HEADROOM_SHARE, MAX_HEADROOM) if limits.headroom_gb is None else limits.headroom_gb * 2**30
    return limit, int(headroom)


def make_memory_budget(config: EngineConfig, runner: ModelRunner, evictable: Evictable) -> MemoryBudget:
    """Create the budget from the configured limits and the runner's costs.

    Raises:
        EngineFailed: The limit does not leave enough memory for a request of MIN_ROW_TOKENS.
    """
    costs = runner.costs
    limit, headroom = limit_and_headroom(config.memory, runner.memory_limit_bytes)
    undivided = runner.whole_images, runner.whole_prompts is not None
    needs = MemoryNeeds(costs, limit - headroom, config.memory.reserve_tokens, *undivided)
    if needs.max_row_tokens() < MIN_ROW_TOKENS:
        raise EngineFailed(
            f"the model takes {costs.base_bytes} bytes, which leaves too few for a request of {MIN_ROW_TOKENS} tokens: "
            f"the limit is {limit} bytes (memory.limit_gb), of which {headroom} stay free (memory.headroom_gb)"
        )
    return MemoryBudget(needs, evictable)
