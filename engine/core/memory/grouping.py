"""Which rows decode in one group, whose cache is as wide as its longest row. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from engine.core.memory.costs import MemoryCosts
from engine.core.row import Row

MAX_WASTE_SHARE = 0.125
"""Largest share of `request_bytes` that unused slots may take in one group."""


@dataclass(slots=True, eq=False)
class DecodeGroupPlan:
    """Rows that decode together: each takes the slots of the row with the largest reservation."""

    id: int
    rows: dict[str, Row] = field(default_factory=dict)
    slots: dict[str, int] = field(default_factory=dict)
    """Slots that each row has reserved, by row id."""

    @property
    def num_slots(self) -> int:
        return max(self.slots.values(), default=0)

    @property
    def lengths(self) -> list[int]:
        """Current number of tokens of each row."""
        return [row.num_tokens for row in self.rows.values()]


class Grouping:
    """Assigns rows to decode groups.

    A step reads all weights once per group, so wasted slots that attention reads may weigh as much as the weights, but
    not more, and unused reserved slots may take at most MAX_WASTE_SHARE of the memory.

    Args:
        costs: Bytes of rows and weights.
        request_bytes: Bytes that requests and caches share.
    """

    def __init__(self, costs: MemoryCosts, request_bytes: int):
        self.groups: dict[int, DecodeGroupPlan] = {}
        self._costs = costs
        self._max_empty_bytes = MAX_WASTE_SHARE * request_bytes
        self._ids = count()

    def __len__(self) -> int:
        """Return the number of rows."""
        return sum(len(group.rows) for group in self.groups.values())

    def of(self, row: Row) -> DecodeGroupPlan:
        """Return a row's decode group."""
        return self.groups[row.decode_group]

    def choose(self, num_rows: int, length: int, slots: int) -> DecodeGroupPlan | None:
        """Choose the group in which new rows waste the fewest slots; None for a new group.

        Args:
            num_rows: New rows.
            length: Current tokens of each.
            slots: Slots that each reserves.
        """
        best = min(self.groups.values(), key=lambda group: _waste([*group.lengths, length]), default=None)
        if best is None:
            return None
        lengths, reserved = [*best.lengths, length], [*best.slots.values(), *[slots] * num_rows]
        return best if self._may_share(lengths, reserved) else None

    def put(self, group: DecodeGroupPlan | None, rows: Sequence[Row], slots: int) -> None:
        """Add rows to a group, or to a new one, and set their `Row.decode_group`."""
        if group is None:
            group = DecodeGroupPlan(next(self._ids))
            self.groups[group.id] = group
        for row in rows:
            row.decode_group = group.id
            group.rows[row.id], group.slots[row.id] = row, slots

    def remove(self, row_id: str) -> None:
        """Remove a row; unknown ids are ignored. The runner frees slots that only the longest row needed."""
        group = next((one for one in self.groups.values() if row_id in one.rows), None)
        if group is None:
            return
        del group.rows[row_id], group.slots[row_id]
        if not group.rows:
            del self.groups[group.id]

    def _may_share(self, lengths: Sequence[int], slots: Sequence[int]) -> bool:
        """Return whether rows of these lengths, with these reserved slots, may share a group."""
        is_read_soon = _waste(lengths) * self._costs.token_bytes <= self._costs.base_bytes
        return is_read_soon and _waste(slots) * self._costs.token_bytes <= self._max_empty_bytes


def _waste(sizes: Sequence[int]) -> int:
    """Return the unused slots when all rows take those of the longest."""
    return max(sizes) * len(sizes) - sum(sizes)
