"""Loans: KV segments of snapshots that are only in the caches of the rows that continue them.

A row that continues a conversation needs all its keys and values in its own cache. KV segments at the end of the
snapshot that nothing else needs move there, and are copied back when the row finishes, is aborted or is preempted:
they exist once. KV segments that other prompts need as well, such as system prompts, are copied and stay.

A loan begins with the admission of the row, whose reservation covers all of its tokens: from then on the lent bytes
count as the row's (`promise`). The arrays move when the prompt begins (`lend`). Snapshots that the row stores at its
boundaries are lent from the beginning (`add`). A prompt that continues a lent snapshot gets a copy from the row
(`call_in`).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from engine.core.batch import ModelRunner
from engine.core.prefix_cache.cache import PrefixCache
from engine.core.prefix_cache.node import Entry, Held, Stretch


class Loans:
    """Tracks which KV segments are lent to which row; the cache counts their bytes."""

    def __init__(self, cache: PrefixCache, runner: ModelRunner):
        self._cache = cache
        self._runner = runner
        self._of_row: dict[str, list[Held]] = {}  # by row id, in the order of the tokens
        self._leaving: list[tuple[Held, list[Held]]] = []  # a chain's first node, and nodes to write first

    @property
    def row_ids(self) -> list[str]:
        """Ids of the rows with lent or promised KV segments."""
        return list(self._of_row)

    def promise(self, row_id: str, entry: Entry) -> bool:
        """Count the KV segments that the row will probably continue as the row's memory. Return whether there are
        any."""
        if row_id in self._of_row:
            return True
        return bool(self._lend(row_id, entry))

    def cancel(self, row_id: str) -> None:
        """Count promised KV segments that have not moved to the row as the cache's memory again.

        Segments that have moved stay lent: the row may have been preempted and not been dropped by the runner yet.
        """
        self._take_back_promised(row_id)

    def break_promise(self, row_id: str) -> None:
        """Revoke the promise to an admitted row, as `cancel`; evict other snapshots if the cache does not fit any
        more."""
        if self._take_back_promised(row_id):
            self._cache.fit()

    def lend(self, row_id: str, entry: Entry) -> list[Stretch]:
        """Lend an entry's KV segments to the row that is about to continue it; return the segments that move."""
        was_promised = self._take_back_promised(row_id)
        lent = self._lend(row_id, entry, was_promised and self._lacks_room(entry))
        if was_promised:  # fewer may be lent: another prompt may have continued the same snapshot meanwhile
            self._cache.fit(spared=(entry,))
        return [held.stretch for held in lent]

    def _take_back_promised(self, row_id: str) -> bool:
        """Count promised segments as the cache's again. Return whether there were any."""
        helds = self._pop(row_id)
        promised = [held for held in helds if not held.stretch.is_lent]
        for held in promised:
            self._cache.take_back(held)
        if len(promised) < len(helds):
            self._of_row[row_id] = [held for held in helds if held.stretch.is_lent]
        return bool(promised)

    def _lacks_room(self, entry: Entry) -> bool:
        """Return whether the cache cannot hold the parts of an entry that are not lent: it was read from disk for this
        row only."""
        lendable = sum(held.stretch_bytes for held in self._cache.lendable(entry.held))
        return self._cache.missing_bytes > lendable

    def _lend(self, row_id: str, entry: Entry, also_system: bool = False) -> list[Held]:
        assert entry.held is not None
        lent = list(self._cache.lendable(entry.held, also_system))[::-1]
        for held in lent:
            self._cache.lend(held, row_id, held.stretch_bytes)
        if lent:
            self._of_row[row_id] = lent
        return lent

    def add(self, row_id: str, held: Held, num_bytes: int) -> None:
        """Lend a new snapshot's KV segment, of about `num_bytes`, which has only ever been in the row's cache."""
        self._cache.lend(held, row_id, num_bytes)
        self._of_row.setdefault(row_id, []).append(held)

    def may_add(self, row_id: str, base: Held | None) -> bool:
        """Return whether a segment after `base` would extend the chain that is lent to the row."""
        lent = self._of_row.get(row_id)
        return not lent or (base is not None and lent[-1] in self._cache.chain(base.entry))

    def call_in(self, entry: Entry) -> bool:
        """Copy the lent KV segments of an entry's chain back from the rows. Return False if they do not fit."""
        lent = [held for held in self._cache.chain(entry) if held.stretch.is_lent]
        if not lent:
            return True
        if not self._cache.make_way_back(lent):
            return False
        by_row = defaultdict[str | None, list[Held]](list)
        for held in lent:
            by_row[held.lent_to].append(held)
        for row_id, helds in by_row.items():
            if row_id is not None:
                self._fill(row_id, helds)
            self._settle(helds)
        return not any(held.stretch.is_lent for held in lent)

    def _fill(self, row_id: str, helds: Sequence[Held]) -> None:
        """Copy KV segments back from a row. If the runner raises, segments that were not copied stay lent."""
        try:
            self._runner.fill(row_id, [held.stretch for held in helds])
        except Exception:
            helds = [held for held in helds if not held.stretch.is_lent]
            self._settle(helds)
            raise
        finally:
            left = [held for held in self._pop(row_id) if held not in helds]
            if left:
                self._of_row[row_id] = left

    def returning(
        self, row_ids: Iterable[str], is_to_write: Callable[[Entry], bool] = lambda entry: False
    ) -> dict[str, Sequence[Stretch]]:
        """Free memory for the KV segments of rows about to be dropped; return the segments to copy back, by row id.

        Segments that are worth less than what would be evicted for them are given up, from the end of the row on, once
        those to
        be written to disk have been copied back. `settle` and then `take_leaving` must follow.

        Args:
            row_ids: The rows.
            is_to_write: Whether an entry is to be written to disk before it is evicted.
        """
        returning = {}
        for row_id in row_ids:
            self.break_promise(row_id)
            lent, leaving = self._pop(row_id), list[Held]()
            while lent and not self._cache.make_way_back(lent):
                leaving.insert(0, lent.pop())
                if not self._to_write(leaving, is_to_write):
                    self._cache.evict_behind(leaving.pop())
                    lent = [held for held in lent if self._cache.is_stored(held)]
            for held in lent:  # counted now, before the next row's segments are considered
                self._cache.take_back(held)
            if lent:
                self._of_row[row_id] = list(lent)
            if leaving:
                to_write = self._to_write(leaving, is_to_write)
                self._leaving.append((leaving[0], to_write))
                lent += to_write
            if lent:
                returning[row_id] = [held.stretch for held in lent]
        return returning

    @staticmethod
    def _to_write(leaving: Sequence[Held], is_to_write: Callable[[Entry], bool]) -> list[Held]:
        """Return the nodes at the end of a chain that are written to disk before they are evicted."""
        return [held for held in leaving if held.snapshot is not None and is_to_write(held.entry)]

    def take_leaving(self, write: Callable[[Entry], None]) -> None:
        """Write copied-back segments of chains that the cache has no memory for, and evict them."""
        leaving, self._leaving = self._leaving, []
        for first, to_write in leaving:
            for held in to_write:
                if held.snapshot is not None and not held.stretch.is_lent:
                    write(held.entry)
            if self._cache.is_stored(first):
                self._cache.evict_behind(first)

    def settle(self, row_ids: Iterable[str]) -> None:
        """End the loans of rows that were dropped or failed. Segments that were not copied back are lost, with all
        their descendants."""
        self._settle([held for row_id in row_ids for held in self._pop(row_id)])

    def _settle(self, helds: Sequence[Held]) -> None:
        for held in helds:
            if held.stretch.is_lent:
                self._cache.evict_behind(held)
            else:
                self._cache.take_back(held)

    def _pop(self, row_id: str) -> list[Held]:
        """Remove a row's loans, and return those that are still stored."""
        return [held for held in self._of_row.pop(row_id, ()) if self._cache.is_stored(held)]
