"""ChunkMemory: sizes prefill chunks by the free memory and reserves their intermediate results. Pure."""

import sys
from collections.abc import Sequence

from engine.core.memory.budget import MemoryBudget
from engine.core.memory.needs import MIN_CHUNK_TOKENS, PrefillReservation, largest, step_bytes
from engine.core.request import Request


class ChunkMemory:
    """Reserves the intermediate results of the current chunk in the reservation of its prompt."""

    def __init__(self, budget: MemoryBudget):
        self._budget = budget
        self._needs = budget.needs

    def end_chunk(self) -> None:
        """Reduce all prefill reservations to their smallest chunks until the next chunk is chosen."""
        for one in self._budget.prefills:
            one.step_bytes = one.min_step_bytes

    def reserve_chunk(self, row: Request, wanted: int) -> int:
        """Return how many of `wanted` tokens the row's next prefill chunk may have, at least MIN_CHUNK_TOKENS.

        The chunk's intermediate results must fit into free memory and stay reserved until `end_chunk`.
        """
        costs, start, room = self._needs.costs, row.num_prefilled, self._room_bytes
        num_tokens = largest(min(wanted, MIN_CHUNK_TOKENS), wanted, lambda n: costs.chunk(n, start + n) <= room)
        reservation = self._reservation_of(row)
        reservation.step_bytes = max(reservation.step_bytes, costs.chunk(num_tokens, start + num_tokens))
        return num_tokens

    def shortfall_bytes(self, row: Request, wanted: int) -> int:
        """Return how many bytes to free for a chunk of `wanted` tokens, or for the largest chunk that is allowed."""
        wanted_bytes = self._needs.costs.chunk(wanted, row.num_prefilled + wanted)
        return max(0, min(wanted_bytes, int(self._needs.step_limit_bytes)) - int(self._room_bytes))

    def reserve_burst(self, rows: Sequence[Request], num_tokens: int, end: int) -> int:
        """Reserve memory for a forward with a chunk of each row's prompt, until `end_chunk`.

        Args:
            rows: One row per prompt.
            num_tokens: Tokens of the longest chunk, to which the others are padded.
            end: Prompt tokens up to the end of the chunk, of the longest prompt.

        Returns:
            0, or the missing bytes if nothing was reserved; `sys.maxsize` if no eviction would help.
        """
        reservation, wanted = self._reservation_of(rows[0]), self._needs.costs.burst(len(rows), num_tokens, end)
        if wanted > self._needs.step_limit_bytes:
            return sys.maxsize
        if wanted > self._room_bytes:
            return wanted - int(self._room_bytes)
        reservation.step_bytes = max(reservation.step_bytes, wanted)
        return 0

    @property
    def _room_bytes(self) -> float:
        """Bytes for the intermediate results of a chunk."""
        room = step_bytes(self._budget.prefills) + max(0, self._budget.free_bytes)
        return min(room, self._needs.step_limit_bytes)

    def _reservation_of(self, row: Request) -> PrefillReservation:
        return next(one for one in self._budget.prefills if row.id in one.row_ids)
