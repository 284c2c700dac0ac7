"""All rows that decode, in as few groups as their lengths allow.

A group's cache is rectangular: every row takes the slots of the longest, and attention looks at them all. A step reads
the weights once per group. So a row joins the group where it wastes least, unless the slots wasted there would weigh
more than the weights: then it gets a group of its own, and nobody else pays for its length.
"""

from collections.abc import Sequence

from engine.core.batch import RowOutput
from engine.worker.compiled import CompiledForward
from engine.worker.decode import DecodeGroup, Newcomer
from engine.worker.mtp import MTPHead
from engine.worker.view import View


class DecodeBatch:
    def __init__(
        self, view: View, head: MTPHead | None, vocab_size: int, num_weight_bytes: int, compiled: bool = False
    ):
        self._view = view
        self._compiled = CompiledForward(view.decode) if compiled else None
        self._head = head
        self._vocab_size = vocab_size
        self._max_waste = num_weight_bytes
        self._groups: list[DecodeGroup] = []

    def clear(self) -> None:
        self._groups = []

    @property
    def num_bytes(self) -> int:
        return sum(group.num_bytes for group in self._groups)

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    def join(self, new: Newcomer) -> None:
        """Adds a row. When it raises, the batch is as it was."""
        length = new.request.num_prompt_tokens
        group = min(self._groups, key=lambda group: _waste(group, length), default=None)
        if group is not None and _waste(group, length) <= self._max_waste:
            group.join(new)
        else:
            self._groups.append(DecodeGroup(self._view, self._head, self._vocab_size, new, self._compiled))

    def leave(self, row_ids: Sequence[str]) -> None:
        """Removes these rows; others go on as if they had never been there."""
        gone = set(row_ids)
        for group in list(self._groups):
            stay = [i for i, row in enumerate(group.rows) if row.request.id not in gone]
            if not stay:
                self._groups.remove(group)
            elif len(stay) < len(group.rows):
                group.keep(stay)

    def step(self, num_drafts: int) -> dict[str, RowOutput]:
        """Every group once; all are launched before any is waited for."""
        started = [(group, group.start_step(num_drafts)) for group in self._groups]
        outputs: dict[str, RowOutput] = {}
        for group, before in started:
            outputs |= group.finish_step(before)
        return outputs


def _waste(group: DecodeGroup, length: int) -> int:
    """Bytes of slots that nobody needs, if a row of this length joined."""
    lengths = [row.num_cached for row in group.rows] + [length]
    return (max(lengths) * len(lengths) - sum(lengths)) * group.bytes_per_token
