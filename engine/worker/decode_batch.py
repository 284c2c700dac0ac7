"""All decoding rows, in decode groups.

In a group's cache every row takes the slots of the longest, and attention reads them all. A step reads the weights once
per group. core/memory/grouping.py assigns rows to groups before they join.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from engine.core.runner import Drafts, RowOutput, RowSnapshot
from engine.worker.compiled import CompiledForward
from engine.worker.decode import DecodeGroup, JoiningRow
from engine.worker.drafting_models import DraftingModels
from engine.worker.language_model import LanguageModel
from engine.worker.snapshot import DeviceSegment, StateSnapshot


class DecodeBatch:
    """Holds the decode groups by id."""

    def __init__(
        self, language_model: LanguageModel, heads: DraftingModels | None, vocab_size: int, compiled: bool = False
    ):
        self._language_model = language_model
        self._compiled = CompiledForward(language_model.decode) if compiled else None
        self._heads = heads
        self._vocab_size = vocab_size
        self._groups: dict[int, DecodeGroup] = {}  # by `Row.decode_group`

    def clear(self) -> None:
        """Drop all rows."""
        self._groups = {}

    @property
    def num_bytes(self) -> int:
        return sum(group.num_bytes for group in self._groups.values())

    def join(self, *new: JoiningRow) -> None:
        """Add rows to their decode groups, those of one group at once.

        When it raises, no other row has changed; some of the new rows may have joined and must be removed.
        """
        by_group: dict[int, list[JoiningRow]] = defaultdict(list)
        for one in new:
            by_group[one.row.decode_group].append(one)
        for number, (first, *others) in by_group.items():
            if number in self._groups:
                self._groups[number].join([first, *others])
                continue
            group = DecodeGroup(self._language_model, self._heads, self._vocab_size, first, self._compiled)
            if others and first.moves:  # the group has taken these layers, and is about to replace them
                for cache in (first.cache, *first.head_caches):
                    cache.clear()
            if others:
                group.join(others)
            self._groups[number] = group

    def pending(self, row_ids: Sequence[str]) -> dict[str, RowOutput]:
        """Return the outputs of the step in flight, see ModelRunner.pending."""
        outputs: dict[str, RowOutput] = {}
        for group in self._groups.values():
            if wanted := [one.row.id for one in group.rows if one.row.id in row_ids]:
                given = group.pending()
                outputs |= {row_id: given[row_id] for row_id in wanted if row_id in given}
        return outputs

    def snapshot(self, row_id: str, parent: DeviceSegment | None, lend: bool = False) -> RowSnapshot | None:
        """Take a snapshot of a row, see ModelRunner.snapshot_row."""
        place = self._place_of(row_id)
        return None if place is None else place[0].snapshot(place[1], parent, lend)

    def snapshot_prompt(
        self, row_id: str, num_tokens: int, parent: DeviceSegment | None, lend: bool = False
    ) -> StateSnapshot | None:
        """Take a snapshot of the first tokens of a row's prompt, see ModelRunner.snapshot. Raises KeyError."""
        if (place := self._place_of(row_id)) is None:
            raise KeyError(row_id)
        return place[0].snapshot_prompt(place[1], num_tokens, parent, lend)

    def fill(self, row_id: str, segments: Sequence[DeviceSegment]) -> None:
        """Copy KV segments lent to a row back; the row stays. Unknown ids are ignored."""
        if (place := self._place_of(row_id)) is not None:
            place[0].fill(place[1], segments)

    def _place_of(self, row_id: str) -> tuple[DecodeGroup, int] | None:
        """Return the group of a row and its index there; None if it is unknown."""
        for group in self._groups.values():
            for i, one in enumerate(group.rows):
                if one.row.id == row_id:
                    return group, i
        return None

    def remove(self, row_ids: Sequence[str], lent: Mapping[str, Sequence[DeviceSegment]] | None = None) -> None:
        """Remove rows, without effect on others.

        Args:
            row_ids: The rows; unknown ids are ignored.
            lent: KV segments to copy back from the rows' caches first, by row id.
        """
        removed, lent = set(row_ids), lent or {}
        for number, group in list(self._groups.items()):
            stay = [i for i, one in enumerate(group.rows) if one.row.id not in removed]
            ids = [one.row.id for one in group.rows]
            lent_here = {ids.index(row_id): segments for row_id, segments in lent.items() if row_id in ids}
            if not stay:
                del self._groups[number]
            if len(stay) < len(ids) and (stay or lent_here):
                group.remove(stay, lent_here)

    def step(self, drafts: Drafts) -> dict[str, RowOutput]:
        """Step every group once; all groups are launched before any is waited for."""
        started = [(group, group.start_step(drafts)) for group in self._groups.values()]
        outputs: dict[str, RowOutput] = {}
        for group, before in started:
            outputs |= group.finish_step(before)
        return outputs
