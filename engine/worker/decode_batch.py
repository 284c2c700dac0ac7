"""All rows that decode, in groups.

A group's cache is rectangular: every row takes the slots of the longest, and attention looks at them all. A step reads
the weights once per group. Which rows share one is decided, and paid for, before they start: see core/memory/budget.py.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from engine.core.batch import RowOutput, RowSnapshot
from engine.worker.compiled import CompiledForward
from engine.worker.decode import DecodeGroup, Newcomer
from engine.worker.mtp import MTPHead
from engine.worker.snapshot import Stretch
from engine.worker.view import View


class DecodeBatch:
    def __init__(self, view: View, head: MTPHead | None, vocab_size: int, compiled: bool = False):
        self._view = view
        self._compiled = CompiledForward(view.decode) if compiled else None
        self._head = head
        self._vocab_size = vocab_size
        self._groups: dict[int, DecodeGroup] = {}  # by the number of the rows' rectangle

    def clear(self) -> None:
        self._groups = {}

    @property
    def num_bytes(self) -> int:
        return sum(group.num_bytes for group in self._groups.values())

    def join(self, *new: Newcomer) -> None:
        """Adds rows to the groups of their rectangles, those of one group at once.

        When it raises, no other row has changed; some of the new ones may have joined, and have to leave.
        """
        by_group: dict[int, list[Newcomer]] = defaultdict(list)
        for one in new:
            by_group[one.request.rectangle].append(one)
        for number, (first, *others) in by_group.items():
            if number in self._groups:
                self._groups[number].join([first, *others])
                continue
            group = DecodeGroup(self._view, self._head, self._vocab_size, first, self._compiled)
            if others and first.moves:  # the group has its layers, and is about to replace them
                first.cache.clear()
                (first.head_cache or []).clear()
            if others:
                group.join(others)
            self._groups[number] = group

    def merge(self, source: int, target: int) -> None:
        """See ModelRunner.merge_groups."""
        group = self._groups.pop(source, None)
        if group is None:
            return
        if target in self._groups:
            self._groups[target].merge(group)
        else:
            self._groups[target] = group

    def pending(self, row_ids: Sequence[str]) -> dict[str, RowOutput]:
        """See ModelRunner.pending."""
        outputs: dict[str, RowOutput] = {}
        for group in self._groups.values():
            if wanted := [row.request.id for row in group.rows if row.request.id in row_ids]:
                given = group.pending()
                outputs |= {row_id: given[row_id] for row_id in wanted if row_id in given}
        return outputs

    def snapshot(
        self, row_id: str, parent: Stretch | None, cuts: Sequence[int], lend: bool = False
    ) -> RowSnapshot | None:
        """See ModelRunner.snapshot_row."""
        for group in self._groups.values():
            for i, row in enumerate(group.rows):
                if row.request.id == row_id:
                    return group.snapshot(i, parent, cuts, lend)
        return None

    def fill(self, row_id: str, stretches: Sequence[Stretch]) -> None:
        """Copy what is lent to a row, which stays. Unknown ids are ignored."""
        for group in self._groups.values():
            for i, row in enumerate(group.rows):
                if row.request.id == row_id:
                    group.fill(i, stretches)

    def leave(self, row_ids: Sequence[str], lent: Mapping[str, Sequence[Stretch]] | None = None) -> None:
        """Removes these rows; others go on as if they had never been there.

        lent: by row id the stretches that are filled from the rows' caches before these go.
        """
        gone, lent = set(row_ids), lent or {}
        for number, group in list(self._groups.items()):
            stay = [i for i, row in enumerate(group.rows) if row.request.id not in gone]
            ids = [row.request.id for row in group.rows]
            lent_here = {ids.index(row_id): stretches for row_id, stretches in lent.items() if row_id in ids}
            if not stay:
                del self._groups[number]
            if len(stay) < len(ids) and (stay or lent_here):
                group.leave(stay, lent_here)

    def step(self, num_drafts: int) -> dict[str, RowOutput]:
        """Every group once; all are launched before any is waited for."""
        started = [(group, group.start_step(num_drafts)) for group in self._groups.values()]
        outputs: dict[str, RowOutput] = {}
        for group, before in started:
            outputs |= group.finish_step(before)
        return outputs
